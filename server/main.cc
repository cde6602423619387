// shardd: the node daemon's process.
#include <signal.h>
#include <sys/resource.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/user_optimizer.h"
#include "proto/contract/version.h"
#include "server/config/config.h"
#include "server/daemon.h"

namespace {

void Log(const std::string& line) { std::fprintf(stderr, "shardd: %s\n", line.c_str()); }

std::optional<std::string> GetEnv(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

int Fail(const absl::Status& status) {
  Log(std::string(status.message()));
  return 1;
}

// A session takes five descriptors, and the usual soft limit of 1024 is for programs that use
// select.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// systemd's descriptor store, when this process runs under it.
shardd::store::DescriptorStore::Options ServiceManagerStore() {
  shardd::store::DescriptorStore::Options options;
  char** names = nullptr;
  const int count = sd_listen_fds_with_names(1, &names);
  for (int i = 0; i < count; ++i) {
    options.kept.push_back({names[i], shardd::contract::UniqueFd(SD_LISTEN_FDS_START + i)});
    std::free(names[i]);
  }
  std::free(names);
  if (std::getenv("NOTIFY_SOCKET") == nullptr) return options;
  options.keep = [](const std::string& name, int fd) -> absl::Status {
    const std::string message = "FDSTORE=1\nFDNAME=" + name + "\nFDPOLL=0";
    const int sent = sd_pid_notify_with_fds(0, 0, message.c_str(), &fd, 1);
    if (sent > 0) return absl::OkStatus();
    return shardd::contract::ErrnoStatus(-sent, "cannot notify the service manager");
  };
  options.drop = [](const std::string& name) {
    sd_notifyf(0, "FDSTOREREMOVE=1\nFDNAME=%s", name.c_str());
  };
  return options;
}

// How often a time limit is looked at, so that it is kept within a twentieth.
absl::Duration LookEvery(const shardd::v1::DaemonConfig& config) {
  double shortest = 3600;
  if (config.exit_when_idle_seconds() > 0) {
    shortest = std::min(shortest, config.exit_when_idle_seconds());
  }
  if (config.job_ttl_seconds() > 0) shortest = std::min(shortest, config.job_ttl_seconds());
  return absl::Seconds(std::clamp(shortest / 20, 0.05, 60.0));
}

// Waits for SIGTERM or SIGINT (blocked before any thread began), or for the daemon
// to have been idle for as long as the configuration says. Meanwhile jobs that nobody uses
// are spilled.
void WaitForEnd(const sigset_t& signals, shardd::Daemon* daemon,
                const shardd::v1::DaemonConfig& config) {
  const timespec look = absl::ToTimespec(LookEvery(config));
  while (true) {
    const int signal = sigtimedwait(&signals, nullptr, &look);
    if (signal > 0) {
      Log(signal == SIGTERM ? "ending: SIGTERM" : "ending: SIGINT");
      return;
    }
    if (config.job_ttl_seconds() > 0) daemon->SpillIdle(absl::Seconds(config.job_ttl_seconds()));
    const double idle_seconds = config.exit_when_idle_seconds();
    if (idle_seconds > 0 && daemon->IdleTime() > absl::Seconds(idle_seconds)) {
      Log("ending: no session for exit_when_idle_seconds");
      return;
    }
  }
}

// Before any thread begins: each is tried in a process of its own.
void LoadOptimizers(const std::string& paths) {
  for (const auto path : absl::StrSplit(paths, ':', absl::SkipEmpty())) {
    const std::string name(path);
    const shardd::kernels::LoadedOptimizer loaded = shardd::kernels::LoadUserOptimizer(name);
    if (loaded.optimizer == nullptr) {
      Log("optimizer library " + name + " is refused: " + loaded.problem);
    } else if (!shardd::kernels::AddOptimizer(loaded.optimizer)) {
      Log("optimizer library " + name + " is refused: there is an optimizer of its name, " +
          std::string(loaded.optimizer->name()));
    } else {
      Log("optimizer " + std::string(loaded.optimizer->name()) + " is loaded from " + name);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const absl::StatusOr<shardd::config::CommandLine> line =
      shardd::config::ParseCommandLine(std::vector<std::string>(argv + 1, argv + argc), GetEnv);
  if (!line.ok()) return Fail(line.status());
  if (line->help) {
    std::fputs(shardd::config::HelpText().c_str(), stdout);
    return 0;
  }
  if (line->version) {
    std::printf("shardd %s\n", shardd::contract::kVersion);
    return 0;
  }
  if (line->check_config) {
    std::string text;
    google::protobuf::util::JsonPrintOptions options;
    options.add_whitespace = true;
    options.preserve_proto_field_names = true;
    if (!google::protobuf::util::MessageToJsonString(line->config, &text, options).ok()) return 1;
    std::fputs(text.c_str(), stdout);
    return 0;
  }

  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  RaiseDescriptorLimit();

  LoadOptimizers(line->config.optimizer_libraries());

  absl::StatusOr<std::unique_ptr<shardd::Daemon>> daemon =
      shardd::Daemon::Start({line->config, Log,
                             [] {
                               Log("drained");
                               kill(getpid(), SIGTERM);
                             },
                             ServiceManagerStore()});
  if (!daemon.ok()) return Fail(daemon.status());
  Log("ready at " + (*daemon)->socket());
  sd_notifyf(0, "READY=1\nSTATUS=serving at %s\n", (*daemon)->socket().c_str());
  WaitForEnd(signals, daemon->get(), line->config);
  sd_notify(0, "STOPPING=1\nSTATUS=ending\n");
  daemon->reset();
  return 0;
}

// shardd: the node daemon's process.
#include <signal.h>
#include <sys/resource.h>
#include <systemd/sd-daemon.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "google/protobuf/util/json_util.h"
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

// Waits for SIGTERM or SIGINT (blocked before any thread began), or for the daemon
// to have been idle for as long as the configuration says.
void WaitForEnd(const sigset_t& signals, shardd::Daemon* daemon, double idle_seconds) {
  while (true) {
    const timespec second{1, 0};
    const int signal = idle_seconds > 0 ? sigtimedwait(&signals, nullptr, &second)
                                        : sigwaitinfo(&signals, nullptr);
    if (signal > 0) {
      Log(signal == SIGTERM ? "ending: SIGTERM" : "ending: SIGINT");
      return;
    }
    if (idle_seconds > 0 && daemon->IdleTime() > absl::Seconds(idle_seconds)) {
      Log("ending: no session for exit_when_idle_seconds");
      return;
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

  absl::StatusOr<std::unique_ptr<shardd::Daemon>> daemon =
      shardd::Daemon::Start({line->config, Log});
  if (!daemon.ok()) return Fail(daemon.status());
  Log("ready at " + (*daemon)->socket());
  sd_notifyf(0, "READY=1\nSTATUS=serving at %s\n", (*daemon)->socket().c_str());
  WaitForEnd(signals, daemon->get(), line->config.exit_when_idle_seconds());
  sd_notify(0, "STOPPING=1\nSTATUS=ending\n");
  daemon->reset();
  return 0;
}

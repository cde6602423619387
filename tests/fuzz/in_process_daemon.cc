#include "tests/fuzz/in_process_daemon.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "server/config/config.h"
#include "tests/support/ranks.h"

namespace shardd::test {

InProcessDaemon& InProcessDaemon::Get() {
  static auto* daemon = [] {
    auto* made = new InProcessDaemon();
    std::atexit([] { Get().RemoveDirectories(); });
    return made;
  }();
  return *daemon;
}

InProcessDaemon::InProcessDaemon() {
  DaemonOptions options;
  options.log = [](const std::string&) {};
  options.config.mutable_listen()->set_socket(dir_.path() + "/d.sock");
  options.config.mutable_store()->set_directory(state_.path() + "/state");
  options.config.mutable_memory()->set_budget_bytes(256 << 20);
  options.config.mutable_memory()->set_ring_bytes_max(16 << 20);
  options.config.mutable_step()->set_threads(2);
  options.config.set_job_ttl_seconds(-1);
  config::FillDefaults(geteuid(), "", &options.config);
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(std::move(options));
  if (!daemon.ok()) {
    std::fprintf(stderr, "fuzz set-up: %s\n", daemon.status().ToString().c_str());
    std::abort();
  }
  daemon_ = *std::move(daemon);
  ParameterSpec w;
  w.name = "w";
  w.shape = {100};
  bystander_ = OpenRank(daemon_->socket(), 0, 1, SmallJob("bystander", 1), {w});
}

void InProcessDaemon::RemoveDirectories() {
  std::error_code ignored;
  std::filesystem::remove_all(dir_.path(), ignored);
  std::filesystem::remove_all(state_.path(), ignored);
}

void InProcessDaemon::CheckBystander() {
  const auto decision =
      TakeStep(bystander_.get(), DType::kFloat32, [](uint32_t, size_t, uint64_t) { return 1.0f; });
  if (decision.ok() && decision->result == StepResult::kApplied) return;
  std::fprintf(stderr, "the bystander noticed: %s\n", decision.status().ToString().c_str());
  std::abort();
}

}  // namespace shardd::test

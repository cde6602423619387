// Starts the ranks of a job on this node and keeps them running.
#ifndef SHARDD_CLIENT_CLI_LAUNCHER_H_
#define SHARDD_CLIENT_CLI_LAUNCHER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardd::cli {

enum class Stream { kOut, kErr };

struct LaunchOptions {
  uint32_t ranks = 1;
  // How often each rank may be started again after it died (by a signal, or with
  // another exit code than 0).
  uint32_t max_restarts = 0;
  // Program (looked for in the PATH of `environment`) and arguments.
  std::vector<std::string> command;
  // "NAME=VALUE". RANK, LOCAL_RANK, WORLD_SIZE, SHARDD_ADDRESS and
  // SHARDD_RESTART_COUNT are set for each rank.
  std::vector<std::string> environment;
  std::string address;
  // What ranks that are told to end (SIGTERM) get before SIGKILL.
  absl::Duration grace = absl::Seconds(10);
  // Called before a rank is started again: to see to what it needs (a daemon). An
  // error is noted, and the rank has then failed for good.
  std::function<absl::Status()> before_restart;
  // One line that a rank wrote, without its newline. Lines longer than 64 KiB come
  // in pieces; a last one without newline comes as it is.
  std::function<void(uint32_t rank, Stream stream, std::string_view line)> on_line;
  // What the launcher itself has to say: restarts, ends, signals.
  std::function<void(const std::string& text)> on_note;
};

struct RankResult {
  uint32_t restarts = 0;
  // Of its last process: the exit code, or 128 + the signal that killed it.
  int exit_code = 0;
};

struct LaunchResult {
  // 0 when all ranks ended with 0; else that of the rank that first failed for good.
  int exit_code = 0;
  std::vector<RankResult> ranks;
};

// Runs until every rank has ended. When one fails for good the others are
// terminated. SIGINT, SIGTERM and SIGHUP to this process go to all ranks, and
// nothing is restarted afterwards; a second one kills them. Each rank leads its own
// process group, which is killed when the rank dies (a data loader that survives it
// would hold its sockets); stdin is /dev/null. A rank is killed by the kernel when
// this process dies.
//
// To be called from the main thread, with no other thread that could take these
// signals. InvalidArgument: nothing to run; NotFound: no such program.
absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_LAUNCHER_H_

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
#include "client/retry.h"
#include "proto/contract/fd_passing.h"

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
  // The daemon that the ranks use, if it is this launcher's to mind: a pidfd, readable once it has
  // ended. Then `restart_daemon` starts another in its place, which the ranks re-attach to by
  // themselves, and gives its pidfd; until it succeeds an error is noted and it is tried again.
  int daemon_pidfd = -1;
  std::function<absl::StatusOr<contract::UniqueFd>()> restart_daemon;
  // Pauses before the second and later restarts of a rank, or of the daemon, that did not live
  // for `settled`; the first one is at once.
  Backoff backoff = {.first = absl::Milliseconds(100), .most = absl::Seconds(10)};
  absl::Duration settled = absl::Seconds(30);
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

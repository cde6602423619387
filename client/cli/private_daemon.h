// The daemon of one user, started where there is no other.
#ifndef SHARDD_CLIENT_CLI_PRIVATE_DAEMON_H_
#define SHARDD_CLIENT_CLI_PRIVATE_DAEMON_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardd::cli {

struct PrivateDaemonOptions {
  // Socket, lock and log lie here. Made with mode 0700 when it is not there; one
  // that belongs to somebody else, or that others may write, is refused.
  std::string directory;
  // The daemon's program.
  std::string binary;
  // Flags besides --listen.socket.
  std::vector<std::string> flags;
  absl::Duration start_timeout = absl::Seconds(60);
};

struct PrivateDaemon {
  std::string socket;
  // 0: it was running already, and is not ours to end.
  pid_t started_pid = 0;
};

// Finds the daemon in options.directory, or starts one there and waits until it
// answers. Two callers at once end with one daemon (a lock is held meanwhile). It
// runs in a session of its own, so that Ctrl-C does not reach it; its output goes
// to shardd.log. Unavailable: it did not come up, with the end of its log.
absl::StatusOr<PrivateDaemon> EnsurePrivateDaemon(const PrivateDaemonOptions& options);

// Ends a daemon that EnsurePrivateDaemon has started: SIGTERM, then waits.
// DeadlineExceeded: it did not end in `timeout` and was killed.
absl::Status EndPrivateDaemon(const PrivateDaemon& daemon, absl::Duration timeout);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_PRIVATE_DAEMON_H_

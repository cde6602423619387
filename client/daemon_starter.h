// A daemon in a directory of its user's own: found there, or started.
#ifndef SHARDD_CLIENT_DAEMON_STARTER_H_
#define SHARDD_CLIENT_DAEMON_STARTER_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attach_connection.h"
#include "proto/contract/fd_passing.h"

namespace shardd {

// Makes the directory with mode 0700 if it is not there. PermissionDenied: it is no
// directory, belongs to somebody else, or others may write to it.
absl::Status MakePrivateDirectory(const std::string& path);

// Waits for the lock under which a daemon is started or ended in the directory.
absl::StatusOr<contract::UniqueFd> LockDaemonDirectory(const std::string& directory);

struct DaemonStart {
  std::string directory;           // made by MakePrivateDirectory
  std::string binary;              // a path, or a name to look for in PATH
  std::vector<std::string> flags;  // besides --listen.socket
  absl::Duration timeout = absl::Seconds(60);
};

struct DaemonInDirectory {
  std::string socket_path;  // DIRECTORY/shardd.sock
  std::unique_ptr<AttachConnection> attach;
  pid_t started_pid = 0;  // a child of this process; 0: it was there already
};

// Attaches to the daemon in the directory, starting it if none answers, and waits
// until it does. Callers at the same time end with one daemon. It runs in a session
// of its own, so that Ctrl-C does not reach it; its output goes to
// DIRECTORY/shardd.log. Unavailable: it ended, with the last line of its log, or it
// did not answer in time and was killed.
absl::StatusOr<DaemonInDirectory> AttachOrStartDaemon(const DaemonStart& start);

// SIGTERM to a process, then waits until it has ended; a child is reaped.
// DeadlineExceeded: it goes on running.
absl::Status EndDaemon(const contract::UniqueFd& pidfd, pid_t pid, absl::Duration timeout);

}  // namespace shardd

#endif  // SHARDD_CLIENT_DAEMON_STARTER_H_

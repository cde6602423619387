// A daemon of one trainer's own, for when nobody runs one: started on the first Open,
// found again by the next trainer of the same job, ended by Close.
#ifndef SHARDD_CLIENT_PRIVATE_DAEMON_H_
#define SHARDD_CLIENT_PRIVATE_DAEMON_H_

#include <sys/types.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/daemon_address.h"

namespace shardd {

// Attaches to the private daemon of this user and job, starting it if it does not
// run. One process at a time does so: a lock file in the directory is held meanwhile.
// It runs in a session of its own, so that Ctrl-C in the trainer does not reach it.
absl::StatusOr<FoundDaemon> StartPrivateDaemon(const SessionOptions& options,
                                               const std::string& job, const DaemonPlaces& places);

// Ends the private daemon `pid` in `directory` with SIGTERM and waits until it has
// gone. `may_end` is asked under the lock, so that no session can come meanwhile; if
// it says no, or fails, nothing is ended.
absl::Status EndPrivateDaemon(const std::string& directory, pid_t pid,
                              const std::function<absl::StatusOr<bool>()>& may_end);

}  // namespace shardd

#endif  // SHARDD_CLIENT_PRIVATE_DAEMON_H_

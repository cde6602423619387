#include "client/daemon_address.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/private_daemon.h"

namespace shardd {

namespace {

absl::StatusOr<FoundDaemon> AttachAt(const std::string& path, absl::Duration timeout) {
  FoundDaemon found;
  found.socket_path = path;
  absl::StatusOr<std::unique_ptr<AttachConnection>> attach =
      AttachConnection::Connect(path, absl::Now() + timeout);
  if (!attach.ok()) return attach.status();
  found.attach = *std::move(attach);
  return found;
}

}  // namespace

absl::StatusOr<FoundDaemon> FindDaemon(const SessionOptions& options, const std::string& job,
                                       const DaemonPlaces& places) {
  if (!options.address.empty()) {
    std::string path = options.address;
    if (path.starts_with("unix:")) path = path.substr(5);
    if (path.empty() || (path[0] != '/' && path[0] != '.')) {
      return absl::InvalidArgumentError(
          absl::StrCat("the daemon's address is '", options.address,
                       "'; give the path of its Unix socket, as in unix:/run/shardd/shardd.sock"));
    }
    return AttachAt(path, options.connect_timeout);
  }
  if (access(places.system_socket.c_str(), F_OK) == 0) {
    return AttachAt(places.system_socket, options.connect_timeout);
  }
  if (options.world_size > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", options.rank, " of ", options.world_size,
        " has no daemon to share: no address is "
        "given and there is no ",
        places.system_socket,
        "; start the ranks with `shardctl run`, or start shardd and set SHARDD_ADDRESS to its "
        "socket"));
  }
  return StartPrivateDaemon(options, job, places);
}

absl::StatusOr<FoundDaemon> FindDaemonAgain(const FoundDaemon& before,
                                            const SessionOptions& options, const std::string& job,
                                            absl::Time deadline, const DaemonPlaces& places) {
  if (!before.private_directory.empty()) {
    // It may have been started by this process.
    if (before.attach->daemon_pid() > 0) waitpid(before.attach->daemon_pid(), nullptr, WNOHANG);
    SessionOptions start = options;
    start.connect_timeout = std::max(options.connect_timeout, deadline - absl::Now());
    return StartPrivateDaemon(start, job, places);
  }
  absl::StatusOr<FoundDaemon> found = AttachAt(before.socket_path, absl::ZeroDuration());
  // A daemon makes its socket before it opens it to others.
  if (absl::IsPermissionDenied(found.status())) {
    return absl::UnavailableError(found.status().message());
  }
  return found;
}

}  // namespace shardd

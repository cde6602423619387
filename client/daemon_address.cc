#include "client/daemon_address.h"

#include <unistd.h>

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

}  // namespace shardd

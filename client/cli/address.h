// Which daemon a command talks to.
#ifndef SHARDD_CLIENT_CLI_ADDRESS_H_
#define SHARDD_CLIENT_CLI_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/cli/environment.h"

namespace shardd::cli {

struct DaemonAddress {
  // Of the gRPC socket.
  std::string socket;
  // True when somebody named it: then nothing else is tried, and no daemon is
  // started in its place.
  bool explicit_choice = false;
};

// $XDG_RUNTIME_DIR/shardd, else /tmp/shardd-UID: where this user's own daemon
// keeps its socket, lock and log.
std::string PrivateDirectory(const Environment& environment);

// In this order: `flag` (--address), SHARDD_ADDRESS, the system's socket if there is
// one, the socket in PrivateDirectory. An address is a path or "unix:PATH";
// InvalidArgument for others ("host:port").
absl::StatusOr<DaemonAddress> ResolveAddress(const std::string& flag,
                                             const Environment& environment);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_ADDRESS_H_

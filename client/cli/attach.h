// The attach socket as tools use it: a token for calls (docs/formats/attach.md).
#ifndef SHARDD_CLIENT_CLI_ATTACH_H_
#define SHARDD_CLIENT_CLI_ATTACH_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/contract/fd_passing.h"

namespace shardd::cli {

struct Attachment {
  // The token is good for as long as this is open.
  contract::UniqueFd connection;
  std::string token;
  std::string daemon_version;
};

// Says hello to the daemon whose gRPC socket is `socket`, trying again until
// `timeout` while nobody listens there. Unavailable: nobody did; PermissionDenied:
// the socket is not ours to use; FailedPrecondition: the daemon refused, and why.
absl::StatusOr<Attachment> Attach(const std::string& socket, absl::Duration timeout);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_ATTACH_H_

// The attach socket (docs/formats/attach.md): this session's life line.
#ifndef SHARDD_CLIENT_ATTACH_CONNECTION_H_
#define SHARDD_CLIENT_ATTACH_CONNECTION_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/contract/fd_passing.h"

namespace shardd {

// Threads: RingDoorbell, Gone may be called by any; the others by one at a time.
class AttachConnection {
 public:
  // Connects to `grpc_path` + ".attach" and says hello; waits for the socket to
  // appear until `deadline`. Unavailable: nobody listens there.
  // FailedPrecondition: the daemon speaks another protocol version (its words).
  static absl::StatusOr<std::unique_ptr<AttachConnection>> Connect(const std::string& grpc_path,
                                                                   absl::Time deadline);

  const std::string& token() const { return token_; }      // goes into every RPC
  uint64_t session() const { return session_; }            // nonce
  const std::string& version() const { return version_; }  // of the daemon
  // The process that listens on the socket; 0 when it is in another pid namespace.
  pid_t daemon_pid() const { return daemon_pid_; }

  struct Segments {
    contract::UniqueFd weights;
    contract::UniqueFd window;
  };
  // Hands over the ring and receives what the daemon shares. InvalidArgument: the
  // daemon refused the ring (its words).
  absl::StatusOr<Segments> ExchangeSegments(int ring_fd);

  // Tells the daemon to look at the ring. A full queue means that it was told
  // already; a daemon that is gone shows elsewhere.
  void RingDoorbell() const;

  // Whether the daemon has hung up. Does not block. With `why`, its parting words.
  bool Gone(std::string* why = nullptr) const;

  // Ends the session: a daemon that lives lets go of its place. Gone() then holds.
  void HangUp() const;

 private:
  AttachConnection() = default;
  absl::Status SayHello(absl::Time deadline);

  contract::UniqueFd socket_;
  std::string token_;
  uint64_t session_ = 0;
  std::string version_;
  pid_t daemon_pid_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_ATTACH_CONNECTION_H_

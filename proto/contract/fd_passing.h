// Unix-socket helpers: file descriptors in messages, and owned descriptors.
#ifndef SHARDD_PROTO_CONTRACT_FD_PASSING_H_
#define SHARDD_PROTO_CONTRACT_FD_PASSING_H_

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardd::contract {

// Owns a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) Reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { Reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void Reset(int fd = -1);
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// A status for the errno of a failed call: "ACTION OBJECT: strerror". Maps errno
// to the nearest status code.
absl::Status ErrnoStatus(int error, const std::string& what);

// Connects to / listens on a Unix socket of `type` (SOCK_SEQPACKET, SOCK_STREAM),
// close-on-exec. Paths longer than sun_path are refused by name.
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, int type);
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, int backlog);

// Sends one message with `fds`. `flags` as for sendmsg; MSG_NOSIGNAL is added.
// Unavailable: the peer is gone, or (with MSG_DONTWAIT) its queue is full.
absl::Status SendMessage(int socket, std::span<const std::byte> message, std::span<const int> fds,
                         int flags = 0);

// Receives one message of exactly buffer.size() bytes and at most max_fds
// descriptors (close-on-exec; surplus ones are closed and it is InvalidArgument, as
// is another size). Unavailable: nothing there (MSG_DONTWAIT). OutOfRange: the
// peer has closed.
absl::StatusOr<std::vector<UniqueFd>> ReceiveMessage(int socket, std::span<std::byte> buffer,
                                                     size_t max_fds, int flags = 0);

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_FD_PASSING_H_

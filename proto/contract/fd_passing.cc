#include "proto/contract/fd_passing.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardd::contract {

namespace {

// SCM_RIGHTS carries at most this many here; no message of ours has more than 2.
constexpr size_t kMaxFds = 8;

absl::StatusOr<sockaddr_un> Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("socket path '", path, "' has ", path.size(), " bytes; it must have 1 to ",
                     sizeof(address.sun_path) - 1, ": choose a shorter directory"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

}  // namespace

void UniqueFd::Reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

absl::Status ErrnoStatus(int error, const std::string& what) {
  return absl::ErrnoToStatus(error, what);
}

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, int type) {
  absl::StatusOr<sockaddr_un> address = Address(path);
  if (!address.ok()) return address.status();
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!fd) return ErrnoStatus(errno, "cannot make a Unix socket");
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot connect to ", path));
  }
  return fd;
}

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, int backlog) {
  absl::StatusOr<sockaddr_un> address = Address(path);
  if (!address.ok()) return address.status();
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return ErrnoStatus(errno, "cannot make a Unix socket");
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot bind ", path));
  }
  if (listen(fd.get(), backlog) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot listen on ", path));
  }
  return fd;
}

absl::Status SendMessage(int socket, std::span<const std::byte> message, std::span<const int> fds,
                         int flags) {
  if (fds.size() > kMaxFds) return absl::InvalidArgumentError("too many descriptors in a message");
  iovec data{const_cast<std::byte*>(message.data()), message.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(cmsg), fds.data(), fds.size() * sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &header, flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    if (errno == EAGAIN || errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) {
      return absl::UnavailableError(absl::StrCat("cannot send: ", std::strerror(errno)));
    }
    return ErrnoStatus(errno, "cannot send a message");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<UniqueFd>> ReceiveMessage(int socket, std::span<std::byte> buffer,
                                                     size_t max_fds, int flags) {
  iovec data{buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t got;
  do {
    // MSG_TRUNC: SEQPACKET then returns the message's true length.
    got = recvmsg(socket, &header, flags | MSG_CMSG_CLOEXEC | MSG_TRUNC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN) return absl::UnavailableError("no message");
    if (errno == ECONNRESET) return absl::OutOfRangeError("the peer has closed the connection");
    return ErrnoStatus(errno, "cannot receive a message");
  }
  std::vector<UniqueFd> fds;
  for (cmsghdr* cmsg = CMSG_FIRSTHDR(&header); cmsg != nullptr; cmsg = CMSG_NXTHDR(&header, cmsg)) {
    if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(cmsg) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  if (got == 0) return absl::OutOfRangeError("the peer has closed the connection");
  if (static_cast<size_t>(got) != buffer.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", got, " bytes where ", buffer.size(), " are expected"));
  }
  if (fds.size() > max_fds || (header.msg_flags & MSG_CTRUNC) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message with more than ", max_fds, " descriptors"));
  }
  return fds;
}

}  // namespace shardd::contract

#include "server/control/attach_server.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "proto/contract/segments.h"
#include "server/step/job.h"
#include "server/step/ring.h"

// Linux 6.5; older C libraries do not name it.
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace shardd::control {

namespace {

using contract::AttachKind;
using contract::AttachMessage;
using contract::UniqueFd;

void SendError(int fd, const absl::Status& status) {
  AttachMessage message;
  message.kind = static_cast<uint16_t>(AttachKind::kError);
  message.protocol_version = contract::kProtocolVersion;
  const size_t n = std::min(status.message().size(), sizeof(message.text) - 1);
  std::memcpy(message.text, status.message().data(), n);
  contract::SendMessage(fd, std::as_bytes(std::span(&message, 1)), {}, MSG_DONTWAIT).IgnoreError();
}

// The peer's process. pidfd_open may catch another process that took the pid, so
// the peer must still be connected afterwards.
absl::StatusOr<UniqueFd> PeerPidfd(int socket, pid_t pid) {
  int fd = -1;
  socklen_t size = sizeof(fd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0) return UniqueFd(fd);
  UniqueFd opened(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!opened) return contract::ErrnoStatus(errno, absl::StrCat("cannot watch process ", pid));
  char byte;
  if (recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
    return absl::UnavailableError(absl::StrCat("process ", pid, " has gone"));
  }
  return opened;
}

}  // namespace

AttachServer::AttachServer(AttachOptions options, UniqueFd listener, SessionRegistry* registry)
    : options_(std::move(options)), listener_(std::move(listener)), registry_(registry) {}

AttachServer::~AttachServer() {
  Stop();
  if (epoll_ >= 0) close(epoll_);
  if (event_ >= 0) close(event_);
}

void AttachServer::Start() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  OpenSpare();
  for (int fd : {event_, listener_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
  thread_ = std::thread([this] { Main(); });
}

void AttachServer::Stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(event_, &one, sizeof(one));
  thread_.join();
  listener_.Reset();
}

void AttachServer::Main() {
  pthread_setname_np(pthread_self(), "shardd-attach");
  std::array<epoll_event, 64> events;
  while (!stop_) {
    const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < count && !stop_; ++i) {
      const int fd = events[static_cast<size_t>(i)].data.fd;
      if (fd == listener_.get()) {
        Accept();
      } else if (fd != event_) {
        OnReadable(fd);
      }
    }
  }
}

void AttachServer::OpenSpare() { spare_.Reset(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

void AttachServer::Accept() {
  while (true) {
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == EMFILE || errno == ENFILE) && spare_) {
      // Left in the backlog it would be reported again and again.
      spare_.Reset();
      socket.Reset(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      const bool waiting = static_cast<bool>(socket);
      if (waiting) {
        SendError(socket.get(),
                  absl::ResourceExhaustedError("the daemon has no file descriptors left; raise its "
                                               "RLIMIT_NOFILE (LimitNOFILE= in shardd.service)"));
      }
      socket.Reset();
      OpenSpare();
      if (waiting) continue;
      return;  // accept says EMFILE before it looks whether anybody waits
    }
    if (!socket) return;
    if (connections_.size() >= options_.max_connections) {
      SendError(socket.get(),
                absl::ResourceExhaustedError("too many connections; try again later"));
      continue;
    }
    const int fd = socket.get();
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.fd = fd;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) continue;
    Connection& connection = connections_[fd];
    connection.socket = std::move(socket);
    connection.fd = fd;
  }
}

void AttachServer::OnReadable(int fd) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  Connection& connection = it->second;
  AttachMessage message;
  absl::StatusOr<std::vector<UniqueFd>> fds =
      contract::ReceiveMessage(fd, std::as_writable_bytes(std::span(&message, 1)), 1, MSG_DONTWAIT);
  if (absl::IsUnavailable(fds.status())) return;
  absl::Status status = fds.status();
  if (absl::IsOutOfRange(status)) return Drop(fd);
  if (status.ok() && message.magic != contract::kAttachMagic) {
    status = absl::InvalidArgumentError("the message is not one of shardd's");
  }
  if (status.ok()) {
    switch (static_cast<AttachKind>(message.kind)) {
      case AttachKind::kHello:
        status = OnHello(&connection, message);
        break;
      case AttachKind::kSegments:
        status = fds->size() == 1
                     ? OnSegments(&connection, std::move(fds->front()))
                     : absl::InvalidArgumentError("kSegments comes with one descriptor, the ring");
        break;
      case AttachKind::kDoorbell:
        return;  // before its ring is there: nothing to look at
      default:
        status = absl::InvalidArgumentError(absl::StrCat("unknown message kind ", message.kind));
    }
  }
  if (!status.ok()) {
    SendError(fd, status);
    Drop(fd);
  }
}

absl::Status AttachServer::OnHello(Connection* connection, const AttachMessage& message) {
  if (connection->session != nullptr) {
    return absl::FailedPreconditionError("this connection has said hello before");
  }
  if (message.protocol_version < contract::kOldestProtocolVersion ||
      message.protocol_version > contract::kProtocolVersion) {
    options_.counters->refused_calls += 1;
    return absl::FailedPreconditionError(
        absl::StrCat("the client speaks protocol ", message.protocol_version, ", this daemon ",
                     contract::kOldestProtocolVersion, " to ", contract::kProtocolVersion,
                     "; install matching versions"));
  }
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(connection->fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return contract::ErrnoStatus(errno, "cannot tell the peer's user");
  }
  absl::StatusOr<UniqueFd> pidfd = PeerPidfd(connection->fd, peer.pid);
  if (!pidfd.ok()) return pidfd.status();
  UniqueFd socket(fcntl(connection->fd, F_DUPFD_CLOEXEC, 0));
  absl::StatusOr<std::shared_ptr<step::Session>> session =
      registry_->Create(peer.uid, peer.pid, std::move(socket), *std::move(pidfd));
  if (!session.ok()) return session.status();
  AttachMessage reply;
  reply.kind = static_cast<uint16_t>(AttachKind::kHello);
  reply.protocol_version = contract::kProtocolVersion;
  std::memcpy(reply.token, (*session)->token.data(), sizeof(reply.token));
  reply.session = (*session)->nonce;
  std::memcpy(reply.text, options_.version.data(),
              std::min(options_.version.size(), sizeof(reply.text) - 1));
  connection->session = *session;
  return contract::SendMessage(connection->fd, std::as_bytes(std::span(&reply, 1)), {},
                               MSG_DONTWAIT);
}

absl::Status AttachServer::OnSegments(Connection* connection, UniqueFd ring_fd) {
  const std::shared_ptr<step::Session> session = connection->session;
  const std::shared_ptr<step::Job> job = session == nullptr ? nullptr : session->GetJob();
  if (job == nullptr) {
    return absl::FailedPreconditionError("kSegments before Open; call Open first");
  }
  absl::StatusOr<std::unique_ptr<step::Ring>> ring =
      step::Ring::Map(std::move(ring_fd), options_.ring_bytes_max, options_.budget);
  if (!ring.ok()) return ring.status();
  // From here on the job's thread reads this connection.
  epoll_ctl(epoll_, EPOLL_CTL_DEL, connection->fd, nullptr);
  connections_.erase(connection->fd);
  job->AttachRing(
      session, *std::move(ring), [session](absl::StatusOr<step::AttachedRing> attached) {
        const int fd = session->socket.get();
        if (!attached.ok()) {
          SendError(fd, attached.status());
          shutdown(fd, SHUT_RDWR);
          return;
        }
        AttachMessage reply;
        reply.kind = static_cast<uint16_t>(AttachKind::kSegments);
        reply.protocol_version = contract::kProtocolVersion;
        const std::array<int, 2> fds = {attached->weights.get(), attached->window.get()};
        contract::SendMessage(fd, std::as_bytes(std::span(&reply, 1)), fds, MSG_DONTWAIT)
            .IgnoreError();
      });
  return absl::OkStatus();
}

void AttachServer::Drop(int fd) {
  const auto it = connections_.find(fd);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
  const std::shared_ptr<step::Session> session = std::move(it->second.session);
  connections_.erase(it);
  if (!spare_) OpenSpare();
  if (session == nullptr) return;
  // A job that the session is in sees the hang-up itself, if need be by this.
  shutdown(session->socket.get(), SHUT_RDWR);
  if (session->GetJob() == nullptr) registry_->Remove(*session);
}

}  // namespace shardd::control

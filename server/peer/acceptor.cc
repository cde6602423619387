#include "server/peer/acceptor.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "server/config/peer_config.h"

namespace shardd::peer {

namespace {

using contract::UniqueFd;

constexpr size_t kMaxConnections = 1024;

std::string Endpoint(const sockaddr* address, socklen_t size) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (getnameinfo(address, size, host.data(), host.size(), port.data(), port.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "?";
  }
  const bool six = address->sa_family == AF_INET6;
  return absl::StrCat(six ? "[" : "", host.data(), six ? "]:" : ":", port.data());
}

uint16_t BoundPort(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(Options options) {
  std::unique_ptr<Acceptor> acceptor(new Acceptor(std::move(options)));
  const std::string& where = acceptor->options_.address;
  absl::StatusOr<config::HostPort> parts = config::SplitHostPort(where);
  if (!parts.ok()) return parts.status();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(parts->host.c_str(), parts->port.c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer.listen '", where, "' cannot be resolved: ", gai_strerror(error)));
  }
  int last = 0;
  for (const addrinfo* at = found; at != nullptr && !acceptor->listener_; at = at->ai_next) {
    UniqueFd fd(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int one = 1;
    if (fd) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (fd && bind(fd.get(), at->ai_addr, at->ai_addrlen) == 0 && listen(fd.get(), 128) == 0) {
      acceptor->listener_ = std::move(fd);
    } else {
      last = errno;
    }
  }
  freeaddrinfo(found);
  if (!acceptor->listener_) {
    return contract::ErrnoStatus(last, absl::StrCat("cannot listen at peer.listen ", where));
  }
  acceptor->port_ = BoundPort(acceptor->listener_.get());
  return acceptor;
}

Acceptor::~Acceptor() { Stop(); }

void Acceptor::Start() {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  event_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  for (int fd : {event_.get(), listener_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }
  thread_ = std::thread([this] { Main(); });
}

void Acceptor::Stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(event_.get(), &one, sizeof(one));
  thread_.join();
}

void Acceptor::Main() {
  pthread_setname_np(pthread_self(), "shardd-accept");
  while (!stop_) {
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
    for (int i = 0; i < count; ++i) {
      const int fd = events[static_cast<size_t>(i)].data.fd;
      if (fd == listener_.get()) {
        Accept();
      } else if (fd != event_.get()) {
        Ended(fd);
      }
    }
  }
}

void Acceptor::Accept() {
  while (true) {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    UniqueFd fd(accept4(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size,
                        SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) return;
    const std::string from = Endpoint(reinterpret_cast<sockaddr*>(&address), size);
    UniqueFd watch(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    {
      std::lock_guard lock(mutex_);
      if (!watch || connections_.size() >= kMaxConnections) {
        options_.on_refused(from);
        continue;
      }
      epoll_event event{};
      event.events = EPOLLRDHUP;
      event.data.fd = watch.get();
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, watch.get(), &event);
      Connection& connection = connections_[watch.get()];
      connection.from = from;
      connection.watch = std::move(watch);
    }
    options_.on_connection(std::move(fd));
  }
}

void Acceptor::Ended(int fd) {
  Connection ended;
  {
    std::lock_guard lock(mutex_);
    const auto it = connections_.find(fd);
    if (it == connections_.end()) return;
    ended = std::move(it->second);
    connections_.erase(it);
  }
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  if (!ended.admitted) options_.on_refused(ended.from);
}

void Acceptor::Admit(const std::string& endpoint) {
  std::lock_guard lock(mutex_);
  for (auto& [fd, connection] : connections_) {
    if (connection.from == endpoint) connection.admitted = true;
  }
}

}  // namespace shardd::peer

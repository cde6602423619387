#include "tests/support/tcp_proxy.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <vector>

namespace shardd::test {

namespace {

using contract::UniqueFd;

constexpr size_t kMaxPending = 1 << 18;

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

}  // namespace

TcpProxy::TcpProxy() {
  listener_ = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  event_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener_.get(), 64) != 0 ||
      getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::abort();
  }
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { Main(); });
}

TcpProxy::~TcpProxy() {
  stop_ = true;
  Ring();
  thread_.join();
}

void TcpProxy::Set(bool cut) {
  cut_ = cut;
  Ring();
}

void TcpProxy::BreakConnections() {
  break_ = true;
  Ring();
}

void TcpProxy::Ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(event_.get(), &one, sizeof(one));
}

void TcpProxy::Accept() {
  UniqueFd in(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!in) return;
  const uint16_t target = target_;
  UniqueFd out(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = Loopback(target);
  if (target == 0 ||
      connect(out.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return;
  }
  for (int fd : {in.get(), out.get()}) fcntl(fd, F_SETFL, O_NONBLOCK);
  Pair& pair = pairs_.emplace_back();
  pair.a.fd = std::move(in);
  pair.b.fd = std::move(out);
}

// Reads from one half and writes to the other as far as that goes; false: the pair is over.
bool TcpProxy::Pass(Half* from, Half* to, short events) {
  if ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && !from->ended &&
      to->pending.size() < kMaxPending) {
    char buffer[65536];
    const ssize_t n = read(from->fd.get(), buffer, sizeof(buffer));
    if (n > 0) {
      to->pending.append(buffer, static_cast<size_t>(n));
    } else if (n == 0 || errno != EAGAIN) {
      from->ended = true;
    }
  }
  while (!to->pending.empty()) {
    const ssize_t n = send(to->fd.get(), to->pending.data(), to->pending.size(), MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN;
    to->pending.erase(0, static_cast<size_t>(n));
  }
  return !from->ended;
}

void TcpProxy::Main() {
  while (!stop_) {
    std::vector<pollfd> fds = {{event_.get(), POLLIN, 0}};
    if (!cut_) {
      fds.push_back({listener_.get(), POLLIN, 0});
      for (const Pair& pair : pairs_) {
        for (const auto& [half, other] : {std::pair{&pair.a, &pair.b}, {&pair.b, &pair.a}}) {
          const bool reads = other->pending.size() < kMaxPending;
          fds.push_back(
              {half->fd.get(),
               static_cast<short>((reads ? POLLIN : 0) | (half->pending.empty() ? 0 : POLLOUT)),
               0});
        }
      }
    }
    poll(fds.data(), fds.size(), -1);
    uint64_t drained;
    [[maybe_unused]] const ssize_t n = read(event_.get(), &drained, sizeof(drained));
    if (break_.exchange(false)) {
      pairs_.clear();
      continue;
    }
    if (cut_ || fds.size() < 2) continue;
    size_t at = 2;
    for (auto pair = pairs_.begin(); pair != pairs_.end();) {
      const short a = fds[at++].revents, b = fds[at++].revents;
      const bool there = Pass(&pair->a, &pair->b, a), back = Pass(&pair->b, &pair->a, b);
      pair = there && back ? std::next(pair) : pairs_.erase(pair);
    }
    if (fds[1].revents != 0) Accept();
  }
}

}  // namespace shardd::test

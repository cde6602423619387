#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "client/cli/fake_daemon.h"

namespace shardd::cli {

contract::AttachMessage HelloAnswer(const std::string& version) {
  contract::AttachMessage answer;
  answer.kind = static_cast<uint16_t>(contract::AttachKind::kHello);
  std::memcpy(answer.token, "fake token 16 by", contract::kTokenBytes);
  strncpy(answer.text, version.c_str(), sizeof(answer.text) - 1);
  return answer;
}

FakeAttachServer::FakeAttachServer(const std::string& socket, const contract::AttachMessage& answer)
    : path_(socket + contract::kAttachSuffix), stop_(eventfd(0, EFD_CLOEXEC)) {
  unlink(path_.c_str());
  absl::StatusOr<contract::UniqueFd> listener =
      contract::ListenUnix(path_, SOCK_SEQPACKET, /*backlog=*/16);
  if (!listener.ok()) abort();
  listener_ = std::move(*listener);
  thread_ = std::thread([this, answer] { Serve(answer); });
}

FakeAttachServer::~FakeAttachServer() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(stop_.get(), &one, sizeof(one));
  thread_.join();
  unlink(path_.c_str());
}

void FakeAttachServer::Serve(contract::AttachMessage answer) {
  std::vector<contract::UniqueFd> connections;
  while (true) {
    std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const contract::UniqueFd& fd : connections) polled.push_back({fd.get(), POLLIN, 0});
    poll(polled.data(), polled.size(), -1);
    if (polled[0].revents != 0) return;
    for (size_t i = connections.size(); i-- > 0;) {
      if (polled[2 + i].revents == 0) continue;
      contract::AttachMessage hello;
      if (!contract::ReceiveMessage(connections[i].get(),
                                    std::as_writable_bytes(std::span(&hello, 1)), 0)
               .ok()) {
        connections.erase(connections.begin() + static_cast<ptrdiff_t>(i));
        continue;
      }
      (void)contract::SendMessage(connections[i].get(), std::as_bytes(std::span(&answer, 1)), {});
    }
    if (polled[1].revents != 0) {
      connections.emplace_back(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
  }
}

}  // namespace shardd::cli

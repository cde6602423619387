// The attach socket (docs/formats/attach.md): who connects, and its descriptors.
#ifndef SHARDD_SERVER_CONTROL_ATTACH_SERVER_H_
#define SHARDD_SERVER_CONTROL_ATTACH_SERVER_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/contract/attach.h"
#include "proto/contract/fd_passing.h"
#include "server/control/session_registry.h"
#include "server/env/budget.h"

namespace shardd::step {
struct Counters;
}

namespace shardd::control {

struct AttachOptions {
  std::string path;     // of the attach socket
  std::string version;  // told in kHello
  uint64_t ring_bytes_max = 0;
  size_t max_connections = 0;
  env::Budget* budget = nullptr;
  step::Counters* counters = nullptr;
  std::function<void(const std::string&)> log;
};

// One thread of its own. It never blocks on a client.
class AttachServer {
 public:
  // Takes over a socket that listens at options.path already.
  AttachServer(AttachOptions options, contract::UniqueFd listener, SessionRegistry* registry);
  ~AttachServer();
  AttachServer(const AttachServer&) = delete;
  AttachServer& operator=(const AttachServer&) = delete;

  void Start();
  void Stop();

 private:
  // A connection that has not been handed to a job's thread.
  struct Connection {
    contract::UniqueFd socket;               // until the session owns it
    std::shared_ptr<step::Session> session;  // after kHello
    int fd = -1;
  };
  void Main();
  void OpenSpare();
  void Accept();
  void OnReadable(int fd);
  absl::Status OnHello(Connection* connection, const contract::AttachMessage& message);
  absl::Status OnSegments(Connection* connection, contract::UniqueFd ring);
  void Drop(int fd);

  const AttachOptions options_;
  contract::UniqueFd listener_;
  contract::UniqueFd spare_;  // given up to refuse a connection when there are no more
  SessionRegistry* registry_;
  int epoll_ = -1;
  int event_ = -1;
  std::atomic<bool> stop_{false};
  std::map<int, Connection> connections_;
  std::thread thread_;
};

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_ATTACH_SERVER_H_

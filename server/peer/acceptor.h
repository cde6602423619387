// The TCP listener for peers: accepts, hands over to gRPC, and counts those that end without
// having shown a valid certificate.
#ifndef SHARDD_SERVER_PEER_ACCEPTOR_H_
#define SHARDD_SERVER_PEER_ACCEPTOR_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "proto/contract/fd_passing.h"

namespace shardd::peer {

// One thread of its own.
class Acceptor {
 public:
  struct Options {
    std::string address;  // HOST:PORT
    // Takes a connection; from the acceptor's thread.
    std::function<void(contract::UniqueFd)> on_connection;
    // A connection has ended of which nothing was ever admitted.
    std::function<void(const std::string& from)> on_refused;
  };
  // InvalidArgument: an address that cannot be resolved; Unavailable: cannot listen there.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(Options options);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  uint16_t port() const { return port_; }
  void Start();
  void Stop();
  // The connection from `endpoint` ("127.0.0.1:5123") has authenticated itself.
  void Admit(const std::string& endpoint);

 private:
  explicit Acceptor(Options options) : options_(std::move(options)) {}
  void Main();
  void Accept();
  void Ended(int fd);

  // Of a connection that gRPC owns: a second descriptor, to see its end.
  struct Connection {
    contract::UniqueFd watch;
    std::string from;
    bool admitted = false;
  };
  const Options options_;
  contract::UniqueFd listener_, epoll_, event_;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::map<int, Connection> connections_;  // by descriptor; under mutex_
  std::thread thread_;
};

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_ACCEPTOR_H_

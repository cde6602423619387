// Links to the other daemons: mutual TLS, and between two living processes every message once
// and in order, across broken connections.
#ifndef SHARDD_SERVER_PEER_LINKS_H_
#define SHARDD_SERVER_PEER_LINKS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/daemon_config.pb.h"
#include "server/peer/message.h"

namespace shardd::peer {

// What was refused, since the daemon began.
struct LinkCounters {
  std::atomic<uint64_t> connections{0};  // no certificate, or one that the authority did not sign
  std::atomic<uint64_t> peers{0};        // a name that is not configured, another protocol version
  std::atomic<uint64_t> messages{0};     // of jobs that the sender takes no part in, or malformed
  std::atomic<uint64_t> fenced{0};  // older than what is: another job id, timeline, coordinator
};

struct LinkState {
  bool connected = false;     // our messages reach it
  absl::Time heard;           // when anything came from it last; InfinitePast: never
  uint64_t queued_bytes = 0;  // sent and not acknowledged
  std::string last_error;     // of the last attempt to connect
};

// Thread-safe.
class Links {
 public:
  struct Options {
    v1::DaemonConfig::Peer config;  // valid, see server/config/peer_config.h
    // A message has come. In order per peer; must not block.
    std::function<void(const std::string& peer, Message message)> on_message;
    // `peer` is reached for the first time, or its process is a new one: what was sent to the
    // one before may not have arrived. Ordered with on_message; must not block. May call Send.
    std::function<void(const std::string& peer)> on_new_process;
    std::function<void(const std::string&)> log;
    std::function<absl::Time()> now;
  };
  // Reads the TLS files and listens. FailedPrecondition names the file that cannot be used.
  // Nothing is called back before Start.
  static absl::StatusOr<std::unique_ptr<Links>> Listen(Options options);
  virtual ~Links() = default;

  virtual void Start() = 0;
  // Ends all streams and calls nothing back any more. Idempotent.
  virtual void Stop() = 0;

  virtual const std::string& self() const = 0;
  virtual uint16_t port() const = 0;
  virtual std::vector<std::string> peers() const = 0;
  virtual bool Knows(const std::string& peer) const = 0;
  // Queues; never blocks. Kept until the peer's process has it or is known to have ended.
  // Dropped for a name that is not configured.
  virtual void Send(const std::string& peer, Message message) = 0;
  virtual LinkState State(const std::string& peer) const = 0;
  virtual LinkCounters* counters() = 0;
};

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_LINKS_H_

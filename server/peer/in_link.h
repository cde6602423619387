// The receiving half of a link: what has come from a peer's process, and the stream it comes by.
#ifndef SHARDD_SERVER_PEER_IN_LINK_H_
#define SHARDD_SERVER_PEER_IN_LINK_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "server/peer/links.h"

namespace shardd::peer {

// Serves kLinkMethod for all peers. Thread-safe.
class InLinks final : public grpc::CallbackGenericService {
 public:
  struct Options {
    std::string self;
    uint64_t incarnation = 0;
    std::function<bool(const std::string& peer)> knows;
    // The connection from `endpoint` carries a certificate that the authority signed.
    std::function<void(const std::string& endpoint)> on_authenticated;
    std::function<void(const std::string& peer, uint64_t incarnation)> on_hello;
    std::function<void(const std::string& peer, Message message)> on_message;
    std::function<void(const std::string&)> log;
    std::function<absl::Time()> now;
    LinkCounters* counters = nullptr;
  };
  explicit InLinks(Options options) : options_(std::move(options)) {}

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;
  absl::Time Heard(const std::string& peer) const;
  // Nothing is called back any more.
  void Silence();

 private:
  class Stream;
  // Under mutex_, which also keeps a peer's messages in order when a stream replaces another.
  struct Peer {
    uint64_t incarnation = 0;
    uint64_t received = 0;
    absl::Time heard = absl::InfinitePast();
    Stream* stream = nullptr;
  };
  absl::Status OnHello(Stream* stream, const v1::PeerHello& hello, v1::PeerWelcome* welcome);
  // Returns the sequence number to acknowledge.
  absl::StatusOr<uint64_t> OnMessage(Stream* stream, DecodedFrame frame);
  void OnStreamEnd(Stream* stream);

  const Options options_;
  mutable std::mutex mutex_;
  std::map<std::string, Peer> peers_;  // under mutex_
  bool silent_ = false;                // under mutex_
};

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_IN_LINK_H_

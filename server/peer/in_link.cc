#include "server/peer/in_link.h"

#include <grpc/grpc_security_constants.h>

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardd::peer {

namespace {

// "ipv4:127.0.0.1:5123" and "ipv6:%5B::1%5D:5123" as the acceptor writes them.
std::string Endpoint(std::string peer) {
  const size_t colon = peer.find(':');
  peer = colon == std::string::npos ? peer : peer.substr(colon + 1);
  for (const auto& [escaped, plain] : {std::pair{"%5B", "["}, {"%5D", "]"}}) {
    const size_t at = peer.find(escaped);
    if (at != std::string::npos) peer.replace(at, 3, plain);
  }
  return peer;
}

// The names of the certificate that came with the connection; empty: there is none.
std::vector<std::string> CertificateNames(const grpc::ServerContextBase& context) {
  std::vector<std::string> names;
  const auto auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) return names;
  for (const char* property : {GRPC_X509_SAN_PROPERTY_NAME, GRPC_X509_CN_PROPERTY_NAME}) {
    for (const grpc::string_ref& value : auth->FindPropertyValues(property)) {
      names.emplace_back(value.data(), value.size());
    }
  }
  return names;
}

grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

}  // namespace

// gRPC calls one reaction after the other, on any of its threads. What one leaves to the
// next goes through mutex_ all the same: a sanitizer does not see gRPC's own locks.
class InLinks::Stream final : public grpc::ServerGenericBidiReactor {
 public:
  Stream(InLinks* links, std::vector<std::string> names) : links_(links), names_(std::move(names)) {
    Read();
  }
  const std::vector<std::string>& names() const { return names_; }
  std::string peer;  // after its hello; under the links' mutex

  // A refusal when it was made, before any reading.
  static grpc::ServerGenericBidiReactor* Refused(const absl::Status& why) {
    class Reactor final : public grpc::ServerGenericBidiReactor {
     public:
      explicit Reactor(const absl::Status& why) { Finish(ToGrpc(why)); }
      void OnDone() override { delete this; }
    };
    return new Reactor(why);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End(absl::OkStatus());
    absl::StatusOr<DecodedFrame> decoded = Decode();
    if (!decoded.ok()) {
      links_->options_.counters->messages += 1;
      return End(decoded.status());
    }
    if (decoded->frame.has_hello()) {
      v1::PeerFrame frame;
      absl::Status status = links_->OnHello(this, decoded->frame.hello(), frame.mutable_welcome());
      if (!status.ok()) return End(status);
      Answer(EncodeFrame(frame, nullptr));
    } else if (decoded->frame.has_message()) {
      absl::StatusOr<uint64_t> sequence = links_->OnMessage(this, *std::move(decoded));
      if (!sequence.ok()) return End(sequence.status());
      Acknowledge(*sequence);
    } else {
      return End(absl::InvalidArgumentError("an unexpected kind of frame"));
    }
    Read();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (ok && !ended_) WriteAck();
  }
  void OnCancel() override { End(absl::CancelledError("the call was cancelled")); }
  void OnDone() override {
    { std::lock_guard lock(mutex_); }  // what the reactions before it left
    links_->OnStreamEnd(this);
    delete this;
  }
  void End(const absl::Status& status) {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
    Finish(ToGrpc(status));
  }

 private:
  void Read() {
    std::lock_guard lock(mutex_);
    StartRead(&incoming_);
  }
  absl::StatusOr<DecodedFrame> Decode() {
    std::lock_guard lock(mutex_);
    return DecodeFrame(incoming_);
  }
  void Answer(grpc::ByteBuffer buffer) {
    std::lock_guard lock(mutex_);
    if (ended_ || writing_) return;  // a second hello is refused before
    outgoing_ = std::move(buffer);
    writing_ = true;
    StartWrite(&outgoing_);
  }
  void Acknowledge(uint64_t sequence) {
    std::lock_guard lock(mutex_);
    to_acknowledge_ = std::max(to_acknowledge_, sequence);
    if (!ended_) WriteAck();
  }
  void WriteAck() {  // under mutex_
    if (writing_ || to_acknowledge_ == acknowledged_) return;
    acknowledged_ = to_acknowledge_;
    v1::PeerFrame frame;
    frame.set_ack(acknowledged_);
    outgoing_ = EncodeFrame(frame, nullptr);
    writing_ = true;
    StartWrite(&outgoing_);
  }

  InLinks* links_;
  const std::vector<std::string> names_;
  grpc::ByteBuffer incoming_, outgoing_;
  std::mutex mutex_;
  bool ended_ = false, writing_ = false;            // under mutex_
  uint64_t to_acknowledge_ = 0, acknowledged_ = 0;  // under mutex_
};

grpc::ServerGenericBidiReactor* InLinks::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  std::vector<std::string> names = CertificateNames(*context);
  if (names.empty()) {
    options_.counters->connections += 1;
    return Stream::Refused(
        absl::UnauthenticatedError("a peer must show a certificate (peer.certificate)"));
  }
  options_.on_authenticated(Endpoint(context->peer()));
  if (context->method() != kLinkMethod) {
    options_.counters->peers += 1;
    return Stream::Refused(absl::UnimplementedError(
        absl::StrCat("there is no method ", context->method(), "; peers speak ", kLinkMethod)));
  }
  return new Stream(this, std::move(names));
}

absl::Status InLinks::OnHello(Stream* stream, const v1::PeerHello& hello,
                              v1::PeerWelcome* welcome) {
  const auto refuse = [&](absl::Status why) {
    options_.counters->peers += 1;
    options_.log(absl::StrCat("a peer is refused: ", why.message()));
    return why;
  };
  const std::vector<std::string>& names = stream->names();
  if (hello.protocol_version() != kPeerProtocolVersion) {
    return refuse(absl::FailedPreconditionError(
        absl::StrCat("it speaks peer protocol ", hello.protocol_version(), ", ", options_.self,
                     " speaks ", kPeerProtocolVersion, "; install matching versions")));
  }
  if (std::find(names.begin(), names.end(), hello.name()) == names.end()) {
    return refuse(absl::PermissionDeniedError(absl::StrCat("it says that it is '", hello.name(),
                                                           "', but its certificate is for ",
                                                           absl::StrJoin(names, ", "))));
  }
  if (!options_.knows(hello.name())) {
    return refuse(absl::PermissionDeniedError(absl::StrCat(
        "'", hello.name(), "' is not among peer.peers of ", options_.self, "; add it there")));
  }
  Stream* replaced = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (silent_) return absl::UnavailableError("the daemon is ending");
    if (!stream->peer.empty()) return absl::InvalidArgumentError("a second hello");
    Peer& peer = peers_[hello.name()];
    stream->peer = hello.name();
    replaced = std::exchange(peer.stream, stream);
    peer.heard = options_.now();
    if (peer.incarnation != hello.incarnation()) {
      peer.incarnation = hello.incarnation();
      peer.received = 0;
    }
    options_.on_hello(hello.name(), hello.incarnation());
    welcome->set_received(peer.received);
    // It cannot go while it is named here: OnStreamEnd waits for the mutex.
    if (replaced != nullptr) {
      replaced->End(absl::AbortedError("the peer has connected anew"));
    }
  }
  welcome->set_protocol_version(kPeerProtocolVersion);
  welcome->set_name(options_.self);
  welcome->set_incarnation(options_.incarnation);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> InLinks::OnMessage(Stream* stream, DecodedFrame frame) {
  std::lock_guard lock(mutex_);
  if (silent_) return absl::UnavailableError("the daemon is ending");
  const auto it = peers_.find(stream->peer);
  if (stream->peer.empty() || it == peers_.end() || it->second.stream != stream) {
    return absl::AbortedError("this stream has been replaced, or has not said hello");
  }
  Peer& peer = it->second;
  peer.heard = options_.now();
  const uint64_t sequence = frame.frame.sequence();
  if (sequence > peer.received + 1) {
    return absl::DataLossError(absl::StrCat("message ", sequence, " came after ", peer.received));
  }
  if (sequence == peer.received + 1) {
    peer.received = sequence;
    options_.on_message(stream->peer,
                        {std::move(*frame.frame.mutable_message()), std::move(frame.bytes)});
  }
  return peer.received;
}

void InLinks::OnStreamEnd(Stream* stream) {
  std::lock_guard lock(mutex_);
  for (auto& [name, peer] : peers_) {
    if (peer.stream == stream) peer.stream = nullptr;
  }
}

absl::Time InLinks::Heard(const std::string& peer) const {
  std::lock_guard lock(mutex_);
  const auto it = peers_.find(peer);
  return it == peers_.end() ? absl::InfinitePast() : it->second.heard;
}

void InLinks::Silence() {
  std::lock_guard lock(mutex_);
  silent_ = true;
}

}  // namespace shardd::peer

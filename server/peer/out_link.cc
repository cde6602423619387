#include "server/peer/out_link.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"

namespace shardd::peer {

// The link deletes it when gRPC is done with it; until then it may be cancelled. StartWrite is
// called under the link's mutex, and not any more once a read has failed; until then the read that
// is always open keeps the call alive.
class OutLink::Stream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Stream(OutLink* link) : link_(link) {
    context_.set_wait_for_ready(false);  // so that it is known why it fails
    grpc::GenericStub stub(link->options_.channel);
    stub.PrepareBidiStreamingCall(&context_, kLinkMethod, grpc::StubOptions(), this);
  }
  void Begin() {
    v1::PeerFrame frame;
    v1::PeerHello* hello = frame.mutable_hello();
    hello->set_protocol_version(kPeerProtocolVersion);
    hello->set_name(link_->options_.self);
    hello->set_incarnation(link_->options_.incarnation);
    Write(EncodeFrame(frame, nullptr));
    StartRead(&incoming_);
    StartCall();
  }
  void Write(grpc::ByteBuffer buffer) {
    outgoing_ = std::move(buffer);
    StartWrite(&outgoing_);
  }
  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return link_->OnReadEnd();
    link_->OnFrame(incoming_);
    StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override { link_->OnWriteDone(ok); }
  void OnDone(const grpc::Status& status) override {
    link_->OnDone(grpc::Status(status));  // which deletes this
  }

 private:
  OutLink* link_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_, outgoing_;
};

void OutLink::Start() { Connect(); }

void OutLink::Connect() {
  std::lock_guard lock(mutex_);
  waiting_ = false;
  if (stop_) return ended_.notify_all();
  welcomed_ = closing_ = false;
  written_ = 0;
  writing_ = true;  // the hello
  stream_ = new Stream(this);
  stream_->Begin();
}

void OutLink::Stop() {
  std::unique_lock lock(mutex_);
  stop_ = true;
  if (stream_ != nullptr) stream_->Cancel();
  if (alarm_ != nullptr && waiting_) alarm_->Cancel();
  ended_.wait(lock, [this] { return stream_ == nullptr && !waiting_; });
  queue_.clear();
  written_ = 0;
  std::unique_ptr<grpc::Alarm> alarm = std::move(alarm_);
  lock.unlock();
}

void OutLink::Send(Message message) {
  std::lock_guard lock(mutex_);
  if (stop_) return;
  queued_bytes_ += message.bytes.size();
  queue_.push_back({next_sequence_++, std::move(message.header),
                    std::make_shared<const std::string>(std::move(message.bytes))});
  Pump();
}

void OutLink::Pump() {
  if (!welcomed_ || writing_ || closing_ || written_ == queue_.size()) return;
  const Item& item = queue_[written_++];
  v1::PeerFrame frame;
  frame.set_sequence(item.sequence);
  *frame.mutable_message() = item.header;
  writing_ = true;
  stream_->Write(EncodeFrame(frame, item.bytes));
}

void OutLink::OnWriteDone(bool ok) {
  std::lock_guard lock(mutex_);
  writing_ = false;
  if (ok) Pump();
}

void OutLink::OnFrame(const grpc::ByteBuffer& buffer) {
  const absl::StatusOr<DecodedFrame> decoded = DecodeFrame(buffer);
  if (decoded.ok() && decoded->frame.has_welcome()) {
    options_.on_welcome(decoded->frame.welcome().incarnation());
    return OnWelcome(decoded->frame.welcome());
  }
  std::lock_guard lock(mutex_);
  heard_ = options_.now();
  if (!decoded.ok() || decoded->frame.kind_case() != v1::PeerFrame::kAck) {
    if (stream_ != nullptr) stream_->Cancel();
    return;
  }
  while (!queue_.empty() && welcomed_ && queue_.front().sequence <= decoded->frame.ack()) {
    queued_bytes_ -= queue_.front().bytes->size();
    queue_.pop_front();
    if (written_ > 0) --written_;
  }
}

void OutLink::OnWelcome(const v1::PeerWelcome& welcome) {
  std::lock_guard lock(mutex_);
  heard_ = options_.now();
  if (welcome.protocol_version() != kPeerProtocolVersion || welcome.name() != options_.peer ||
      welcome.incarnation() != peer_incarnation_) {
    if (stream_ != nullptr) stream_->Cancel();
    return;
  }
  while (!queue_.empty() && queue_.front().sequence <= welcome.received()) {
    queued_bytes_ -= queue_.front().bytes->size();
    queue_.pop_front();
  }
  if (failures_ > 0 || !last_error_.empty()) {
    options_.log(absl::StrCat("peer ", options_.peer, ": reached again"));
  }
  failures_ = 0;
  last_error_.clear();
  welcomed_ = true;
  Pump();
}

void OutLink::Reset(uint64_t incarnation) {
  std::lock_guard lock(mutex_);
  if (peer_incarnation_ == incarnation) return;
  const bool first = peer_incarnation_ == 0;
  peer_incarnation_ = incarnation;
  if (first) return;  // what is queued was meant for whoever comes
  queue_.clear();
  written_ = 0;
  queued_bytes_ = 0;
  next_sequence_ = 1;
  // A stream that has been welcomed leads to the process before.
  if (stream_ != nullptr && welcomed_) {
    closing_ = true;
    stream_->Cancel();
  }
}

void OutLink::OnReadEnd() {
  std::lock_guard lock(mutex_);
  closing_ = true;
}

void OutLink::OnDone(const grpc::Status& status) {
  std::lock_guard lock(mutex_);
  delete std::exchange(stream_, nullptr);
  writing_ = false;
  const std::string error = status.error_message();
  if (!stop_ && (welcomed_ || error != last_error_)) {
    options_.log(absl::StrCat("peer ", options_.peer, ": ",
                              welcomed_ ? "the link broke: " : "not reached: ", error));
  }
  last_error_ = error.empty() ? "the stream ended" : error;
  welcomed_ = false;
  if (stop_) return ended_.notify_all();
  waiting_ = true;
  const auto wait = std::chrono::milliseconds(std::min(20 << std::min(failures_, 6), 1000));
  ++failures_;
  alarm_ = std::make_unique<grpc::Alarm>();
  alarm_->Set(std::chrono::system_clock::now() + wait, [this](bool) { Connect(); });
}

LinkState OutLink::State() const {
  std::lock_guard lock(mutex_);
  return {welcomed_ && !closing_, heard_, queued_bytes_, welcomed_ ? "" : last_error_};
}

}  // namespace shardd::peer

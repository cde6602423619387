// The sending half of a link: a queue that survives broken connections.
#ifndef SHARDD_SERVER_PEER_OUT_LINK_H_
#define SHARDD_SERVER_PEER_OUT_LINK_H_

#include <grpcpp/alarm.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "server/peer/links.h"

namespace shardd::peer {

// Thread-safe.
class OutLink {
 public:
  struct Options {
    std::string self;
    std::string peer;
    uint64_t incarnation = 0;  // of this process
    std::shared_ptr<grpc::Channel> channel;
    // The peer's process as its welcome names it; called without locks.
    std::function<void(uint64_t incarnation)> on_welcome;
    std::function<void(const std::string&)> log;
    std::function<absl::Time()> now;
  };
  explicit OutLink(Options options) : options_(std::move(options)) {}
  ~OutLink() { Stop(); }
  OutLink(const OutLink&) = delete;
  OutLink& operator=(const OutLink&) = delete;

  void Start();
  void Stop();
  void Send(Message message);
  // The peer's process is now this one: what was queued for another is dropped.
  void Reset(uint64_t incarnation);
  LinkState State() const;

 private:
  class Stream;
  struct Item {
    uint64_t sequence = 0;
    v1::PeerMessage header;
    std::shared_ptr<const std::string> bytes;
  };
  void Connect();
  void Pump();  // under mutex_
  void OnFrame(const grpc::ByteBuffer& buffer);
  void OnWelcome(const v1::PeerWelcome& welcome);
  void OnWriteDone(bool ok);
  void OnReadEnd();
  void OnDone(const grpc::Status& status);

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  // All below under mutex_.
  std::deque<Item> queue_;  // not acknowledged, ascending
  size_t written_ = 0;      // of queue_, on this stream
  uint64_t next_sequence_ = 1;
  uint64_t queued_bytes_ = 0;
  uint64_t peer_incarnation_ = 0;  // that the queue is for; 0: none met yet
  Stream* stream_ = nullptr;
  bool welcomed_ = false;
  bool writing_ = false;
  bool closing_ = false;
  bool stop_ = false;
  bool waiting_ = false;  // for the alarm
  int failures_ = 0;      // in a row
  std::string last_error_;
  absl::Time heard_ = absl::InfinitePast();
  std::unique_ptr<grpc::Alarm> alarm_;
};

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_OUT_LINK_H_

// The gradient ring of one session: a sealed memfd that this worker writes and the
// daemon reads (docs/formats/segments.md).
//
// Space is handed out in blocks, first in first out: a block is one piece of memory
// whose descriptors are published together, and it is free again once the daemon has
// released the last of them. When nothing is outstanding the next block starts at
// offset 0, so a block of any size up to the data area always fits in the end.
#ifndef SHARDD_CLIENT_RING_WRITER_H_
#define SHARDD_CLIENT_RING_WRITER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/memory_file.h"
#include "proto/contract/segments.h"

namespace shardd {

// Threads: one at a time, but for the heartbeat, which has its own.
class RingWriter {
 public:
  struct Options {
    uint64_t data_bytes = 0;   // rounded up to pages
    uint32_t descriptors = 0;  // that can be outstanding; rounded up to a power of two, 64 at least
    absl::Duration heartbeat =
        absl::Seconds(1);  // of the job; the ring's beats five times as often
  };
  // Starts the heartbeat.
  static absl::StatusOr<std::unique_ptr<RingWriter>> Create(const Options& options);
  ~RingWriter();

  int fd() const { return memory_.fd(); }
  uint64_t data_bytes() const { return data_bytes_; }
  // Bytes of the whole segment.
  uint64_t size() const { return memory_.size(); }

  // A block of `bytes` (rounded up to 64) for `descriptors` descriptors, if there is
  // room given that the daemon has released `released` descriptors. At most one block
  // is open at a time. `bytes` may not exceed data_bytes().
  bool TryReserve(uint64_t bytes, uint32_t descriptors, uint64_t released);
  bool reserved() const { return open_.has_value(); }
  std::byte* block() const { return data() + open_->offset; }
  // Publishes the open block: data_offset of each descriptor counts from the block's
  // start and is made to count from the data area's.
  void Publish(std::span<const contract::Descriptor> descriptors);
  // Begins a session with another daemon: nothing is published and all of the ring is free. The
  // memory stays where it is.
  void Restart();
  // Gives the open block back unpublished, if there is one.
  void Cancel() { open_.reset(); }

  uint64_t published() const { return head_; }
  // Descriptors published and not among the first `released`.
  uint64_t outstanding(uint64_t released) const { return head_ - released; }

 private:
  struct Block {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t end_descriptor = 0;  // free once released >= this
  };

  RingWriter() = default;
  contract::RingHeader& header() const {
    return *reinterpret_cast<contract::RingHeader*>(memory_.data());
  }
  std::byte* data() const { return memory_.data() + data_offset_; }
  std::optional<uint64_t> FindSpace(uint64_t bytes) const;
  void Beat(absl::Duration interval);

  MemoryFile memory_;
  uint32_t queue_entries_ = 0;
  uint64_t data_offset_ = 0;
  uint64_t data_bytes_ = 0;
  uint64_t head_ = 0;
  std::deque<Block> outstanding_;  // oldest first
  std::optional<Block> open_;

  std::mutex stop_mutex_;
  std::condition_variable stop_condition_;
  bool stop_ = false;
  std::thread heart_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_RING_WRITER_H_

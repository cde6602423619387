#include "client/ring_writer.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

namespace shardd {

namespace {

using contract::kSegmentPage;
using contract::RoundUpTo;

constexpr uint32_t kMinQueueEntries = 64;
// Beats per heartbeat: the format demands four, and a thread may be late.
constexpr int kBeats = 5;

}  // namespace

absl::StatusOr<std::unique_ptr<RingWriter>> RingWriter::Create(const Options& options) {
  std::unique_ptr<RingWriter> ring(new RingWriter());
  ring->queue_entries_ = std::bit_ceil(std::max(options.descriptors, kMinQueueEntries));
  ring->data_offset_ =
      RoundUpTo(kSegmentPage + ring->queue_entries_ * sizeof(contract::Descriptor), kSegmentPage);
  ring->data_bytes_ = RoundUpTo(std::max<uint64_t>(options.data_bytes, 1), kSegmentPage);
  absl::StatusOr<MemoryFile> memory =
      MemoryFile::Create("shardd-ring", ring->data_offset_ + ring->data_bytes_, /*sealed=*/true);
  if (!memory.ok()) return memory.status();
  ring->memory_ = *std::move(memory);
  contract::RingHeader& header = ring->header();
  header.magic = contract::kRingMagic;
  header.version = contract::kFormatVersion;
  header.queue_entries = ring->queue_entries_;
  header.data_offset = ring->data_offset_;
  header.data_bytes = ring->data_bytes_;
  ring->heart_ = std::thread(&RingWriter::Beat, ring.get(), options.heartbeat / kBeats);
  return ring;
}

RingWriter::~RingWriter() {
  {
    std::lock_guard<std::mutex> lock(stop_mutex_);
    stop_ = true;
  }
  stop_condition_.notify_all();
  if (heart_.joinable()) heart_.join();
}

void RingWriter::Beat(absl::Duration interval) {
  std::unique_lock<std::mutex> lock(stop_mutex_);
  while (!stop_) {
    header().heartbeat.fetch_add(1, std::memory_order_release);
    stop_condition_.wait_for(lock, absl::ToChronoNanoseconds(interval), [this] { return stop_; });
  }
}

std::optional<uint64_t> RingWriter::FindSpace(uint64_t bytes) const {
  if (outstanding_.empty()) return bytes <= data_bytes_ ? std::optional<uint64_t>(0) : std::nullopt;
  const uint64_t tail = outstanding_.front().offset;  // oldest byte in use
  const uint64_t next = outstanding_.back().offset + outstanding_.back().bytes;
  if (outstanding_.back().offset >= tail) {
    // In use: [tail, next). Free: the end, else the beginning.
    if (bytes <= data_bytes_ - next) return next;
    return bytes <= tail ? std::optional<uint64_t>(0) : std::nullopt;
  }
  // Wrapped. In use: [tail, ..) and [0, next).
  return bytes <= tail - next ? std::optional<uint64_t>(next) : std::nullopt;
}

bool RingWriter::TryReserve(uint64_t bytes, uint32_t descriptors, uint64_t released) {
  while (!outstanding_.empty() && outstanding_.front().end_descriptor <= released) {
    outstanding_.pop_front();
  }
  if (head_ + descriptors - released > queue_entries_) return false;
  bytes = std::max<uint64_t>(RoundUpTo(bytes, contract::kLineBytes), contract::kLineBytes);
  const std::optional<uint64_t> offset = FindSpace(bytes);
  if (!offset) return false;
  open_ = Block{*offset, bytes, head_ + descriptors};
  return true;
}

void RingWriter::Publish(std::span<const contract::Descriptor> descriptors) {
  auto* queue = reinterpret_cast<contract::Descriptor*>(memory_.data() + kSegmentPage);
  for (contract::Descriptor descriptor : descriptors) {
    descriptor.data_offset += open_->offset;
    queue[head_ & (queue_entries_ - 1)] = descriptor;
    header().head.store(++head_, std::memory_order_release);
  }
  open_->end_descriptor = head_;
  outstanding_.push_back(*open_);
  open_.reset();
}

void RingWriter::Restart() {
  open_.reset();
  outstanding_.clear();
  head_ = 0;
  header().head.store(0, std::memory_order_release);
}

}  // namespace shardd

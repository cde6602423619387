// Who touches a chunk's state now: the updater, or somebody who copies it.
//
// One claim per chunk. A copier that holds it sees all of a chunk at one step; an updater that
// finds it held goes on with the next chunk and comes back (Updater::Run), so that in practice
// nobody waits.
#ifndef SHARDD_SERVER_STEP_CHUNK_GATE_H_
#define SHARDD_SERVER_STEP_CHUNK_GATE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace shardd::step {

// Thread-safe. Claims are not recursive; hold one for a chunk's work, not longer, and never
// wait for anything else meanwhile.
class ChunkGate {
 public:
  explicit ChunkGate(uint64_t chunks) : chunks_(new std::atomic<uint32_t>[chunks]) {
    for (uint64_t c = 0; c < chunks; ++c) chunks_[c].store(kFree, std::memory_order_relaxed);
  }
  ChunkGate(const ChunkGate&) = delete;
  ChunkGate& operator=(const ChunkGate&) = delete;

  // What the last holder wrote is seen by the next one.
  bool TryClaim(uint64_t chunk) {
    uint32_t free = kFree;
    return chunks_[chunk].compare_exchange_strong(free, kHeld, std::memory_order_acquire,
                                                  std::memory_order_relaxed);
  }
  // Waits for it.
  void Claim(uint64_t chunk) {
    while (!TryClaim(chunk)) AwaitFree(chunk);
  }
  // Waits until nobody holds it, and takes nothing.
  void AwaitFree(uint64_t chunk) { chunks_[chunk].wait(kHeld, std::memory_order_relaxed); }
  void Release(uint64_t chunk) {
    chunks_[chunk].store(kFree, std::memory_order_release);
    chunks_[chunk].notify_one();
  }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1;
  const std::unique_ptr<std::atomic<uint32_t>[]> chunks_;
};

// Holds a claim for a scope.
class ChunkClaim {
 public:
  // Waits for it.
  ChunkClaim(ChunkGate* gate, uint64_t chunk) : gate_(gate), chunk_(chunk) { gate->Claim(chunk); }
  ~ChunkClaim() { gate_->Release(chunk_); }
  ChunkClaim(const ChunkClaim&) = delete;
  ChunkClaim& operator=(const ChunkClaim&) = delete;

 private:
  ChunkGate* const gate_;
  const uint64_t chunk_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_CHUNK_GATE_H_

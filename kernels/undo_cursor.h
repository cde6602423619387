// How an update writes the undo log, and its prefetches: shared by the loops of
// every lane type.
#ifndef SHARDD_KERNELS_UNDO_CURSOR_H_
#define SHARDD_KERNELS_UNDO_CURSOR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/optimizer.h"
#include "kernels/undo.h"

namespace shardd::kernels {

// Alternates between the two slots of a log.
//
// Only the compiler can put stores out of order for whoever looks after a
// SIGKILL, but it does: without the fences -O3 moves the tag across the values.
class UndoCursor {
 public:
  // The slot with this epoch's highest position may be all that can mend the
  // chunk until another one is complete, so writing starts with the other.
  UndoCursor(UndoLog* log, uint32_t epoch)
      : log_(log), epoch_bits_(static_cast<uint64_t>(epoch) << 32) {
    if (log_ == nullptr) return;
    const uint64_t tag0 = log_->slot[0].tag, tag1 = log_->slot[1].tag;
    const bool current0 = (tag0 >> 32) == epoch && static_cast<uint32_t>(tag0) != 0;
    const bool current1 = (tag1 >> 32) == epoch && static_cast<uint32_t>(tag1) != 0;
    next_ = current0 && (!current1 || tag0 >= tag1) ? 1 : 0;
  }

  // The slot to fill with the group's old values. It is invalid until Commit: a
  // redo may log the same position twice, and a tag over half-written values
  // must not compete with the complete one.
  UndoSlot* Begin() {
    UndoSlot* slot = &log_->slot[next_];
    StoreTag(slot, 0);
    return slot;
  }
  // Of that slot.
  float* old_state(int s) { return log_->old_state(next_, s); }

  // Makes the filled slot the valid one. From here the group may be written.
  void Commit(uint32_t position, uint32_t count) {
    UndoSlot* slot = &log_->slot[next_];
    slot->count = count;
    StoreTag(slot, epoch_bits_ | (static_cast<uint64_t>(position) + 1));
    next_ ^= 1;
  }

 private:
  static void StoreTag(UndoSlot* slot, uint64_t tag) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    std::atomic_ref<uint64_t>(slot->tag).store(tag, std::memory_order_release);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }

  UndoLog* log_;
  uint64_t epoch_bits_;
  int next_ = 0;
};

// The distance at which AdamW on two cores was fastest.
inline constexpr size_t kPrefetchBytes = 2048;

// Asks for the cache line at `address` + kPrefetchBytes for writing; never faults.
// __builtin_prefetch emits PREFETCHW only under -mprfchw, hence the assembly.
inline void PrefetchForWrite(const float* address) {
#if defined(__x86_64__)
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(address) + kPrefetchBytes;
  asm volatile("prefetchw (%0)" : : "r"(ahead));
#endif
}

// Prefetches what the update of the group of kUndoElements from i on writes.
template <int kStates>
inline void PrefetchGroup(const UpdateRun& run, size_t i) {
  for (size_t j = 0; j < kUndoElements; j += 16) {
    PrefetchForWrite(run.master + i + j);
    for (int s = 0; s < kStates; ++s) PrefetchForWrite(run.state[s] + i + j);
  }
}

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_UNDO_CURSOR_H_

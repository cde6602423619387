// The fused pre-image log of an update, and how a torn chunk is mended.
//
// While an update runs over a chunk, the old values of the next group of up to
// kUndoElements elements are stored into one of two alternating slots, then the
// slot's tag, then the new values. A SIGKILL leaves memory as of some point in
// program order, so the slot with the highest position of this epoch says which
// group may be half-written and what it held; all groups before it are done.
#ifndef SHARDD_KERNELS_UNDO_H_
#define SHARDD_KERNELS_UNDO_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace shardd::kernels {

inline constexpr size_t kUndoElements = 64;
// State arrays that an optimizer may have besides the master.
inline constexpr int kMaxStates = 3;

// In shared memory; the layout is described in docs/formats/segments.md.
// Old values lie in a slot as they lay in the chunk; of a split master (state_format.h) the low
// words, then from element 32 on the working weights.
struct alignas(64) UndoSlot {
  // epoch << 32 | (position + 1), epoch being the low 32 bits of the `applied`
  // that the update leads to and position the element offset within the chunk
  // of the slot's first element. 0: never used. Written with release order.
  uint64_t tag;
  uint64_t timeline;  // written when the chunk is initialised; guards against old tags
  uint32_t count;     // elements logged, 1..kUndoElements
  uint32_t reserved[11];
  float master[kUndoElements];
  float state[2][kUndoElements];
};
static_assert(sizeof(UndoSlot) == 64 + 3 * 4 * kUndoElements);

struct UndoLog {
  UndoSlot slot[2];
  // The third state of either slot: it came later than the slots' layout.
  float third[2][kUndoElements];

  // Where `slot` keeps the old values of state s.
  float* old_state(int slot_index, int s) {
    return s < 2 ? slot[slot_index].state[s] : third[slot_index];
  }
  const float* old_state(int slot_index, int s) const {
    return s < 2 ? slot[slot_index].state[s] : third[slot_index];
  }
};

// Clears both slots for a new timeline. No update may be running.
void ResetUndo(UndoLog* log, uint64_t timeline);

// The group that an interrupted update to `epoch` may have half-written.
struct TornGroup {
  int slot = -1;  // that has its old values; -1: the update had not begun
  size_t position = 0;
  size_t count = 0;
};
// A slot whose timeline, count or position is out of range (`chunk_elements`) is ignored.
TornGroup FindTornGroup(const UndoLog& log, uint64_t timeline, uint32_t epoch,
                        size_t chunk_elements);

// Restores the group that an interrupted update to `epoch` may have half-written
// and returns the position (element within the chunk) from which that update
// must be redone; every element before it is complete, every one from it on
// holds its old value. Returns 0 when the update had not begun. Idempotent.
// master and state point to element 0 of the chunk; a null state is absent.
size_t MendChunk(const UndoLog& log, uint64_t timeline, uint32_t epoch, size_t chunk_elements,
                 float* master, const std::array<float*, kMaxStates>& state);

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_UNDO_H_

#include "kernels/undo.h"

#include <cstring>

namespace shardd::kernels {

void ResetUndo(UndoLog* log, uint64_t timeline) {
  for (UndoSlot& slot : log->slot) {
    std::memset(&slot, 0, sizeof slot);
    slot.timeline = timeline;
  }
  std::memset(log->third, 0, sizeof log->third);
}

TornGroup FindTornGroup(const UndoLog& log, uint64_t timeline, uint32_t epoch,
                        size_t chunk_elements) {
  TornGroup latest;
  for (int i = 0; i < 2; ++i) {
    const UndoSlot& slot = log.slot[i];
    const uint32_t position_plus_one = static_cast<uint32_t>(slot.tag);
    if (slot.timeline != timeline || (slot.tag >> 32) != epoch || position_plus_one == 0) continue;
    const size_t position = position_plus_one - 1;
    if (slot.count == 0 || slot.count > kUndoElements) continue;
    if (position >= chunk_elements || slot.count > chunk_elements - position) continue;
    if (latest.slot >= 0 && position <= latest.position) continue;
    latest = {i, position, slot.count};
  }
  return latest;
}

size_t MendChunk(const UndoLog& log, uint64_t timeline, uint32_t epoch, size_t chunk_elements,
                 float* master, const std::array<float*, kMaxStates>& state) {
  const TornGroup torn = FindTornGroup(log, timeline, epoch, chunk_elements);
  if (torn.slot < 0) return 0;
  const size_t bytes = torn.count * sizeof(float);
  std::memcpy(master + torn.position, log.slot[torn.slot].master, bytes);
  for (int s = 0; s < kMaxStates; ++s) {
    float* const to = state[static_cast<size_t>(s)];
    if (to != nullptr) std::memcpy(to + torn.position, log.old_state(torn.slot, s), bytes);
  }
  return torn.position;
}

}  // namespace shardd::kernels

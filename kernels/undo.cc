#include "kernels/undo.h"

#include <cstring>

namespace shardd::kernels {

void ResetUndo(UndoLog* log, uint64_t timeline) {
  for (UndoSlot& slot : log->slot) {
    std::memset(&slot, 0, sizeof slot);
    slot.timeline = timeline;
  }
}

size_t MendChunk(const UndoLog& log, uint64_t timeline, uint32_t epoch, size_t chunk_elements,
                 float* master, const std::array<float*, 2>& state) {
  const UndoSlot* latest = nullptr;
  size_t latest_position = 0;
  for (const UndoSlot& slot : log.slot) {
    const uint32_t position_plus_one = static_cast<uint32_t>(slot.tag);
    if (slot.timeline != timeline || (slot.tag >> 32) != epoch || position_plus_one == 0) continue;
    const size_t position = position_plus_one - 1;
    if (slot.count == 0 || slot.count > kUndoElements) continue;
    if (position >= chunk_elements || slot.count > chunk_elements - position) continue;
    if (latest != nullptr && position <= latest_position) continue;
    latest = &slot;
    latest_position = position;
  }
  if (latest == nullptr) return 0;
  const size_t bytes = latest->count * sizeof(float);
  std::memcpy(master + latest_position, latest->master, bytes);
  for (size_t s = 0; s < state.size(); ++s) {
    if (state[s] != nullptr) std::memcpy(state[s] + latest_position, latest->state[s], bytes);
  }
  return latest_position;
}

}  // namespace shardd::kernels

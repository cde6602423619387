// The slot tree: which partial sums a rank publishes.
//
// node(lo, hi) splits at lo + the largest power of two below hi - lo; the shape
// depends on the number of slots alone, so every world size gives the same bits.
#ifndef SHARDD_PROTO_CONTRACT_SLOT_TREE_H_
#define SHARDD_PROTO_CONTRACT_SLOT_TREE_H_

#include <cstdint>
#include <vector>

namespace shardd::contract {

// Slots lo .. hi-1.
struct SlotRange {
  uint32_t lo = 0;
  uint32_t hi = 0;
  uint32_t size() const { return hi - lo; }
  bool operator==(const SlotRange&) const = default;
};

inline constexpr uint32_t kMaxSlots = 4096;

// Where node(lo, hi) splits. Requires hi - lo >= 2.
uint32_t SlotTreeSplit(SlotRange node);

// The slots that `rank` computes. Requires rank < world_size <= slots.
SlotRange SlotsOfRank(uint32_t slots, uint32_t world_size, uint32_t rank);

// The maximal tree nodes inside `run`, ascending: what the rank that computed
// `run` publishes, one partial sum each.
std::vector<SlotRange> MaximalNodes(uint32_t slots, SlotRange run);

// Whether `node` is a node of the tree over `slots`.
bool IsSlotTreeNode(uint32_t slots, SlotRange node);

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_SLOT_TREE_H_

#include "proto/contract/slot_tree.h"

#include <bit>

namespace shardd::contract {

namespace {

void CollectMaximal(SlotRange node, SlotRange run, std::vector<SlotRange>* out) {
  if (node.hi <= run.lo || run.hi <= node.lo) return;
  if (run.lo <= node.lo && node.hi <= run.hi) {
    out->push_back(node);
    return;
  }
  const uint32_t mid = SlotTreeSplit(node);
  CollectMaximal({node.lo, mid}, run, out);
  CollectMaximal({mid, node.hi}, run, out);
}

}  // namespace

uint32_t SlotTreeSplit(SlotRange node) { return node.lo + std::bit_floor(node.size() - 1); }

SlotRange SlotsOfRank(uint32_t slots, uint32_t world_size, uint32_t rank) {
  const auto bound = [&](uint64_t r) { return static_cast<uint32_t>(r * slots / world_size); };
  return {bound(rank), bound(uint64_t{rank} + 1)};
}

std::vector<SlotRange> MaximalNodes(uint32_t slots, SlotRange run) {
  std::vector<SlotRange> nodes;
  if (run.lo < run.hi && run.hi <= slots) CollectMaximal({0, slots}, run, &nodes);
  return nodes;
}

bool IsSlotTreeNode(uint32_t slots, SlotRange node) {
  if (node.lo >= node.hi || node.hi > slots) return false;
  SlotRange at{0, slots};
  while (at.size() > node.size()) {
    const uint32_t mid = SlotTreeSplit(at);
    if (node.hi <= mid) {
      at.hi = mid;
    } else if (node.lo >= mid) {
      at.lo = mid;
    } else {
      return false;
    }
  }
  return at == node;
}

}  // namespace shardd::contract

#include "client/slot_plan.h"

#include <algorithm>

namespace shardd {

namespace {

using contract::SlotRange;

// Hands out the lowest free number.
class Arenas {
 public:
  uint32_t Take() {
    const auto at = std::find(used_.begin(), used_.end(), false);
    const auto index = static_cast<uint32_t>(at - used_.begin());
    if (at == used_.end()) {
      used_.push_back(true);
    } else {
      *at = true;
    }
    return index;
  }
  void Free(uint32_t index) { used_[index] = false; }
  uint32_t count() const { return static_cast<uint32_t>(used_.size()); }

 private:
  std::vector<bool> used_;
};

// A node that is kept.
struct Kept {
  SlotRange range;
  NodePlace place;
};

// The largest tree node inside `node` that ends with `slot`.
SlotRange LargestEndingWith(SlotRange node, uint32_t slot) {
  while (node.hi != slot + 1) {
    const uint32_t mid = contract::SlotTreeSplit(node);
    node = slot < mid ? SlotRange{node.lo, mid} : SlotRange{mid, node.hi};
  }
  return node;
}

// The sum of the kept nodes that tile `range`, the last ones of `kept`; removes them.
NodeSum TakeSum(SlotRange range, std::vector<Kept>* kept) {
  size_t first = kept->size();
  while (first > 0 && (*kept)[first - 1].range.lo >= range.lo) --first;
  NodeSum sum;
  std::vector<kernels::SlotRange> nodes;
  for (size_t i = first; i < kept->size(); ++i) {
    sum.inputs.push_back((*kept)[i].place);
    // Relative to the node, whose subtree has the shape of a tree of its size.
    nodes.push_back({(*kept)[i].range.lo - range.lo, (*kept)[i].range.hi - range.lo});
  }
  kernels::SlotTreeProgram(range.size(), nodes, &sum.program);
  kept->resize(first);
  return sum;
}

}  // namespace

SlotPlan MakeSlotPlan(uint32_t slots, SlotRange run) {
  SlotPlan plan;
  plan.run = run;
  Arenas leaves, partials;
  for (const SlotRange& node : contract::MaximalNodes(slots, run)) {
    std::vector<Kept> kept;
    for (uint32_t slot = node.lo; slot < node.hi; ++slot) {
      SlotPlan::Slot step;
      step.leaf_arena = leaves.Take();
      kept.push_back({{slot, slot + 1}, {false, step.leaf_arena}});
      const SlotRange largest = LargestEndingWith(node, slot);
      // The run's last slot is added while it is published; a lone leaf is kept.
      if (slot + 1 != run.hi && largest.size() > 1) {
        step.sum = TakeSum(largest, &kept);
        step.partial_arena = partials.Take();
        for (const NodePlace& input : step.sum.inputs) {
          (input.partial ? partials : leaves).Free(input.arena);
        }
        kept.push_back({largest, {true, step.partial_arena}});
      }
      plan.slots.push_back(step);
    }
    // Arenas of a finished node stay taken until the step's end: it is published last.
    plan.nodes.push_back({node, TakeSum(node, &kept)});
  }
  plan.leaf_arenas = leaves.count();
  plan.partial_arenas = partials.count();
  return plan;
}

}  // namespace shardd

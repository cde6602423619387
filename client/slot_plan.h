// What a worker does with the gradients of its slots: which of the arenas a slot's
// gradient is written to, what is added when it is complete, and what each published
// tree node is made of. A binary counter over the slot tree of docs/numerics.md: the
// additions are those of the tree, so the bits do not depend on who makes them.
#ifndef SHARDD_CLIENT_SLOT_PLAN_H_
#define SHARDD_CLIENT_SLOT_PLAN_H_

#include <cstdint>
#include <vector>

#include "kernels/reduce.h"
#include "proto/contract/slot_tree.h"

namespace shardd {

// Where a node of the tree is kept: in a leaf arena (gradient dtype) or in a partial
// arena (fp32).
struct NodePlace {
  bool partial = false;
  uint32_t arena = 0;
  bool operator==(const NodePlace&) const = default;
};

// An addition of `inputs`, each a node, in the shape of the tree.
struct NodeSum {
  std::vector<NodePlace> inputs;
  kernels::ReduceProgram program;
};

struct SlotPlan {
  struct Slot {
    uint32_t leaf_arena = 0;
    // What is done once the slot's gradient is complete; no inputs: it is kept.
    NodeSum sum;
    uint32_t partial_arena = 0;  // where the sum goes
  };
  struct Node {
    contract::SlotRange range;
    NodeSum sum;  // made while it is published; one input: a copy
    bool leaf() const { return range.size() == 1; }
  };

  contract::SlotRange run;
  std::vector<Slot> slots;  // of the run, ascending
  std::vector<Node> nodes;  // maximal nodes, ascending
  uint32_t leaf_arenas = 0;
  uint32_t partial_arenas = 0;
};

// `run` is not empty and within 0 .. slots.
SlotPlan MakeSlotPlan(uint32_t slots, contract::SlotRange run);

}  // namespace shardd

#endif  // SHARDD_CLIENT_SLOT_PLAN_H_

#include "client/slot_plan.h"

#include <gtest/gtest.h>

#include <bit>
#include <string>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

using contract::SlotRange;

// The tree over `node` as an expression; the truth that plans are compared with.
std::string Tree(SlotRange node) {
  if (node.size() == 1) return absl::StrCat(node.lo);
  const uint32_t mid = contract::SlotTreeSplit(node);
  return absl::StrCat("(", Tree({node.lo, mid}), "+", Tree({mid, node.hi}), ")");
}

// Runs a plan on expressions instead of numbers.
class Machine {
 public:
  explicit Machine(const SlotPlan& plan)
      : plan_(plan), leaves_(plan.leaf_arenas), partials_(plan.partial_arenas) {}

  std::string Sum(const NodeSum& sum) {
    std::vector<std::string> stack;
    size_t next = 0;
    for (bool push : sum.program.push) {
      if (push) {
        const NodePlace& place = sum.inputs[next++];
        stack.push_back((place.partial ? partials_ : leaves_)[place.arena]);
        continue;
      }
      const std::string right = stack.back();
      stack.pop_back();
      stack.back() = absl::StrCat("(", stack.back(), "+", right, ")");
    }
    EXPECT_EQ(next, sum.inputs.size());
    EXPECT_EQ(stack.size(), 1u);
    return stack.empty() ? "" : stack[0];
  }

  void Run() {
    for (uint32_t i = 0; i < plan_.slots.size(); ++i) {
      const SlotPlan::Slot& slot = plan_.slots[i];
      leaves_[slot.leaf_arena] = absl::StrCat(plan_.run.lo + i);
      if (slot.sum.inputs.empty()) continue;
      const std::string sum = Sum(slot.sum);
      for (const NodePlace& input : slot.sum.inputs) {
        EXPECT_NE(input, (NodePlace{true, slot.partial_arena})) << "out overlaps an input";
      }
      partials_[slot.partial_arena] = sum;
    }
  }

 private:
  const SlotPlan& plan_;
  std::vector<std::string> leaves_, partials_;
};

// Every run of every tree, not only those that ranks have.
TEST(SlotPlan, PublishesTheTreesOwnSums) {
  for (uint32_t slots = 1; slots <= 33; ++slots) {
    for (uint32_t lo = 0; lo < slots; ++lo) {
      for (uint32_t hi = lo + 1; hi <= slots; ++hi) {
        const SlotPlan plan = MakeSlotPlan(slots, {lo, hi});
        const std::vector<SlotRange> nodes = contract::MaximalNodes(slots, {lo, hi});
        ASSERT_EQ(plan.slots.size(), hi - lo);
        ASSERT_EQ(plan.nodes.size(), nodes.size());
        Machine machine(plan);
        machine.Run();
        for (size_t i = 0; i < nodes.size(); ++i) {
          ASSERT_EQ(plan.nodes[i].range, nodes[i]);
          ASSERT_EQ(machine.Sum(plan.nodes[i].sum), Tree(nodes[i]))
              << slots << " slots, run " << lo << ".." << hi;
        }
      }
    }
  }
}

TEST(SlotPlan, OneSlotNeedsOneLeafAndNoPartial) {
  const SlotPlan plan = MakeSlotPlan(8, {3, 4});
  EXPECT_EQ(plan.leaf_arenas, 1u);
  EXPECT_EQ(plan.partial_arenas, 0u);
  EXPECT_TRUE(plan.nodes[0].leaf());
}

TEST(SlotPlan, MemoryGrowsWithTheLogarithm) {
  for (uint32_t slots = 2; slots <= 1024; slots *= 2) {
    const SlotPlan plan = MakeSlotPlan(slots, {0, slots});
    EXPECT_LE(plan.leaf_arenas, 2u);
    EXPECT_LE(plan.partial_arenas, static_cast<uint32_t>(std::bit_width(slots) - 1)) << slots;
  }
  // A published node that is not the last waits in an arena of its own.
  for (uint32_t slots = 1; slots <= 64; ++slots) {
    for (uint32_t lo = 0; lo < slots; ++lo) {
      for (uint32_t hi = lo + 1; hi <= slots; ++hi) {
        const SlotPlan plan = MakeSlotPlan(slots, {lo, hi});
        EXPECT_LE(plan.leaf_arenas + plan.partial_arenas, 2 * std::bit_width(slots) + 2u);
      }
    }
  }
}

}  // namespace
}  // namespace shardd

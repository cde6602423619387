#include "proto/contract/slot_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

namespace shardd::contract {
namespace {

using NodeSet = std::set<std::pair<uint32_t, uint32_t>>;

// The tree by its definition in docs/numerics.md, written independently.
void Enumerate(uint32_t lo, uint32_t hi, NodeSet* nodes) {
  nodes->insert({lo, hi});
  if (hi - lo < 2) return;
  uint32_t power = 1;
  while (power * 2 < hi - lo) power *= 2;
  Enumerate(lo, lo + power, nodes);
  Enumerate(lo + power, hi, nodes);
}

TEST(SlotTree, IsSlotTreeNodeAgreesWithTheDefinition) {
  for (uint32_t slots = 1; slots <= 64; ++slots) {
    NodeSet nodes;
    Enumerate(0, slots, &nodes);
    for (uint32_t lo = 0; lo <= slots + 1; ++lo) {
      for (uint32_t hi = 0; hi <= slots + 1; ++hi) {
        ASSERT_EQ(IsSlotTreeNode(slots, {lo, hi}), nodes.contains({lo, hi}))
            << slots << ": " << lo << ".." << hi;
      }
    }
  }
}

TEST(SlotTree, RanksTileTheSlots) {
  for (uint32_t slots = 1; slots <= 64; ++slots) {
    for (uint32_t world_size = 1; world_size <= slots; ++world_size) {
      uint32_t next = 0;
      for (uint32_t rank = 0; rank < world_size; ++rank) {
        const SlotRange run = SlotsOfRank(slots, world_size, rank);
        ASSERT_EQ(run.lo, next);
        ASSERT_GE(run.size(), 1u);
        next = run.hi;
      }
      ASSERT_EQ(next, slots);
    }
  }
}

TEST(SlotTree, MaximalNodesOfAllRanksTileTheSlots) {
  for (uint32_t slots = 1; slots <= 64; ++slots) {
    NodeSet nodes;
    Enumerate(0, slots, &nodes);
    for (uint32_t world_size = 1; world_size <= slots; ++world_size) {
      uint32_t next = 0;
      for (uint32_t rank = 0; rank < world_size; ++rank) {
        const SlotRange run = SlotsOfRank(slots, world_size, rank);
        for (const SlotRange& node : MaximalNodes(slots, run)) {
          ASSERT_EQ(node.lo, next);
          ASSERT_TRUE(nodes.contains({node.lo, node.hi}));
          // Maximal: no larger node of the tree inside the run holds it.
          for (const auto& [lo, hi] : nodes) {
            const bool inside = run.lo <= lo && hi <= run.hi;
            const bool holds = lo <= node.lo && node.hi <= hi && hi - lo > node.size();
            ASSERT_FALSE(inside && holds);
          }
          next = node.hi;
        }
        ASSERT_EQ(next, run.hi);
      }
    }
  }
}

// What a ring has to hold. Most divisors need one or two partials; the worst up to
// 24 slots is 18 over two ranks, whose second half is 9, 10..11, 12..15, 16..17.
TEST(SlotTree, FewNodesForDivisorsUpTo24) {
  size_t most = 0;
  for (uint32_t slots = 1; slots <= 24; ++slots) {
    for (uint32_t world_size = 1; world_size <= slots; ++world_size) {
      if (slots % world_size != 0) continue;
      for (uint32_t rank = 0; rank < world_size; ++rank) {
        most = std::max(most, MaximalNodes(slots, SlotsOfRank(slots, world_size, rank)).size());
      }
    }
  }
  EXPECT_EQ(most, 4u);
  EXPECT_EQ(MaximalNodes(18, SlotsOfRank(18, 2, 1)).size(), 4u);
}

TEST(SlotTree, NodesGrowWithTheLogarithm) {
  for (uint32_t slots = 1; slots <= 64; ++slots) {
    for (uint32_t lo = 0; lo < slots; ++lo) {
      for (uint32_t hi = lo + 1; hi <= slots; ++hi) {
        ASSERT_LE(MaximalNodes(slots, {lo, hi}).size(), 2u * std::bit_width(slots));
      }
    }
  }
}

TEST(SlotTree, PowersOfTwoNeedOne) {
  for (uint32_t slots = 1; slots <= kMaxSlots; slots *= 2) {
    for (uint32_t world_size = 1; world_size <= slots; world_size *= 2) {
      for (uint32_t rank = 0; rank < world_size; rank += 1 + world_size / 7) {
        EXPECT_EQ(MaximalNodes(slots, SlotsOfRank(slots, world_size, rank)).size(), 1u);
      }
    }
  }
}

TEST(SlotTree, RunsThatAreNoneHaveNoNodes) {
  EXPECT_TRUE(MaximalNodes(4, {2, 2}).empty());
  EXPECT_TRUE(MaximalNodes(4, {3, 5}).empty());
  EXPECT_TRUE(MaximalNodes(4, {3, 1}).empty());
}

}  // namespace
}  // namespace shardd::contract

#include "kernels/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cast.h"
#include "kernels/hostile_values.h"

namespace shardd::kernels {
namespace {

// --- An independent statement of the rules, element by element. ---

float NaiveFlush(float x) { return std::fabs(x) < 0x1p-125f ? 0.0f : x; }

float NaiveCanonical(float x) {
  const uint32_t nan_bits = 0x7FC00000;
  if (std::isnan(x)) std::memcpy(&x, &nan_bits, sizeof x);
  return x;
}

uint32_t NaiveSplit(uint32_t lo, uint32_t hi) {
  uint32_t power = 1;
  while (power * 2 < hi - lo) power *= 2;
  return lo + power;
}

// The sum of slots lo .. hi - 1 of one element, leaves[slot].
float NaiveNode(const std::vector<float>& leaves, uint32_t lo, uint32_t hi) {
  if (hi - lo == 1) return NaiveFlush(leaves[lo]);
  const uint32_t middle = NaiveSplit(lo, hi);
  return NaiveFlush(NaiveNode(leaves, lo, middle) + NaiveNode(leaves, middle, hi));
}

// The maximal nodes of the tree over lo .. hi - 1 inside first .. last - 1.
void NaiveMaximalNodes(uint32_t lo, uint32_t hi, uint32_t first, uint32_t last,
                       std::vector<SlotRange>* nodes) {
  if (hi <= first || last <= lo) return;
  if (first <= lo && hi <= last) {
    nodes->push_back({lo, hi});
    return;
  }
  const uint32_t middle = NaiveSplit(lo, hi);
  NaiveMaximalNodes(lo, middle, first, last, nodes);
  NaiveMaximalNodes(middle, hi, first, last, nodes);
}

std::vector<BlockStats> NaiveStats(const std::vector<float>& sum) {
  std::vector<BlockStats> stats((sum.size() + kBlockElements - 1) / kBlockElements);
  for (size_t block = 0; block < stats.size(); ++block) {
    double lanes[32] = {};
    const size_t first = block * kBlockElements;
    for (size_t i = first; i < std::min(first + kBlockElements, sum.size()); ++i) {
      lanes[i % 32] = std::fma(double{sum[i]}, double{sum[i]}, lanes[i % 32]);
      if (!std::isfinite(sum[i])) stats[block].nonfinite = 1;
    }
    for (int width = 32; width > 1; width /= 2) {
      for (int k = 0; k < width / 2; ++k) lanes[k] = lanes[2 * k] + lanes[2 * k + 1];
    }
    stats[block].sum_squares = lanes[0];
  }
  return stats;
}

// --- Helpers ---

std::vector<float> Widened(const std::vector<uint8_t>& array, DType dtype) {
  std::vector<float> wide(array.size() / DTypeSize(dtype));
  ToFp32(Isa::kScalar, array.data(), dtype, wide.size(), wide.data());
  return wide;
}

std::vector<float> NaiveSum(const std::vector<std::vector<uint8_t>>& leaves, DType dtype) {
  std::vector<std::vector<float>> wide;
  for (const auto& leaf : leaves) wide.push_back(Widened(leaf, dtype));
  std::vector<float> sum(wide[0].size());
  for (size_t i = 0; i < sum.size(); ++i) {
    std::vector<float> element;
    for (const auto& leaf : wide) element.push_back(leaf[i]);
    sum[i] = NaiveCanonical(NaiveNode(element, 0, static_cast<uint32_t>(element.size())));
  }
  return sum;
}

testing::AssertionResult SameBits(const std::vector<float>& expected, const float* actual) {
  for (size_t i = 0; i < expected.size(); ++i) {
    uint32_t a, b;
    std::memcpy(&a, &expected[i], 4);
    std::memcpy(&b, actual + i, 4);
    if (a != b) {
      return testing::AssertionFailure() << "element " << i << ": " << std::hex << a << " != " << b;
    }
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult SameStats(const std::vector<BlockStats>& expected,
                                   const std::vector<BlockStats>& actual) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const double a = expected[i].sum_squares, b = actual[i].sum_squares;
    const bool same = std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, sizeof a) == 0;
    if (!same || expected[i].nonfinite != actual[i].nonfinite) {
      return testing::AssertionFailure() << "block " << i << ": " << a << " != " << b;
    }
  }
  return testing::AssertionSuccess();
}

std::vector<std::vector<uint8_t>> Leaves(uint32_t slots, DType dtype, size_t count, uint32_t seed) {
  std::vector<std::vector<uint8_t>> leaves;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    leaves.push_back(HostileArray(dtype, count, seed * 100 + slot));
  }
  return leaves;
}

// What `world` ranks and a daemon compute from the leaves: each rank adds its
// maximal nodes, the daemon folds what was published.
struct Published {
  std::vector<SlotRange> nodes;
  std::vector<std::vector<float>> sums;  // those of more than one slot
  std::vector<ReduceInput> inputs;
};

std::vector<float> AddRange(Isa isa, const std::vector<std::vector<uint8_t>>& leaves, DType dtype,
                            uint32_t lo, uint32_t hi) {
  const size_t count = leaves[0].size() / DTypeSize(dtype);
  const uint32_t middle = NaiveSplit(lo, hi);
  std::vector<float> left, right;
  ReduceInput a{leaves[lo].data(), dtype}, b{leaves[middle].data(), dtype};
  if (middle - lo > 1) {
    left = AddRange(isa, leaves, dtype, lo, middle);
    a = {left.data(), DType::kFloat32};
  }
  if (hi - middle > 1) {
    right = AddRange(isa, leaves, dtype, middle, hi);
    b = {right.data(), DType::kFloat32};
  }
  std::vector<float> sum(count);
  AddNodes(isa, a, b, count, sum.data());
  return sum;
}

Published Publish(Isa isa, const std::vector<std::vector<uint8_t>>& leaves, DType dtype,
                  uint32_t world) {
  const auto slots = static_cast<uint32_t>(leaves.size());
  Published published;
  for (uint32_t rank = 0; rank < world; ++rank) {
    NaiveMaximalNodes(0, slots, rank * slots / world, (rank + 1) * slots / world, &published.nodes);
  }
  published.sums.resize(published.nodes.size());
  for (size_t i = 0; i < published.nodes.size(); ++i) {
    const SlotRange node = published.nodes[i];
    if (node.hi - node.lo == 1) {
      published.inputs.push_back({leaves[node.lo].data(), dtype});
    } else {
      published.sums[i] = AddRange(isa, leaves, dtype, node.lo, node.hi);
      published.inputs.push_back({published.sums[i].data(), DType::kFloat32});
    }
  }
  return published;
}

// --- Tests ---

class ReduceOnIsa : public testing::TestWithParam<Isa> {};

TEST_P(ReduceOnIsa, EveryWorldSizeGivesTheBitsOfTheTree) {
  const size_t count = 193;
  for (const DType dtype : kAllDTypes) {
    for (uint32_t slots = 1; slots <= 24; ++slots) {
      const auto leaves = Leaves(slots, dtype, count, slots);
      const std::vector<float> expected = NaiveSum(leaves, dtype);
      const std::vector<BlockStats> expected_stats = NaiveStats(expected);
      for (uint32_t world = 1; world <= slots; ++world) {
        const Published published = Publish(GetParam(), leaves, dtype, world);
        ReduceProgram program;
        ASSERT_TRUE(SlotTreeProgram(slots, published.nodes, &program));
        std::vector<float> sum(count);
        std::vector<BlockStats> stats(1);
        Reduce(GetParam(), program, published.inputs, count, sum.data(), DType::kFloat32,
               stats.data());
        ASSERT_TRUE(SameBits(expected, sum.data())) << slots << " slots, world " << world;
        ASSERT_TRUE(SameStats(expected_stats, stats)) << slots << " slots, world " << world;
      }
    }
  }
}

TEST_P(ReduceOnIsa, EverySizeAndBlockBoundary) {
  ScopedFlushToZero flush;
  for (const DType dtype : kAllDTypes) {
    std::vector<size_t> counts = {511, 512, 513, 4095, 4096, 4097, 12'321, 1'000'003};
    for (size_t count = 1; count <= 257; ++count) counts.push_back(count);
    for (const size_t count : counts) {
      const uint32_t slots = count % 2 == 0 ? 5 : 2;
      const auto leaves = Leaves(slots, dtype, count, static_cast<uint32_t>(count));
      const std::vector<float> expected = NaiveSum(leaves, dtype);
      const Published published = Publish(GetParam(), leaves, dtype, slots);
      ReduceProgram program;
      ASSERT_TRUE(SlotTreeProgram(slots, published.nodes, &program));
      const size_t offset = count % 3;  // with 0 the output is aligned, and streamed
      std::vector<float> sum(count + 64 + offset, 7.0f);
      float* const aligned =
          reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(sum.data()) + 63) / 64 * 64);
      float* const out = aligned + offset;
      std::vector<BlockStats> stats((count + kBlockElements - 1) / kBlockElements);
      Reduce(GetParam(), program, published.inputs, count, out, DType::kFloat32, stats.data());
      ASSERT_TRUE(SameBits(expected, out)) << count << " of dtype " << int(dtype);
      ASSERT_TRUE(SameStats(NaiveStats(expected), stats)) << count;
      ASSERT_EQ(out[count], 7.0f) << "wrote beyond the output";
      std::vector<float> again(count);
      Reduce(GetParam(), program, published.inputs, count, again.data(), DType::kFloat32, nullptr);
      ASSERT_TRUE(SameBits(expected, again.data()));
    }
  }
}

TEST_P(ReduceOnIsa, OneInputIsAFlushedCopyInItsDType) {
  const size_t count = 5000;
  ReduceProgram program;
  const SlotRange only[] = {{0, 1}};
  ASSERT_TRUE(SlotTreeProgram(1, only, &program));
  for (const DType dtype : kAllDTypes) {
    const std::vector<uint8_t> leaf = HostileArray(dtype, count, 3);
    const ReduceInput input{leaf.data(), dtype};
    std::vector<uint8_t> out(leaf.size());
    std::vector<BlockStats> stats(2);
    Reduce(GetParam(), program, {&input, 1}, count, out.data(), dtype, stats.data());
    std::vector<float> expected = Widened(leaf, dtype);
    for (float& x : expected) x = NaiveCanonical(NaiveFlush(x));
    const std::vector<float> actual = Widened(out, dtype);
    ASSERT_TRUE(SameBits(expected, actual.data())) << int(dtype);
    ASSERT_TRUE(SameStats(NaiveStats(expected), stats)) << int(dtype);
  }
}

TEST_P(ReduceOnIsa, MixedLeavesAndNodes) {
  const size_t count = 700;
  const auto bf16 = Leaves(3, DType::kBFloat16, count, 1);
  const std::vector<uint8_t> node = HostileArray(DType::kFloat32, count, 2);
  const std::vector<uint8_t> fp16 = HostileArray(DType::kFloat16, count, 3);
  // A left operand that is one input and a right one that is two.
  const SlotRange ranges[] = {{0, 4}, {4, 5}, {5, 6}, {6, 7}};
  const ReduceInput inputs[] = {{node.data(), DType::kFloat32},
                                {bf16[0].data(), DType::kBFloat16},
                                {fp16.data(), DType::kFloat16},
                                {bf16[1].data(), DType::kBFloat16}};
  ReduceProgram program;
  ASSERT_TRUE(SlotTreeProgram(7, ranges, &program));
  EXPECT_EQ(program.max_depth, 3u);
  std::vector<float> sum(count);
  Reduce(GetParam(), program, inputs, count, sum.data(), DType::kFloat32, nullptr);
  const auto a = Widened(node, DType::kFloat32), b = Widened(bf16[0], DType::kBFloat16),
             c = Widened(fp16, DType::kFloat16), d = Widened(bf16[1], DType::kBFloat16);
  std::vector<float> expected(count);
  for (size_t i = 0; i < count; ++i) {
    const float right =
        NaiveFlush(NaiveFlush(NaiveFlush(b[i]) + NaiveFlush(c[i])) + NaiveFlush(d[i]));
    expected[i] = NaiveCanonical(NaiveFlush(NaiveFlush(a[i]) + right));
  }
  EXPECT_TRUE(SameBits(expected, sum.data()));
}

TEST_P(ReduceOnIsa, AddNodesInPlace) {
  for (const size_t count : {1, 7, 16, 31, 33, 1000}) {
    const std::vector<float> a = HostileFloats(count, 1), b = HostileFloats(count, 2);
    std::vector<float> expected(count);
    for (size_t i = 0; i < count; ++i) {
      expected[i] = NaiveCanonical(NaiveFlush(NaiveFlush(a[i]) + NaiveFlush(b[i])));
    }
    for (const int in_place : {0, 1}) {
      std::vector<float> left = a, right = b;
      float* const out = in_place == 0 ? left.data() : right.data();
      AddNodes(GetParam(), {left.data(), DType::kFloat32}, {right.data(), DType::kFloat32}, count,
               out);
      EXPECT_TRUE(SameBits(expected, out)) << count;
    }
  }
}

TEST_P(ReduceOnIsa, SquaresDoNotOverflow) {
  const std::vector<float> big(100, 3e38f);
  const ReduceInput input{big.data(), DType::kFloat32};
  ReduceProgram program;
  const SlotRange only[] = {{0, 1}};
  ASSERT_TRUE(SlotTreeProgram(1, only, &program));
  std::vector<float> out(100);
  BlockStats stats;
  Reduce(GetParam(), program, {&input, 1}, 100, out.data(), DType::kFloat32, &stats);
  EXPECT_EQ(stats.nonfinite, 0u);
  EXPECT_NEAR(stats.sum_squares / (100 * 9e76), 1.0, 1e-6);
}

// What an earlier run left in its memory does not show: nor a longer tail of its inputs.
TEST_P(ReduceOnIsa, AReducerRunsAgain) {
  const DType dtype = DType::kBFloat16;
  const auto leaves = Leaves(5, dtype, 4096 + 31, 9);
  const std::vector<float> expected = NaiveSum(leaves, dtype);
  const Published published = Publish(GetParam(), leaves, dtype, 3);
  ReduceProgram program;
  ASSERT_TRUE(SlotTreeProgram(5, published.nodes, &program));
  Reducer reducer(GetParam(), program, published.inputs);
  for (const size_t count : {size_t{4096 + 31}, size_t{1}, size_t{4096 + 3}, size_t{512}}) {
    std::vector<float> sum(count);
    std::vector<BlockStats> stats((count + kBlockElements - 1) / kBlockElements);
    reducer.Run(count, sum.data(), DType::kFloat32, stats.data());
    const std::vector<float> first(expected.begin(),
                                   expected.begin() + static_cast<ptrdiff_t>(count));
    ASSERT_TRUE(SameBits(first, sum.data())) << count;
    ASSERT_TRUE(SameStats(NaiveStats(first), stats)) << count;
  }
}

std::string Name(const testing::TestParamInfo<Isa>& info) { return IsaName(info.param); }
INSTANTIATE_TEST_SUITE_P(All, ReduceOnIsa, testing::ValuesIn(SupportedIsas()), Name);

TEST(SlotTreeProgram, RefusesWhatIsNoTree) {
  ReduceProgram program;
  const auto accepts = [&program](uint32_t slots, std::vector<SlotRange> nodes) {
    return SlotTreeProgram(slots, nodes, &program);
  };
  EXPECT_TRUE(accepts(5, {{0, 4}, {4, 5}}));
  EXPECT_TRUE(accepts(5, {{0, 2}, {2, 3}, {3, 4}, {4, 5}}));
  EXPECT_FALSE(accepts(0, {}));
  EXPECT_FALSE(accepts(1, {}));
  EXPECT_FALSE(accepts(2, {{0, 1}}));                  // incomplete
  EXPECT_FALSE(accepts(2, {{1, 2}}));                  // does not begin at 0
  EXPECT_FALSE(accepts(2, {{0, 1}, {1, 2}, {1, 2}}));  // more than the tree
  EXPECT_FALSE(accepts(2, {{0, 2}, {0, 1}, {1, 2}}));  // overlapping
  EXPECT_FALSE(accepts(2, {{0, 3}}));                  // beyond the slots
  EXPECT_FALSE(accepts(5, {{0, 1}, {1, 5}}));          // 1..4 is no node
  EXPECT_FALSE(accepts(4, {{0, 1}, {1, 3}, {3, 4}}));  // 1..2 is no node
  EXPECT_FALSE(accepts(4, {{2, 4}, {0, 2}}));          // not ascending
  EXPECT_FALSE(accepts(2, {{0, 0}, {0, 2}}));          // empty
  EXPECT_FALSE(accepts(2, {{1, 0}, {0, 2}}));          // reversed
}

TEST(SlotTreeProgram, ManySlotsStayShallow) {
  std::vector<SlotRange> nodes;
  for (uint32_t slot = 0; slot < 100'000; ++slot) nodes.push_back({slot, slot + 1});
  ReduceProgram program;
  ASSERT_TRUE(SlotTreeProgram(100'000, nodes, &program));
  EXPECT_LE(program.max_depth, 18u);
  EXPECT_EQ(program.push.size(), 199'999u);
}

TEST(FoldTree, FollowsTheSlotTree) {
  EXPECT_EQ(FoldTree({}), 0.0);
  const double big = 0x1p53;
  EXPECT_EQ(FoldTree(std::vector<double>{3.0}), 3.0);
  // (big + 1) + 1 loses both ones; big + (1 + 1) would not.
  EXPECT_EQ(FoldTree(std::vector<double>{big, 1.0, 1.0}), big);
  EXPECT_EQ(FoldTree(std::vector<double>{big, 0.0, 1.0, 1.0}), big + 2.0);
  EXPECT_EQ(FoldTree(std::vector<double>{0.0, big, 1.0, 1.0, 0.0}), big + 2.0);
}

TEST(FindNonFinite, FirstOfEitherKind) {
  bool is_nan = true;
  std::vector<float> values(100, 3e38f);
  EXPECT_EQ(FindNonFinite(values.data(), DType::kFloat32, 100, &is_nan), 100u);
  EXPECT_FALSE(is_nan);
  values[99] = NAN;
  EXPECT_EQ(FindNonFinite(values.data(), DType::kFloat32, 100, &is_nan), 99u);
  EXPECT_TRUE(is_nan);
  values[3] = -INFINITY;
  EXPECT_EQ(FindNonFinite(values.data(), DType::kFloat32, 100, &is_nan), 3u);
  EXPECT_FALSE(is_nan);
  const uint16_t bf16[] = {0x7F7F, 0x7C00, 0xFF80, 0x7F81};
  EXPECT_EQ(FindNonFinite(bf16, DType::kBFloat16, 4, &is_nan), 2u);
  EXPECT_FALSE(is_nan);
  EXPECT_EQ(FindNonFinite(bf16 + 3, DType::kBFloat16, 1, &is_nan), 0u);
  EXPECT_TRUE(is_nan);
  const uint16_t fp16[] = {0x7BFF, 0xFC01, 0x7C00};
  EXPECT_EQ(FindNonFinite(fp16, DType::kFloat16, 3, &is_nan), 1u);
  EXPECT_TRUE(is_nan);
}

}  // namespace
}  // namespace shardd::kernels

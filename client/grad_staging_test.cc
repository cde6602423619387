#include "client/grad_staging.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "kernels/cast.h"
#include "kernels/reduce.h"

namespace shardd {
namespace {

using contract::Range;
using contract::SlotRange;
using kernels::DType;

contract::Layout MakeLayout() {
  contract::Layout::Options options;
  options.chunk_elements = 4096;
  options.bucket_elements = 8192;
  return *contract::Layout::Create(
      {{"a", {100, 50}, 0}, {"empty", {0}, 0}, {"b", {}, 0}, {"c", {9000}, 0}, {"d", {33}, 0}},
      options);
}

// Values whose sums depend on the order of addition.
float Value(uint32_t slot, uint64_t element) {
  uint64_t hash = (slot * 1'000'003 + element) * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 29;
  const int exponent = static_cast<int>(hash % 12);
  return std::ldexp(static_cast<float>((hash >> 8) % 4001) - 2000.0f, exponent - 10);
}

// Leaves of all slots as the daemon would receive them, and their tree sum by the
// scalar reference.
class Reference {
 public:
  Reference(const contract::Layout& layout, SlotRange node, DType dtype)
      : layout_(layout), node_(node), dtype_(dtype) {
    for (uint32_t slot = node.lo; slot < node.hi; ++slot) {
      leaves_[slot].assign(layout.flat_elements() * kernels::DTypeSize(dtype), std::byte{0});
    }
  }
  void Set(size_t parameter, uint32_t slot, const std::byte* data) {
    if (slot < node_.lo || slot >= node_.hi) return;
    const size_t element = kernels::DTypeSize(dtype_);
    const Range range = layout_.parameter_range(parameter);
    std::memcpy(leaves_[slot].data() + range.begin * element, data, range.size() * element);
  }
  std::vector<std::byte> Sum() const {
    if (node_.size() == 1) return leaves_.at(node_.lo);
    std::vector<kernels::SlotRange> nodes;
    std::vector<kernels::ReduceInput> inputs;
    for (uint32_t slot = node_.lo; slot < node_.hi; ++slot) {
      nodes.push_back({slot - node_.lo, slot - node_.lo + 1});
      inputs.push_back({leaves_.at(slot).data(), dtype_});
    }
    kernels::ReduceProgram program;
    EXPECT_TRUE(kernels::SlotTreeProgram(node_.size(), nodes, &program));
    std::vector<std::byte> sum(layout_.flat_elements() * 4);
    kernels::Reduce(kernels::Isa::kScalar, program, inputs, layout_.flat_elements(), sum.data(),
                    DType::kFloat32, nullptr);
    return sum;
  }

 private:
  const contract::Layout& layout_;
  const SlotRange node_;
  const DType dtype_;
  std::map<uint32_t, std::vector<std::byte>> leaves_;
};

// Gives gradients in a random order, leaving some out, and compares every node.
void CheckRun(uint32_t slots, SlotRange run, DType dtype, kernels::Isa isa, uint64_t seed) {
  const contract::Layout layout = MakeLayout();
  auto staging = *GradStaging::Create(layout, MakeSlotPlan(slots, run), dtype, isa);
  std::mt19937_64 random(seed);
  for (int step = 0; step < 2; ++step) {
    std::vector<Reference> references;
    for (const SlotPlan::Node& node : staging->plan().nodes) {
      references.emplace_back(layout, node.range, dtype);
    }
    for (size_t p = 0; p < layout.num_parameters(); ++p) {
      for (uint32_t slot = run.lo; slot < run.hi; ++slot) {
        if (random() % 4 == 0) continue;  // no gradient in this slot
        std::vector<float> values(layout.parameter_elements(p));
        for (size_t i = 0; i < values.size(); ++i) values[i] = Value(slot + 100 * step, p + i);
        std::byte* leaf = staging->Leaf(p, slot);
        kernels::Fp32ToGrad(kernels::Isa::kScalar, values.data(), values.size(), leaf, dtype);
        for (Reference& reference : references) reference.Set(p, slot, leaf);
        staging->Complete(p, slot);
      }
      staging->CompleteRest(p);
    }
    for (size_t node = 0; node < references.size(); ++node) {
      const std::vector<std::byte> want = references[node].Sum();
      std::vector<std::byte> got(want.size(), std::byte{0xff});
      staging->Fill(node, {0, layout.flat_elements()}, got.data());
      ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size()), 0)
          << slots << " slots, run " << run.lo << ".." << run.hi << ", node " << node << ", step "
          << step;
    }
    staging->Reset();
  }
}

TEST(GradStaging, SumsAreTheTreesBits) {
  uint64_t seed = 0;
  for (uint32_t slots : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 12u, 18u}) {
    for (uint32_t world : {1u, 2u, 3u}) {
      if (world > slots) continue;
      for (uint32_t rank = 0; rank < world; ++rank) {
        const SlotRange run = contract::SlotsOfRank(slots, world, rank);
        for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
          CheckRun(slots, run, dtype, kernels::BestIsa(), ++seed);
        }
      }
    }
  }
}

// The slot before is not zeroed after the next one's buffer was handed out, and a
// buffer does not move while it is filled.
TEST(GradStaging, ALeafStaysWhereItIs) {
  const contract::Layout layout = MakeLayout();
  auto staging =
      *GradStaging::Create(layout, MakeSlotPlan(4, {0, 4}), DType::kFloat32, kernels::BestIsa());
  EXPECT_EQ(staging->Leaf(0, 0), staging->Leaf(0, 0));
  // Slot 1 is acquired but never completed: it counts as zeros, and what was written
  // to it does not leak into slot 2.
  auto* floats = reinterpret_cast<float*>(staging->Leaf(2, 0));
  floats[0] = 1.0f;
  staging->Complete(2, 0);
  reinterpret_cast<float*>(staging->Leaf(2, 1))[0] = 100.0f;
  reinterpret_cast<float*>(staging->Leaf(2, 2))[0] = 10.0f;
  staging->Complete(2, 2);
  staging->CompleteRest(2);
  float sum = 0;
  const Range range = layout.parameter_range(2);
  staging->Fill(0, range, reinterpret_cast<std::byte*>(&sum));
  EXPECT_EQ(sum, 11.0f);
}

TEST(GradStaging, NegativeZeroBecomesPositiveInASum) {
  const contract::Layout layout = MakeLayout();
  auto staging =
      *GradStaging::Create(layout, MakeSlotPlan(2, {0, 2}), DType::kFloat32, kernels::BestIsa());
  for (uint32_t slot : {0u, 1u}) {
    reinterpret_cast<float*>(staging->Leaf(2, slot))[0] = -0.0f;
    staging->Complete(2, slot);
  }
  float sum = 1;
  staging->Fill(0, layout.parameter_range(2), reinterpret_cast<std::byte*>(&sum));
  EXPECT_EQ(std::memcmp(&sum, "\0\0\0\0", 4), 0);
}

TEST(GradStaging, DiscardGivesZerosBack) {
  const contract::Layout layout = MakeLayout();
  auto staging =
      *GradStaging::Create(layout, MakeSlotPlan(1, {0, 1}), DType::kFloat32, kernels::BestIsa());
  const Range whole{0, layout.flat_elements()};
  for (size_t p : {size_t{0}, size_t{3}}) {
    std::memset(staging->Leaf(p, 0), 1, layout.parameter_elements(p) * 4);
  }
  const Range bucket = layout.bucket_range(0);
  staging->Discard(bucket);
  std::vector<uint32_t> got(whole.size());
  staging->Fill(0, whole, reinterpret_cast<std::byte*>(got.data()));
  EXPECT_EQ(got[0], 0x01010101u);
  EXPECT_EQ(got[bucket.begin - 1], 0x01010101u);
  for (uint64_t i = bucket.begin; i < bucket.end; ++i) ASSERT_EQ(got[i], 0u) << i;
}

}  // namespace
}  // namespace shardd

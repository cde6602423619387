#include "server/step/bucket_sums.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <filesystem>
#include <limits>
#include <random>

#include "server/env/fault_guard.h"
#include "server/store/state_directory.h"

namespace shardd::step {
namespace {

using kernels::SlotRange;

constexpr uint32_t kSlots = 5;
constexpr uint64_t kBucket = 4 * 64 * 1024;  // several tasks of the pool
// 'a' [100], padded to 128, then 'w' [kBucket + 5000]: the buckets are the end and, larger, the
// begin of the flat space.
constexpr int64_t kOfA = 100;
constexpr uint64_t kBeginOfW = 128;
constexpr int64_t kOfW = kBucket + 5000;

// The rule of docs/numerics.md, written down once more: n slots split after the
// largest power of two below n.
float NaiveTree(const std::vector<std::vector<float>>& slots, uint32_t lo, uint32_t hi, size_t i) {
  if (hi - lo == 1) return slots[lo][i];
  const uint32_t middle = lo + std::bit_floor(hi - lo - 1);
  return NaiveTree(slots, lo, middle, i) + NaiveTree(slots, middle, hi, i);
}

class BucketSumsTest : public testing::Test {
 protected:
  BucketSumsTest() {
    env::InstallFaultHandler();
    std::string path = "/dev/shm/shardd-test-XXXXXX";
    EXPECT_NE(mkdtemp(path.data()), nullptr);
    root_ = path;
    auto directory = store::StateDirectory::Open(path + "/state");
    EXPECT_TRUE(directory.ok()) << directory.status();
    contract::Layout::Options options;
    options.bucket_elements = kBucket;
    auto layout = contract::Layout::Create({{"a", {kOfA}, 0}, {"w", {kOfW}, 0}}, options);
    EXPECT_TRUE(layout.ok()) << layout.status();
    layout_ = std::make_unique<contract::Layout>(*std::move(layout));
    store::JobSpec spec;
    spec.config.set_name("sums");
    spec.config.set_slots(kSlots);
    spec.config.set_grad_dtype(v1::fp32);
    spec.config.set_weight_dtype(v1::fp32);
    spec.config.add_groups();
    auto segments = store::JobSegments::Create(*directory, *layout_, spec,
                                               [](auto*) { return absl::OkStatus(); });
    EXPECT_TRUE(segments.ok()) << segments.status();
    segments_ = *std::move(segments);
    sums_ = std::make_unique<BucketSums>(layout_.get(), segments_.get(), kSlots, kernels::BestIsa(),
                                         &pool_);
    // Magnitudes so far apart that any other order of additions gives other bits.
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    slots_.resize(kSlots);
    for (auto& slot : slots_) {
      slot.resize(layout_->flat_elements());
      for (float& x : slot) x = std::exp2(normal(random) * 6) * normal(random);
    }
  }
  ~BucketSumsTest() override { std::filesystem::remove_all(root_); }

  // The slots lo .. hi-1 of a bucket, pre-added where they are several. Valid until the end.
  Contribution Node(uint64_t bucket, uint32_t lo, uint32_t hi) {
    const contract::Range range = layout_->bucket_range(bucket);
    Contribution c;
    c.node = {lo, hi};
    c.begin = range.begin;
    c.rank = lo;
    c.ring_index = 10 * bucket + lo;
    if (hi - lo == 1) {
      c.data = reinterpret_cast<const std::byte*>(slots_[lo].data() + range.begin);
      return c;
    }
    std::vector<float>& sum = nodes_.emplace_back();
    for (uint64_t i = range.begin; i < range.end; ++i) sum.push_back(NaiveTree(slots_, lo, hi, i));
    c.data = reinterpret_cast<const std::byte*>(sum.data());
    return c;
  }
  void AddAll(uint64_t bucket) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      ASSERT_EQ(sums_->Add(bucket, Node(bucket, slot, slot + 1)), AddResult::kAdded);
    }
  }
  void FoldAll() {
    for (uint64_t bucket = 0; bucket < layout_->num_buckets(); ++bucket) {
      AddAll(bucket);
      const void* fault = nullptr;
      ASSERT_TRUE(sums_->Fold(bucket, 1, &fault).ok());
    }
  }
  const float* reduced() const { return reinterpret_cast<const float*>(segments_->reduced(0)); }
  void ExpectIsTreeSum(uint64_t bucket) const {
    const contract::Range range = layout_->bucket_range(bucket);
    for (uint64_t i = range.begin; i < range.end; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(reduced()[i]),
                std::bit_cast<uint32_t>(NaiveTree(slots_, 0, kSlots, i)))
          << "element " << i;
    }
  }

  std::string root_;
  std::unique_ptr<contract::Layout> layout_;
  std::unique_ptr<store::JobSegments> segments_;
  env::ThreadPool pool_{4, [] {}};
  std::unique_ptr<BucketSums> sums_;
  std::vector<std::vector<float>> slots_;  // [kSlots][flat_elements]
  std::deque<std::vector<float>> nodes_;
};

TEST_F(BucketSumsTest, TheTreeInWhateverNodesAndOrderItComes) {
  const std::vector<std::vector<SlotRange>> splits = {
      {{4, 5}, {2, 3}, {0, 1}, {3, 4}, {1, 2}},
      {{4, 5}, {0, 4}},
      {{2, 4}, {0, 1}, {4, 5}, {1, 2}},
      {{0, 5}},
  };
  uint64_t step = 0;
  for (const std::vector<SlotRange>& split : splits) {
    ++step;
    sums_->Clear();
    EXPECT_TRUE(sums_->empty());
    for (uint64_t bucket = 0; bucket < layout_->num_buckets(); ++bucket) {
      EXPECT_FALSE(sums_->AllFolded());
      for (const SlotRange& node : split) {
        EXPECT_FALSE(sums_->HasAllNodes(bucket));
        EXPECT_EQ(sums_->Add(bucket, Node(bucket, node.lo, node.hi)), AddResult::kAdded);
      }
      EXPECT_FALSE(sums_->empty());
      ASSERT_TRUE(sums_->HasAllNodes(bucket));
      const void* fault = nullptr;
      const auto folded = sums_->Fold(bucket, step, &fault);
      ASSERT_TRUE(folded.ok()) << folded.status();
      ASSERT_EQ(folded->size(), split.size());
      uint32_t slot = 0;
      for (const Contribution& c : *folded) {
        EXPECT_EQ(c.node.lo, slot);
        EXPECT_EQ(c.ring_index, 10 * bucket + slot);
        slot = c.node.hi;
      }
      EXPECT_TRUE(sums_->IsFolded(bucket));
      EXPECT_FALSE(sums_->HasAllNodes(bucket));
      EXPECT_EQ(sums_->folded(), bucket + 1);
      EXPECT_EQ(segments_->reduced_line(bucket)->step.load(), step);
      EXPECT_EQ(segments_->reduced_line(bucket)->nonfinite.load(), 0u);
      ExpectIsTreeSum(bucket);
      std::memset(segments_->reduced(layout_->bucket_range(bucket).begin), 0, 4096);
    }
    EXPECT_TRUE(sums_->AllFolded());
    EXPECT_FALSE(sums_->nonfinite().found);
  }
}

TEST_F(BucketSumsTest, SumOfSquaresOverAllBuckets) {
  FoldAll();
  long double expected = 0;
  for (uint64_t i = 0; i < layout_->flat_elements(); ++i) {
    expected += static_cast<long double>(reduced()[i]) * reduced()[i];
  }
  ASSERT_GT(expected, 0);
  EXPECT_NEAR(sums_->SumSquares() / static_cast<double>(expected), 1, 1e-13);
}

TEST_F(BucketSumsTest, DuplicatesAndOverlaps) {
  ASSERT_EQ(sums_->Add(0, Node(0, 2, 4)), AddResult::kAdded);
  EXPECT_EQ(sums_->Add(0, Node(0, 2, 4)), AddResult::kDuplicate);
  EXPECT_EQ(sums_->Add(0, Node(0, 2, 3)), AddResult::kOverlaps);
  EXPECT_EQ(sums_->Add(0, Node(0, 3, 4)), AddResult::kOverlaps);
  EXPECT_EQ(sums_->Add(0, Node(0, 0, 4)), AddResult::kOverlaps);
  EXPECT_EQ(sums_->Add(0, Node(0, 0, 5)), AddResult::kOverlaps);
  EXPECT_FALSE(sums_->HasAllNodes(0));
  // Another bucket is another matter.
  EXPECT_EQ(sums_->Add(1, Node(1, 2, 4)), AddResult::kAdded);
  EXPECT_EQ(sums_->Add(0, Node(0, 4, 5)), AddResult::kAdded);
  EXPECT_EQ(sums_->Add(0, Node(0, 0, 2)), AddResult::kAdded);
  ASSERT_TRUE(sums_->HasAllNodes(0));
  const void* fault = nullptr;
  ASSERT_TRUE(sums_->Fold(0, 1, &fault).ok());
  ExpectIsTreeSum(0);
  EXPECT_EQ(sums_->Add(0, Node(0, 0, 2)), AddResult::kDuplicate);
  EXPECT_EQ(sums_->Add(0, Node(0, 0, 1)), AddResult::kDuplicate);
  EXPECT_EQ(sums_->folded(), 1u);
}

TEST_F(BucketSumsTest, SaysWhoseNanItWas) {
  slots_[3][kBeginOfW + 70'001] = std::numeric_limits<float>::quiet_NaN();
  FoldAll();
  EXPECT_TRUE(sums_->nonfinite().found);
  EXPECT_EQ(sums_->nonfinite().what,
            "NaN in the gradient's element 70001 of parameter 'w' from rank 3");
  const uint64_t bucket = layout_->bucket_of(kBeginOfW + 70'001);
  EXPECT_EQ(segments_->reduced_line(bucket)->nonfinite.load(), 1u);
  EXPECT_EQ(segments_->reduced_line(1 - bucket)->nonfinite.load(), 0u);
  EXPECT_TRUE(std::isnan(sums_->SumSquares()));
  sums_->Clear();
  EXPECT_FALSE(sums_->nonfinite().found);
}

TEST_F(BucketSumsTest, TheFirstBucketFoldedIsTheOneThatIsBlamed) {
  slots_[1][5] = std::numeric_limits<float>::quiet_NaN();
  slots_[2][layout_->flat_elements() - 32] = -std::numeric_limits<float>::infinity();
  FoldAll();
  EXPECT_EQ(sums_->nonfinite().what.find("Inf in the gradient's element "), 0u)
      << sums_->nonfinite().what;
  EXPECT_NE(sums_->nonfinite().what.find("from rank 2"), std::string::npos)
      << sums_->nonfinite().what;
}

TEST_F(BucketSumsTest, FiniteGradientsWhoseSumIsNot) {
  slots_[0][7] = slots_[4][7] = std::numeric_limits<float>::max();
  FoldAll();
  EXPECT_EQ(sums_->nonfinite().what,
            "Inf in the gradient's element 7 of parameter 'a' from the sum over all ranks");
}

TEST_F(BucketSumsTest, PaddingIsCheckedToo) {
  slots_[1][kOfA + 3] = std::numeric_limits<float>::infinity();
  FoldAll();
  EXPECT_EQ(sums_->nonfinite().what, "Inf in the gradient's padding element 103 from rank 1");
}

TEST_F(BucketSumsTest, ARingThatIsGoneLeavesTheBucketUnmarked) {
  const uint64_t bytes = layout_->bucket_range(1).size() * sizeof(float);
  const contract::UniqueFd fd(memfd_create("bucket_sums_test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  void* ring = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(ring, MAP_FAILED);
  segments_->reduced_line(1)->step = 8;
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    Contribution c = Node(1, slot, slot + 1);
    if (slot == 2) c.data = static_cast<const std::byte*>(ring);
    ASSERT_EQ(sums_->Add(1, c), AddResult::kAdded);
  }
  ASSERT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes / 2)), 0);
  const void* fault = nullptr;
  const auto folded = sums_->Fold(1, 9, &fault);
  EXPECT_TRUE(absl::IsDataLoss(folded.status())) << folded.status();
  EXPECT_GE(static_cast<std::byte*>(ring) + bytes, fault);
  EXPECT_LE(static_cast<std::byte*>(ring) + bytes / 2, fault);
  EXPECT_FALSE(sums_->IsFolded(1));
  EXPECT_EQ(segments_->reduced_line(1)->step.load(), 0u);
  // The step is given up and done again by those that are left.
  munmap(ring, bytes);
  sums_->Clear();
  AddAll(1);
  ASSERT_TRUE(sums_->Fold(1, 9, &fault).ok());
  EXPECT_EQ(segments_->reduced_line(1)->step.load(), 9u);
  ExpectIsTreeSum(1);
}

}  // namespace
}  // namespace shardd::step

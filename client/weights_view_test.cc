#include "client/weights_view.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <vector>

namespace shardd {
namespace {

using contract::Range;

// A daemon's weights: the value of element i at step s is i + 1000 * s, bucket by
// bucket as they become ready.
class Source {
 public:
  Source() {
    contract::Layout::Options options;
    options.chunk_elements = 4096;
    options.bucket_elements = 4096;
    layout_ = std::make_unique<contract::Layout>(*contract::Layout::Create(
        {{"a", {6000}, 0}, {"b", {100}, 0}, {"empty", {0}, 0}, {"c", {20000}, 0}, {"d", {7}, 0}},
        options));
    weights_.resize(layout_->flat_elements());
    ready_.resize(layout_->num_buckets());
    for (uint64_t b = 0; b < layout_->num_buckets(); ++b) SetReady(b, 0);
  }
  const contract::Layout& layout() const { return *layout_; }
  void SetReady(uint64_t bucket, uint64_t step) {
    const Range range = layout_->bucket_range(bucket);
    for (uint64_t i = range.begin; i < range.end; ++i) weights_[i] = Value(i, step);
    ready_[bucket] = step;
  }
  void SetAllReady(uint64_t step) {
    for (uint64_t b = 0; b < layout_->num_buckets(); ++b) SetReady(b, step);
  }
  static float Value(uint64_t element, uint64_t step) {
    return static_cast<float>(element) + 1000.0f * static_cast<float>(step);
  }
  // Waits make the next bucket ready, from the end of the flat space backwards.
  WeightsSource Get() {
    WeightsSource source;
    source.weights = reinterpret_cast<const std::byte*>(weights_.data());
    source.dtype = kernels::DType::kFloat32;
    source.ready_step = [this](uint64_t bucket) { return ready_[bucket]; };
    source.wait = [this](absl::FunctionRef<bool()> done) -> absl::Status {
      ++waits;
      if (!failure.ok()) return failure;
      for (uint64_t b = 0; b < ready_.size() && !done(); ++b) SetReady(b, next_step);
      return done() ? absl::OkStatus() : absl::InternalError("all are ready");
    };
    return source;
  }
  void ExpectStep(size_t parameter, uint64_t step, const absl::StatusOr<const void*>& got) {
    ASSERT_TRUE(got.ok()) << got.status();
    const Range range = layout_->parameter_range(parameter);
    for (uint64_t i = 0; i < range.size(); ++i) {
      ASSERT_EQ(static_cast<const float*>(*got)[i], Value(range.begin + i, step));
    }
  }

  int waits = 0;
  uint64_t next_step = 1;
  absl::Status failure;

 private:
  std::unique_ptr<contract::Layout> layout_;
  std::vector<float> weights_;
  std::vector<uint64_t> ready_;
};

// Rss of the memory named "shardd-weights", in bytes.
uint64_t ResidentWeights() {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  uint64_t kilobytes = 0;
  while (std::getline(smaps, line)) {
    if (line.find('-') < line.find(' ')) inside = line.find("shardd-weights") != std::string::npos;
    if (!inside || !line.starts_with("Rss:")) continue;
    uint64_t value = 0;
    std::istringstream(line.substr(4)) >> value;
    kilobytes += value;
  }
  return kilobytes * 1024;
}

TEST(SharedWeights, IsTheSegmentItselfAndWaitsForItsBucketsOnly) {
  Source source;
  WeightsSource get = source.Get();
  const std::byte* base = get.weights;
  auto view = MakeSharedWeights(source.layout(), get);
  const auto got = view->Wait(1, 0);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(*got, base + source.layout().parameter_range(1).begin * 4);
  EXPECT_EQ(source.waits, 0);
  source.SetReady(source.layout().num_buckets() - 1, 1);  // the first elements
  source.SetReady(source.layout().num_buckets() - 2, 1);
  source.ExpectStep(0, 1, view->Wait(0, 1));
  EXPECT_EQ(source.waits, 0);
  source.ExpectStep(3, 1, view->Wait(3, 1));
  EXPECT_EQ(source.waits, 1);
  EXPECT_TRUE(view->Wait(2, 1).ok()) << "a parameter without elements";
  source.failure = absl::UnavailableError("gone");
  EXPECT_EQ(view->Wait(0, 2).status().code(), absl::StatusCode::kUnavailable);
  const size_t all[] = {0, 1, 2, 3, 4};
  EXPECT_EQ(view->Gather(all, 2).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(view->Gather(all, 1).ok());
}

TEST(PrivateWeights, IsACopyThatFollowsStepByStep) {
  Source source;
  auto view = *MakePrivateWeights(source.layout(), source.Get());
  for (size_t p = 0; p < source.layout().num_parameters(); ++p) {
    source.ExpectStep(p, 0, view->Wait(p, 0));
  }
  const void* before = *view->Wait(0, 0);
  // The daemon goes on; the copy stays until it is asked for the next step.
  source.SetAllReady(1);
  EXPECT_EQ(static_cast<const float*>(before)[5], Source::Value(5, 0));
  source.ExpectStep(0, 1, view->Wait(0, 1));
  EXPECT_EQ(before, *view->Wait(0, 1));
  source.ExpectStep(3, 1, view->Wait(3, 1));
}

TEST(ShardedWeights, OnlyWhatIsGatheredCanBeRead) {
  Source source;
  auto view = *MakeShardedWeights(source.layout(), source.Get(), {0, 4096});
  EXPECT_EQ(view->Wait(3, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(view->Wait(3, 0).status().message()).find("'c'"), std::string::npos);
  const size_t some[] = {3, 1};
  ASSERT_TRUE(view->Gather(some, 0).ok());
  source.ExpectStep(3, 0, view->Wait(3, 0));
  source.ExpectStep(1, 0, view->Wait(1, 0));
  // Still gathered at the next step: refreshed.
  source.SetAllReady(1);
  source.ExpectStep(3, 1, view->Wait(3, 1));
  view->Release(some);
  view->Release(some);  // once more does nothing
  EXPECT_FALSE(view->Wait(3, 1).ok());
  ASSERT_TRUE(view->Gather(some, 1).ok());
  source.ExpectStep(1, 1, view->Wait(1, 1));
}

TEST(ShardedWeights, HoldsTheShardAndWhatIsGathered) {
  Source source;
  const uint64_t before = ResidentWeights();
  ASSERT_EQ(before, 0u);
  auto view = *MakeShardedWeights(source.layout(), source.Get(), {0, 4096});
  EXPECT_EQ(ResidentWeights(), 0u);
  const size_t first[] = {0};  // elements 0..6000: all of the shard and more
  const size_t third[] = {3};  // 20000 elements
  ASSERT_TRUE(view->Gather(first, 0).ok());
  EXPECT_EQ(ResidentWeights(), 6u * 4096);
  ASSERT_TRUE(view->Gather(third, 0).ok());
  const uint64_t both = ResidentWeights();
  EXPECT_GE(both, 26000u * 4);
  EXPECT_LE(both, 27u * 4096);
  view->Release(third);
  EXPECT_EQ(ResidentWeights(), 6u * 4096);
  // The last page of `first` is shared with `b`: it goes when both are released.
  const size_t second[] = {1};
  ASSERT_TRUE(view->Gather(second, 0).ok());
  view->Release(first);
  EXPECT_EQ(ResidentWeights(), 4u * 4096 + 4096) << "shard and the page of b";
  source.ExpectStep(1, 0, view->Wait(1, 0));
  view->Release(second);
  EXPECT_EQ(ResidentWeights(), 4u * 4096) << "the own shard";
}

// Another daemon's segment: the memory that was handed out stays, its content is that one's.
TEST(AllWeights, FollowTheSourceToAnotherAddress) {
  Source before, after;
  after.SetAllReady(3);
  const auto* other = after.Get().weights;
  const size_t b[] = {1};

  auto shared = MakeSharedWeights(before.layout(), before.Get());
  shared->Rebase(other);
  EXPECT_EQ(*shared->Wait(1, 0), other + before.layout().parameter_range(1).begin * 4);

  auto copied = *MakePrivateWeights(before.layout(), before.Get());
  auto sharded = *MakeShardedWeights(before.layout(), before.Get(), {0, 0});
  for (WeightsView* view : {copied.get(), sharded.get()}) {
    ASSERT_TRUE(view->Gather(b, 0).ok());
    const void* memory = *view->Wait(1, 0);
    before.ExpectStep(1, 0, memory);
    view->Rebase(other);
    before.ExpectStep(1, 3, view->Wait(1, 0));
    EXPECT_EQ(*view->Wait(1, 0), memory);
  }
}

}  // namespace
}  // namespace shardd

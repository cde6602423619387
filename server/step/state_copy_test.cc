#include "server/step/state_copy.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "server/store/state_directory.h"

namespace shardd::step {
namespace {

constexpr uint64_t kChunks = 6;
constexpr uint32_t kChunkElements = 4096;

// A job of six chunks, each array of chunk c filled with a value of its own.
class StateCopyTest : public testing::Test {
 protected:
  StateCopyTest() {
    char name[] = "/dev/shm/shardd-copy-XXXXXX";
    path_ = mkdtemp(name);
    auto directory = store::StateDirectory::Open(path_);
    EXPECT_TRUE(directory.ok()) << directory.status();
    directory_ = std::make_unique<store::StateDirectory>(*std::move(directory));
    auto layout = contract::Layout::Create({{"w", {kChunks * kChunkElements - 100}, 0}},
                                           {.chunk_elements = kChunkElements, .groups = 1});
    EXPECT_TRUE(layout.ok()) << layout.status();
    layout_ = std::make_unique<contract::Layout>(*std::move(layout));
    store::JobSpec spec;
    spec.config.set_name("x");
    spec.config.set_slots(1);
    spec.config.set_grad_dtype(v1::fp32);
    spec.config.set_weight_dtype(v1::fp32);
    spec.config.add_groups();
    spec.moments = 2;
    spec.timeline = 7;
    auto segments = store::JobSegments::Create(*directory_, *layout_, spec,
                                               [](auto*) { return absl::OkStatus(); });
    EXPECT_TRUE(segments.ok()) << segments.status();
    segments_ = *std::move(segments);
    for (uint64_t c = 0; c < kChunks; ++c) Fill(c, 0);
  }
  ~StateCopyTest() override {
    segments_.reset();
    directory_.reset();
    std::filesystem::remove_all(path_);
  }

  // What chunk c carries after `step`.
  static float Value(uint64_t chunk, int array, int step) {
    return static_cast<float>(1000 * step + 10 * static_cast<int>(chunk) + array);
  }
  void Fill(uint64_t chunk, int step) {
    const store::ChunkView view = segments_->chunk(chunk);
    const uint64_t count = layout_->chunk_range(chunk).size();
    for (size_t array = 0; array < 3; ++array) {
      const std::vector<float> values(count, Value(chunk, static_cast<int>(array), step));
      view.Write(array, 0, count, values.data());
    }
  }
  float Master(uint64_t chunk) const {
    float value = 0;
    segments_->chunk(chunk).Read(0, 0, 1, &value);
    return value;
  }
  std::unique_ptr<StateCopy> Begin(uint64_t pool_chunks, bool masters_only = false,
                                   bool lazy = false) {
    StateSnapshot snapshot(*layout_);
    snapshot.chunks = {0, kChunks};
    snapshot.parts = {{snapshot.chunks, 1}};
    snapshot.moments = 2;
    StateCopy::Options options;
    options.pool = *CopyPool::Create(pool_chunks * StateCopy::SlotBytes(*layout_, 2, masters_only));
    options.masters_only = masters_only;
    options.lazy = lazy;
    return std::make_unique<StateCopy>(std::move(snapshot), options, segments_.get(), &gate_);
  }
  // As the updater does it.
  void Update(StateCopy* copy, uint64_t chunk, int step) {
    while (true) {
      gate_.Claim(chunk);
      if (copy->CopyBeforeUpdate(chunk)) break;
      gate_.Release(chunk);
      copy->AwaitRoom(chunk);
    }
    Fill(chunk, step);
    gate_.Release(chunk);
  }
  // Takes `chunk` and expects what it carried at step 0.
  void ExpectTaken(StateCopy* copy, uint64_t chunk, int moments = 2) {
    const absl::Status status = copy->Take(chunk, [&](const ChunkArrays& arrays) {
      EXPECT_EQ(arrays.count, layout_->chunk_range(chunk).size());
      for (uint64_t i = 0; i < arrays.count; i += 97) {
        EXPECT_EQ(arrays.master[i], Value(chunk, 0, 0));
        for (int m = 0; m < moments; ++m) {
          EXPECT_EQ(arrays.moment[static_cast<size_t>(m)][i], Value(chunk, m + 1, 0));
        }
      }
      EXPECT_EQ(arrays.moment[1] != nullptr, moments == 2);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }

  std::string path_;
  std::unique_ptr<store::StateDirectory> directory_;
  std::unique_ptr<contract::Layout> layout_;
  std::unique_ptr<store::JobSegments> segments_;
  ChunkGate gate_{kChunks};
};

TEST_F(StateCopyTest, HoldsTheStepAtWhichItBegan) {
  auto copy = Begin(kChunks);
  for (uint64_t c = 0; c < kChunks; ++c) Update(copy.get(), c, 1);
  for (uint64_t c = 0; c < kChunks; ++c) Update(copy.get(), c, 2);
  for (uint64_t c = 0; c < kChunks; ++c) ExpectTaken(copy.get(), c);
  EXPECT_EQ(copy->stall_seconds(), 0);
  EXPECT_EQ(Master(3), Value(3, 0, 2));
  EXPECT_LE(copy->pool_bytes_used(), copy->pool_bytes());
}

TEST_F(StateCopyTest, ALazyOneLeavesTheStateWhereItIsUntilAStepBegins) {
  auto copy = Begin(kChunks, false, /*lazy=*/true);
  for (uint64_t c : {0, 4}) ExpectTaken(copy.get(), c);
  EXPECT_EQ(copy->pool_bytes_used(), 0u);
  std::thread updater([&] {
    copy->Hurry();
    for (uint64_t c = 0; c < kChunks; ++c) Update(copy.get(), c, 1);
  });
  for (uint64_t c : {1, 2, 3, 5}) ExpectTaken(copy.get(), c);
  updater.join();
  EXPECT_EQ(Master(4), Value(4, 0, 1));
}

TEST_F(StateCopyTest, ALazyOneThatIsNotNeededEnds) {
  auto copy = Begin(kChunks, false, /*lazy=*/true);
  copy->Detach();
  EXPECT_EQ(copy->pool_bytes_used(), 0u);
}

TEST_F(StateCopyTest, AnUpdaterWaitsForRoomAndIsLetOnByTheReader) {
  auto copy = Begin(1);
  std::thread updater([&] {
    for (int step = 1; step <= 3; ++step) {
      for (uint64_t c = 0; c < kChunks; ++c) Update(copy.get(), c, step);
    }
  });
  for (uint64_t c = 0; c < kChunks; ++c) ExpectTaken(copy.get(), c);
  updater.join();
  EXPECT_LE(copy->pool_bytes_used(), StateCopy::SlotBytes(*layout_, 2, false));
}

TEST_F(StateCopyTest, ReadersInAnyOrderAndMastersOnly) {
  auto copy = Begin(2, /*masters_only=*/true);
  std::thread updater([&] {
    for (uint64_t c = kChunks; c-- > 0;) Update(copy.get(), c, 1);
  });
  for (uint64_t c : {5, 0, 3, 1, 4, 2}) ExpectTaken(copy.get(), c, 0);
  updater.join();
}

TEST_F(StateCopyTest, CancelledNobodyWaits) {
  auto copy = Begin(1);
  std::thread updater([&] {
    for (uint64_t c = 0; c < kChunks; ++c) Update(copy.get(), c, 1);
  });
  int told = 0;
  copy->OnCancel([&] { ++told; });
  copy->Cancel();
  copy->Cancel();
  EXPECT_EQ(told, 1);
  copy->OnCancel([&] { ++told; });  // it is over: at once
  EXPECT_EQ(told, 2);
  updater.join();
  const absl::Status status = copy->Take(5, [](const ChunkArrays&) { return absl::OkStatus(); });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  copy->Detach();
}

TEST_F(StateCopyTest, WhatAReaderReturnsIsPassedOn) {
  auto copy = Begin(kChunks);
  EXPECT_TRUE(absl::IsDataLoss(
      copy->Take(0, [](const ChunkArrays&) { return absl::DataLossError("disk"); })));
  EXPECT_TRUE(absl::IsInternal(copy->Take(0, [](const ChunkArrays&) { return absl::OkStatus(); })));
}

}  // namespace
}  // namespace shardd::step

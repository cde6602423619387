#include "client/weights_segment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

namespace shardd {
namespace {

using contract::kLineBytes;
using contract::kSegmentPage;

class WeightsSegmentTest : public testing::Test {
 protected:
  WeightsSegmentTest() {
    contract::Layout::Options options;
    options.chunk_elements = 4096;
    options.bucket_elements = 4096;
    layout_ = std::make_unique<contract::Layout>(
        *contract::Layout::Create({{"w", {10'000}, 0}}, options));
    header_.magic = contract::kWeightsMagic;
    header_.version = contract::kFormatVersion;
    header_.weight_dtype = static_cast<uint32_t>(kernels::DType::kFloat32);
    header_.job_tag = 1;
    header_.timeline = 2;
    header_.layout_hash = layout_->hash();
    header_.flat_elements = layout_->flat_elements();
    header_.buckets = layout_->num_buckets();
    header_.session_lines = 4;
    header_.bucket_lines_offset = 2 * kSegmentPage;
    header_.session_lines_offset = header_.bucket_lines_offset + header_.buckets * kLineBytes;
    header_.weights_offset = 3 * kSegmentPage;
    header_.total_bytes = header_.weights_offset + header_.flat_elements * 4;
    expected_.bytes = header_.total_bytes;
    expected_.job_tag = 1;
    expected_.timeline = 2;
    expected_.session_line = 3;
    expected_.weight_dtype = kernels::DType::kFloat32;
    memory_ = *MemoryFile::Create("segment", header_.total_bytes, false);
  }
  absl::StatusOr<std::unique_ptr<WeightsSegment>> Map() {
    std::memcpy(memory_.data(), &header_, sizeof(header_));
    return WeightsSegment::Map(contract::UniqueFd(dup(memory_.fd())), *layout_, expected_);
  }
  contract::Board& board() {
    return *reinterpret_cast<contract::Board*>(memory_.data() + kSegmentPage);
  }

  std::unique_ptr<contract::Layout> layout_;
  contract::WeightsHeader header_{};
  WeightsSegment::Expected expected_;
  MemoryFile memory_;
};

TEST_F(WeightsSegmentTest, FindsItsParts) {
  auto segment = Map();
  ASSERT_TRUE(segment.ok()) << segment.status();
  reinterpret_cast<contract::BucketLine*>(memory_.data() + header_.bucket_lines_offset)[2]
      .ready_step.store(7);
  reinterpret_cast<contract::SessionLine*>(memory_.data() + header_.session_lines_offset)[3]
      .session.store(8);
  memory_.data()[header_.weights_offset] = std::byte{9};
  board().generation.store(10);
  EXPECT_EQ((*segment)->ready_step(2), 7u);
  EXPECT_EQ((*segment)->ready_step(1), 0u);
  EXPECT_EQ((*segment)->line().session.load(), 8u);
  EXPECT_EQ((*segment)->weights()[0], std::byte{9});
  EXPECT_EQ((*segment)->board().generation.load(), 10u);
}

TEST_F(WeightsSegmentTest, AHeaderThatDoesNotFitIsRefused) {
  const contract::WeightsHeader good = header_;
  const std::vector<std::function<void(contract::WeightsHeader&)>> changes = {
      [](auto& h) { h.magic ^= 1; },
      [](auto& h) { ++h.version; },
      [](auto& h) { h.weight_dtype = 2; },
      [](auto& h) { ++h.job_tag; },
      [](auto& h) { ++h.timeline; },
      [](auto& h) { ++h.layout_hash; },
      [](auto& h) { h.flat_elements += 32; },
      [](auto& h) { ++h.buckets; },
      [](auto& h) { h.session_lines = 3; },
      [](auto& h) { h.bucket_lines_offset += 8; },
      [](auto& h) { h.bucket_lines_offset = UINT64_MAX - 63; },
      [](auto& h) { h.session_lines_offset = h.total_bytes / 64 * 64; },
      [](auto& h) { h.session_lines = UINT64_MAX; },
      [](auto& h) { h.weights_offset += kSegmentPage; },
      [](auto& h) { h.weights_offset += 64; },
      [](auto& h) { ++h.total_bytes; },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    header_ = good;
    changes[i](header_);
    EXPECT_EQ(Map().status().code(), absl::StatusCode::kFailedPrecondition) << "change " << i;
  }
  header_ = good;
  EXPECT_TRUE(Map().ok());
  expected_.bytes = 4096;
  EXPECT_EQ(Map().status().code(), absl::StatusCode::kFailedPrecondition);
  expected_.bytes = uint64_t{1} << 40;
  EXPECT_EQ(Map().status().code(), absl::StatusCode::kInvalidArgument) << "beyond the file";
}

// All fields of a decision belong together, whenever they are read.
TEST_F(WeightsSegmentTest, ADecisionIsReadAsOne) {
  auto segment = *Map();
  std::atomic<bool> stop{false};
  const auto write = [&](uint64_t step) {
    contract::Board& b = board();
    b.decision_seq.fetch_add(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    b.committed_step.store(step, std::memory_order_relaxed);
    b.applied.store(step * 2, std::memory_order_relaxed);
    b.result.store(static_cast<uint32_t>(step * 3), std::memory_order_relaxed);
    b.loss.store(static_cast<double>(step) * 4, std::memory_order_relaxed);
    b.grad_norm.store(static_cast<double>(step) * 5, std::memory_order_relaxed);
    b.loss_scale.store(static_cast<double>(step) * 6, std::memory_order_relaxed);
    const std::string text = std::string(step % 200, 'a') + std::to_string(step);
    for (size_t i = 0; i <= text.size(); ++i) {
      __atomic_store_n(&b.skip_reason[i], text.c_str()[i], __ATOMIC_RELAXED);
    }
    b.decision_seq.fetch_add(1, std::memory_order_release);
  };
  write(1);
  std::thread writer([&] {
    for (uint64_t step = 2; !stop; ++step) write(step);
  });
  uint64_t last = 0;
  for (int i = 0; i < 20'000;) {
    const std::optional<BoardDecision> read = segment->ReadDecision();
    if (!read) continue;
    ++i;
    const BoardDecision& d = *read;
    ASSERT_GE(d.committed_step, last);
    last = d.committed_step;
    ASSERT_EQ(d.applied, last * 2);
    ASSERT_EQ(d.result, static_cast<uint32_t>(last * 3));
    ASSERT_EQ(d.loss, static_cast<double>(last) * 4);
    ASSERT_EQ(d.grad_norm, static_cast<double>(last) * 5);
    ASSERT_EQ(d.loss_scale, static_cast<double>(last) * 6);
    ASSERT_EQ(d.skip_reason, std::string(last % 200, 'a') + std::to_string(last));
  }
  stop = true;
  writer.join();
}

TEST_F(WeightsSegmentTest, AWriterThatDiedAmidADecisionHoldsNobody) {
  auto segment = *Map();
  EXPECT_TRUE(segment->ReadDecision().has_value());
  board().decision_seq.fetch_add(1);
  EXPECT_FALSE(segment->ReadDecision().has_value());
}

TEST_F(WeightsSegmentTest, TextsEndWithTheirFieldAtTheLatest) {
  auto segment = *Map();
  std::memset(board().failure, 'x', sizeof(board().failure));
  EXPECT_EQ(segment->Failure(), std::string(sizeof(board().failure), 'x'));
  std::memset(board().failure, 0, sizeof(board().failure));
  EXPECT_EQ(segment->Failure(), "");
}

}  // namespace
}  // namespace shardd

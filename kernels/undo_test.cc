#include "kernels/undo.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace shardd::kernels {
namespace {

constexpr uint64_t kTimeline = 77;
constexpr uint32_t kEpoch = 9;
constexpr size_t kChunk = 256;

class MendChunkTest : public testing::Test {
 protected:
  MendChunkTest() : master_(kChunk, 1.0f), m_(kChunk, 2.0f), v_(kChunk, 3.0f), x_(kChunk, 4.0f) {
    ResetUndo(&log_, kTimeline);
  }

  void Fill(int slot, uint32_t epoch, uint32_t position, uint32_t count, float old) {
    UndoSlot& s = log_.slot[slot];
    for (size_t i = 0; i < kUndoElements; ++i) {
      s.master[i] = old;
      s.state[0][i] = old + 1;
      s.state[1][i] = old + 2;
      log_.third[slot][i] = old + 3;
    }
    s.count = count;
    s.tag = (uint64_t{epoch} << 32) | (position + 1);
  }

  size_t Mend() {
    return MendChunk(log_, kTimeline, kEpoch, kChunk, master_.data(),
                     {m_.data(), v_.data(), x_.data()});
  }

  bool Untouched() const {
    return master_ == std::vector<float>(kChunk, 1.0f) && m_ == std::vector<float>(kChunk, 2.0f) &&
           v_ == std::vector<float>(kChunk, 3.0f) && x_ == std::vector<float>(kChunk, 4.0f);
  }

  UndoLog log_;
  std::vector<float> master_, m_, v_, x_;
};

TEST_F(MendChunkTest, NewLogMeansNotBegun) {
  EXPECT_EQ(Mend(), 0u);
  EXPECT_TRUE(Untouched());
}

TEST_F(MendChunkTest, RestoresTheLaterGroupOnly) {
  Fill(0, kEpoch, 128, 64, 50.0f);
  Fill(1, kEpoch, 64, 64, 40.0f);
  EXPECT_EQ(Mend(), 128u);
  for (size_t i = 0; i < kChunk; ++i) {
    const bool restored = i >= 128 && i < 192;
    EXPECT_EQ(master_[i], restored ? 50.0f : 1.0f);
    EXPECT_EQ(m_[i], restored ? 51.0f : 2.0f);
    EXPECT_EQ(v_[i], restored ? 52.0f : 3.0f);
    EXPECT_EQ(x_[i], restored ? 53.0f : 4.0f);
  }
  const std::vector<float> once = master_;
  EXPECT_EQ(Mend(), 128u);  // idempotent
  EXPECT_EQ(master_, once);
}

TEST_F(MendChunkTest, ShortGroupAndAbsentStates) {
  Fill(1, kEpoch, 250, 6, 60.0f);
  EXPECT_EQ(MendChunk(log_, kTimeline, kEpoch, kChunk, master_.data(), {}), 250u);
  EXPECT_EQ(master_[249], 1.0f);
  EXPECT_EQ(master_[255], 60.0f);
  EXPECT_EQ(m_[255], 2.0f);
}

TEST_F(MendChunkTest, IgnoresWhatIsNotOfThisUpdate) {
  Fill(0, kEpoch - 1, 128, 64, 50.0f);
  EXPECT_EQ(Mend(), 0u);
  Fill(0, kEpoch, 128, 64, 50.0f);
  log_.slot[0].timeline = kTimeline + 1;
  EXPECT_EQ(Mend(), 0u);
  EXPECT_TRUE(Untouched());
}

TEST_F(MendChunkTest, IgnoresSlotsOutOfRange) {
  struct {
    uint32_t position, count;
  } const bad[] = {{128, 0}, {128, 65}, {255, 2}, {256, 1}, {0xFFFFFFFEu, 1}};
  for (const auto& [position, count] : bad) {
    Fill(0, kEpoch, position, count, 50.0f);
    EXPECT_EQ(Mend(), 0u) << position << " " << count;
    EXPECT_TRUE(Untouched());
  }
  Fill(1, kEpoch, 64, 64, 40.0f);  // a bad slot does not hide a good one
  EXPECT_EQ(Mend(), 64u);
}

TEST_F(MendChunkTest, ResetForgets) {
  Fill(0, kEpoch, 128, 64, 50.0f);
  ResetUndo(&log_, kTimeline);
  EXPECT_EQ(Mend(), 0u);
  EXPECT_TRUE(Untouched());
}

}  // namespace
}  // namespace shardd::kernels

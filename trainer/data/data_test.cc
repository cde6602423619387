#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "trainer/data/batches.h"
#include "trainer/data/byte_text.h"

namespace shardd::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ByteTextTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/data_test.XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  std::string Write(const std::string& name, const std::string& content) {
    const std::string path = root_ + "/" + name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  static std::string Text(const ByteText& text) {
    return std::string(text.bytes().begin(), text.bytes().end());
  }
  std::string root_;
};

TEST_F(ByteTextTest, DirectoriesAreSortedAndLinksSkipped) {
  Write("b", "bb");
  Write("a/z", "az");
  Write("a/empty", "");
  Write("c", "cc");
  std::filesystem::create_symlink(root_ + "/b", root_ + "/aa");
  auto text = ByteText::Load({root_});
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(Text(*text), std::string("\0az\0bb\0cc", 9));
  EXPECT_EQ(text->files().size(), 4u);
  // A link that is named is followed; an excluded file is recognised behind it.
  text = ByteText::Load({root_ + "/aa", root_ + "/c"});
  EXPECT_EQ(Text(*text), std::string("bb\0cc", 5));
  text = ByteText::Load({root_}, {root_ + "/aa", root_ + "/a/empty"});
  EXPECT_EQ(Text(*text), std::string("az\0cc", 5));
}

TEST_F(ByteTextTest, FingerprintFollowsTheBytes) {
  Write("a", "text");
  const uint64_t before = ByteText::Load({root_})->fingerprint();
  Write("a", "texT");
  EXPECT_NE(ByteText::Load({root_})->fingerprint(), before);
  Write("a", "text");
  EXPECT_EQ(ByteText::Load({root_})->fingerprint(), before);
}

TEST_F(ByteTextTest, ErrorsNameThePath) {
  const auto missing = ByteText::Load({root_ + "/nowhere"});
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("/nowhere"));
  EXPECT_EQ(ByteText::Load({root_}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(ByteText::Load({"/dev/null"}).ok());
}

ByteText Counting(size_t size) {
  std::vector<uint8_t> bytes(size);
  std::iota(bytes.begin(), bytes.end(), 0);
  return ByteText::FromBytes(bytes);
}

// Two bytes for a position, so that windows can be told apart.
ByteText Positions(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = i % 2 == 0 ? i / 2 : i / 512;
  return ByteText::FromBytes(bytes);
}

TrainingBatches Make(const ByteText& text, uint64_t seed, int64_t context, int64_t sequences,
                     uint32_t slots) {
  auto batches = TrainingBatches::Create(
      &text, {.seed = seed, .context = context, .sequences = sequences, .slots = slots});
  EXPECT_TRUE(batches.ok()) << batches.status();
  return *batches;
}

TEST(TrainingBatches, LabelsAreTheNextBytes) {
  const ByteText text = Counting(200);
  const TrainingBatches batches = Make(text, 1, 8, 3, 2);
  const models::Batch batch = batches.ForSlot(1);
  ASSERT_EQ(batch.inputs.size(), 24u);
  for (size_t i = 0; i < 24; ++i) EXPECT_EQ(batch.labels[i], batch.inputs[i] + 1);
}

TEST(TrainingBatches, AnEpochReadsEveryWindowOnce) {
  const ByteText text = Positions(1000);
  TrainingBatches batches = Make(text, 1, 10, 3, 3);  // 99 windows: 11 steps
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::multiset<int32_t> seen;
    std::set<std::vector<int32_t>> windows;
    for (int step = 0; step < 11; ++step, batches.Advance()) {
      for (uint32_t slot = 0; slot < 3; ++slot) {
        const models::Batch batch = batches.ForSlot(slot);
        for (int i = 0; i < 3; ++i) {
          windows.insert({batch.inputs.begin() + 10 * i, batch.inputs.begin() + 10 * (i + 1)});
        }
      }
    }
    EXPECT_EQ(windows.size(), 99u) << epoch;
  }
  EXPECT_DOUBLE_EQ(batches.epochs(), 3.0);
}

TEST(TrainingBatches, DependsOnSeedStepAndSlotOnly) {
  const ByteText text = Positions(3000);
  TrainingBatches one = Make(text, 5, 16, 2, 4), other = Make(text, 5, 16, 2, 4);
  EXPECT_NE(one.ForSlot(0).inputs, one.ForSlot(1).inputs);
  EXPECT_NE(one.ForSlot(0).inputs, Make(text, 6, 16, 2, 4).ForSlot(0).inputs);
  one.ForSlot(3);
  one.Advance();
  other.Advance();
  for (uint32_t slot : {3u, 0u, 2u, 1u}) {
    EXPECT_EQ(one.ForSlot(slot).inputs, other.ForSlot(slot).inputs);
  }
}

TEST(TrainingBatches, PositionsGoOn) {
  const ByteText text = Positions(3000);
  TrainingBatches run = Make(text, 5, 16, 2, 4);
  for (int i = 0; i < 100; ++i) run.Advance();
  TrainingBatches resumed = Make(text, 5, 16, 2, 4);
  ASSERT_TRUE(resumed.Restore(run.Serialise()).ok());
  EXPECT_EQ(resumed.next_sample(), run.next_sample());
  EXPECT_EQ(resumed.ForSlot(2).inputs, run.ForSlot(2).inputs);

  TrainingBatches reseeded = Make(text, 6, 16, 2, 4);
  EXPECT_THAT(std::string(reseeded.Restore(run.Serialise()).message()),
              HasSubstr("another seed (5, now 6)"));
  const ByteText other_text = Positions(3001);
  TrainingBatches elsewhere = Make(other_text, 5, 16, 2, 4);
  EXPECT_EQ(elsewhere.Restore(run.Serialise()).code(), absl::StatusCode::kFailedPrecondition);
  for (const char* bad : {"", "{", "[]", "{\"version\":2}", "\xff\xfe"}) {
    EXPECT_EQ(resumed.Restore(bad).code(), absl::StatusCode::kDataLoss) << bad;
  }
}

TEST(TrainingBatches, ShortTexts) {
  const ByteText text = Counting(9);
  TrainingBatches batches = Make(text, 1, 8, 2, 1);
  for (int i = 0; i < 5; ++i, batches.Advance()) {
    EXPECT_EQ(batches.ForSlot(0).labels[7], 8);
  }
  EXPECT_FALSE(TrainingBatches::Create(&text, {.context = 9}).ok());
}

TEST(EvaluationBatches, EveryByteButTheFirstOnce) {
  for (int64_t context : {1, 2, 5, 8}) {
    for (size_t size : {1u, 2u, 7u, 8u, 9u, 12u, 13u, 100u}) {
      const ByteText text = Counting(size);
      std::map<int32_t, int> counted;
      int64_t total = 0;
      for (const models::Batch& batch : EvaluationBatches(text, context, 3)) {
        ASSERT_LE(batch.sequences, 3);
        ASSERT_EQ(static_cast<int64_t>(batch.inputs.size()), batch.sequences * context);
        for (size_t i = 0; i < batch.labels.size(); ++i) {
          if (batch.labels[i] == tensor::kIgnoreLabel) continue;
          EXPECT_EQ(batch.labels[i], batch.inputs[i] + 1);
          ++counted[batch.labels[i]];
        }
        total += batch.targets();
      }
      EXPECT_EQ(total, static_cast<int64_t>(size) - 1) << context << " " << size;
      EXPECT_EQ(counted.size(), size - 1) << context << " " << size;
    }
  }
}

TEST(EvaluationBatches, CountsTheSecondHalf) {
  const auto batches = EvaluationBatches(Counting(8), 4, 8);
  ASSERT_EQ(batches.size(), 1u);
  const int32_t ignored = tensor::kIgnoreLabel;
  EXPECT_THAT(batches[0].labels,
              ElementsAre(1, 2, 3, 4, ignored, ignored, 5, 6, ignored, ignored, 7, ignored));
}

}  // namespace
}  // namespace shardd::data

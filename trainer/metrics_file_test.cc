#include "trainer/metrics_file.h"

#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace shardd::trainer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

StepRecord Record(uint64_t step) {
  StepRecord record;
  record.step = step;
  record.applied = step;
  record.loss = 1.0 / static_cast<double>(step);
  record.grad_norm = 0.1 * static_cast<double>(step);
  record.loss_scale = 1;
  record.lr = 1e-3;
  record.tokens = 2048;
  record.unix_nanos = static_cast<int64_t>(step) * 500'000'000;
  return record;
}

std::vector<StepRecord> Records(uint64_t first, uint64_t last) {
  std::vector<StepRecord> records;
  for (uint64_t s = first; s <= last; ++s) records.push_back(Record(s));
  return records;
}

class MetricsFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/metrics_test.XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
    path_ = root_ + "/metrics.jsonl";
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::unique_ptr<MetricsFile> Open() {
    auto file = MetricsFile::Open(path_);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  std::vector<nlohmann::json> Lines() const {
    std::vector<nlohmann::json> lines;
    std::ifstream in(path_);
    for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  std::vector<uint64_t> Steps() const {
    std::vector<uint64_t> steps;
    for (const auto& line : Lines()) steps.push_back(line["step"]);
    return steps;
  }
  std::string root_, path_;
};

TEST_F(MetricsFileTest, ValuesAndHexFloats) {
  auto file = Open();
  StepRecord record = Record(1);
  record.loss = 2.7182818284590451;
  ASSERT_TRUE(file->Append(record, 1234.5).ok());
  record = Record(2);
  record.loss = NAN;
  record.grad_norm = INFINITY;
  record.result = StepResult::kSkipped;
  record.reason = "rank 1: 'wte' has a NaN";
  ASSERT_TRUE(file->Append(record, std::nullopt).ok());
  const auto lines = Lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["loss"].get<double>(), 2.7182818284590451);
  EXPECT_EQ(lines[0]["loss_hex"], "0x1.5bf0a8b145769p+1");
  EXPECT_EQ(std::strtod(lines[0]["grad_norm_hex"].get<std::string>().c_str(), nullptr), 0.1);
  EXPECT_EQ(lines[0]["tokens_per_second"], 1234.5);
  EXPECT_EQ(lines[0]["applied"], true);
  EXPECT_FALSE(lines[0].contains("reason"));
  EXPECT_TRUE(lines[1]["loss"].is_null());
  EXPECT_EQ(lines[1]["loss_hex"], "nan");
  EXPECT_EQ(lines[1]["grad_norm_hex"], "inf");
  EXPECT_EQ(lines[1]["reason"], "rank 1: 'wte' has a NaN");
  EXPECT_TRUE(lines[1]["tokens_per_second"].is_null());
}

// A writer that dies at any byte of a line, and one that dies between the decision
// and the line: the next one completes the file from the records.
TEST_F(MetricsFileTest, CompleteAfterEveryDeath) {
  {
    auto file = Open();
    ASSERT_TRUE(file->Complete(Records(1, 4)).ok());
  }
  std::ifstream in(path_, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  for (size_t bytes = 0; bytes <= whole.size(); ++bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << whole.substr(0, bytes);
    auto file = Open();
    const auto lost = file->Complete(Records(1, 6));
    ASSERT_TRUE(lost.ok()) << lost.status();
    EXPECT_EQ(*lost, 0u);
    ASSERT_THAT(Steps(), ElementsAre(1, 2, 3, 4, 5, 6)) << bytes;
  }
}

TEST_F(MetricsFileTest, RatesOfCompletedSteps) {
  ASSERT_TRUE(Open()->Complete(Records(1, 3)).ok());
  const auto lines = Lines();
  EXPECT_TRUE(lines[0]["tokens_per_second"].is_null());
  EXPECT_DOUBLE_EQ(lines[1]["tokens_per_second"], 4096);
}

TEST_F(MetricsFileTest, StepsThatAreNotCommittedAreCut) {
  auto file = Open();
  ASSERT_TRUE(file->Complete(Records(1, 5)).ok());
  ASSERT_TRUE(file->CutFrom(9).ok());
  EXPECT_EQ(file->last_step(), 5u);
  ASSERT_TRUE(file->CutFrom(4).ok());
  EXPECT_THAT(Steps(), ElementsAre(1, 2, 3));
  ASSERT_TRUE(file->Append(Record(4), 1.0).ok());
  EXPECT_THAT(Steps(), ElementsAre(1, 2, 3, 4));
  ASSERT_TRUE(file->CutFrom(1).ok());
  EXPECT_EQ(file->last_step(), 0u);
  EXPECT_EQ(std::filesystem::file_size(path_), 0u);
  EXPECT_FALSE(file->Append(Record(1), 1.0).ok() && file->Append(Record(3), 1.0).ok())
      << "a step is left out";
}

TEST_F(MetricsFileTest, LostStepsAreSaid) {
  auto file = Open();
  const auto lost = file->Complete(Records(5, 7));
  ASSERT_TRUE(lost.ok());
  EXPECT_EQ(*lost, 4u);
  EXPECT_THAT(Steps(), ElementsAre(5, 6, 7));
  EXPECT_EQ(Open()->last_step(), 7u);
  const auto gap = Open()->Complete(Records(10, 11));
  EXPECT_THAT(std::string(gap.status().message()), HasSubstr("ends at step 7"));
  EXPECT_THAT(Steps(), ElementsAre(5, 6, 7));
}

TEST_F(MetricsFileTest, OtherFilesAreLeftAlone) {
  for (const char* content :
       {"hello\n", "{\"step\":1}\n{\"step\":3}\n", "{\"step\":0}\n", "{\"step\":-1}\n", "\n"}) {
    std::ofstream(path_, std::ios::trunc) << content;
    EXPECT_EQ(MetricsFile::Open(path_).status().code(), absl::StatusCode::kDataLoss) << content;
    std::ifstream in(path_);
    EXPECT_EQ(std::string((std::istreambuf_iterator<char>(in)), {}), content);
  }
  EXPECT_FALSE(MetricsFile::Open(root_ + "/no/such/directory").ok());
}

}  // namespace
}  // namespace shardd::trainer

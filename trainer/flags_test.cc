#include "trainer/flags.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd::trainer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class FlagSetTest : public ::testing::Test {
 protected:
  FlagSetTest() {
    flags_.Section("First section:");
    flags_.Integer("steps", &steps_, 1, "How many steps.");
    flags_.Real("lr", &lr_, 0, "Learning rate.");
    flags_.Section("Second section:");
    flags_.List("data", &data_, "PATH",
                "Where the text is, a file or a directory of files, given as often as wanted.");
    flags_.Choice("dtype", &dtype_, {"fp32", "bf16"}, "Of the weights.");
    flags_.Switch("quiet", &quiet_, "Say nothing.");
    flags_.Text("metrics", &metrics_, "FILE", "Where metrics go.");
  }
  std::string Refusal(std::vector<std::string> arguments) {
    const absl::Status status = flags_.Parse(arguments);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }
  FlagSet flags_;
  int64_t steps_ = 100;
  double lr_ = 0.003;
  std::vector<std::string> data_;
  std::string dtype_ = "bf16";
  bool quiet_ = false;
  std::string metrics_;
};

TEST_F(FlagSetTest, BothForms) {
  ASSERT_TRUE(flags_
                  .Parse({"--steps=7", "--lr", "1e-4", "--data=a", "--data", "b=c", "--quiet",
                          "--dtype=fp32", "--metrics="})
                  .ok());
  EXPECT_EQ(steps_, 7);
  EXPECT_EQ(lr_, 1e-4);
  EXPECT_THAT(data_, ElementsAre("a", "b=c"));
  EXPECT_TRUE(quiet_);
  EXPECT_EQ(dtype_, "fp32");
  ASSERT_TRUE(flags_.Parse({"--quiet=false"}).ok());
  EXPECT_FALSE(quiet_);
}

TEST_F(FlagSetTest, RefusalsTeach) {
  EXPECT_THAT(Refusal({"--stpes=7"}), HasSubstr("nearest flag is --steps"));
  EXPECT_THAT(Refusal({"--dtpye=7"}), HasSubstr("--dtype"));
  EXPECT_THAT(Refusal({"steps"}), HasSubstr("'steps' is no flag"));
  EXPECT_THAT(Refusal({"--"}), HasSubstr("is no flag"));
  EXPECT_THAT(Refusal({"--steps"}), HasSubstr("lacks its value; write --steps=N"));
  EXPECT_THAT(Refusal({"--steps=0"}), HasSubstr("an integer of at least 1"));
  EXPECT_THAT(Refusal({"--steps=1.5"}), HasSubstr("an integer"));
  EXPECT_THAT(Refusal({"--lr=-1"}), HasSubstr("a number of at least 0"));
  EXPECT_THAT(Refusal({"--lr=nan"}), HasSubstr("a number"));
  EXPECT_THAT(Refusal({"--lr=inf"}), HasSubstr("a number"));
  EXPECT_THAT(Refusal({"--dtype=fp64"}), HasSubstr("one of fp32|bf16"));
  EXPECT_THAT(Refusal({"--quiet=maybe"}), HasSubstr("true or false"));
}

TEST_F(FlagSetTest, HelpListsEverythingWithin80Columns) {
  const std::string help = flags_.Help();
  EXPECT_THAT(help, HasSubstr("First section:\n  --steps=N  [100]\n      How many steps."));
  EXPECT_THAT(help, HasSubstr("--dtype=fp32|bf16  [bf16]"));
  EXPECT_THAT(help, HasSubstr("  --quiet\n"));
  size_t begin = 0;
  for (size_t end; (end = help.find('\n', begin)) != std::string::npos; begin = end + 1) {
    EXPECT_LE(end - begin, 80u) << help.substr(begin, end - begin);
  }
}

TEST(EditDistance, CountsSwapsAsOne) {
  EXPECT_EQ(EditDistance("", ""), 0u);
  EXPECT_EQ(EditDistance("abc", ""), 3u);
  EXPECT_EQ(EditDistance("steps", "stpes"), 1u);
  EXPECT_EQ(EditDistance("weight", "weigth"), 1u);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
}

}  // namespace
}  // namespace shardd::trainer

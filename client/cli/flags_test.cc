#include "client/cli/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardd::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FlagsTest : public ::testing::Test {
 protected:
  FlagsTest() {
    flags_.AddUint32("ranks", "N", "how many", &ranks_);
    flags_.AddString("address", "ADDRESS", "where", &address_);
    flags_.AddDouble("grace", "SECONDS", "how long", &grace_);
    flags_.AddBool("keep-daemon", "leave it", &keep_);
  }

  std::string Error(const std::vector<std::string>& arguments) {
    return std::string(flags_.Parse(arguments).status().message());
  }

  FlagSet flags_;
  uint32_t ranks_ = 1;
  std::string address_ = "none";
  double grace_ = 1;
  bool keep_ = false;
};

TEST_F(FlagsTest, BothFormsAndWordsBetween) {
  auto words = flags_.Parse({"a", "--ranks", "3", "b", "--address=x=y", "--keep-daemon", "c"});
  ASSERT_TRUE(words.ok()) << words.status();
  EXPECT_THAT(*words, ElementsAre("a", "b", "c"));
  EXPECT_EQ(ranks_, 3);
  EXPECT_EQ(address_, "x=y");
  EXPECT_TRUE(keep_);
  EXPECT_EQ(grace_, 1);
}

TEST_F(FlagsTest, DashesEndTheFlags) {
  auto words = flags_.Parse({"--ranks=2", "--", "train", "--ranks=9", "--what"});
  ASSERT_TRUE(words.ok()) << words.status();
  EXPECT_THAT(*words, ElementsAre("train", "--ranks=9", "--what"));
  EXPECT_EQ(ranks_, 2);
}

TEST_F(FlagsTest, ACommandLineThatFollowsIsNotOurs) {
  auto words = flags_.Parse({"--ranks=2", "train", "--ranks=9", "--", "x"}, true);
  ASSERT_TRUE(words.ok()) << words.status();
  EXPECT_THAT(*words, ElementsAre("train", "--ranks=9", "--", "x"));
  EXPECT_EQ(ranks_, 2);
}

TEST_F(FlagsTest, UnknownFlagNamesTheNearest) {
  EXPECT_EQ(Error({"--rnaks=2"}), "unknown flag --rnaks: did you mean --ranks?");
  EXPECT_EQ(Error({"--keep-deamon"}), "unknown flag --keep-deamon: did you mean --keep-daemon?");
  EXPECT_THAT(Error({"--zzzzzzzz"}), HasSubstr("see --help"));
  EXPECT_THAT(Error({"---"}), HasSubstr("unknown flag --"));
}

TEST_F(FlagsTest, ValuesThatDoNotParse) {
  EXPECT_EQ(Error({"--ranks=-1"}), "flag --ranks must be a number from 0 to 4294967295, not '-1'");
  EXPECT_THAT(Error({"--ranks=4294967296"}), HasSubstr("not '4294967296'"));
  EXPECT_THAT(Error({"--ranks="}), HasSubstr("not ''"));
  EXPECT_THAT(Error({"--grace=nan"}), HasSubstr("not 'nan'"));
  EXPECT_THAT(Error({"--grace=-2"}), HasSubstr("not negative"));
  EXPECT_THAT(Error({"--keep-daemon=yes"}), HasSubstr("true or false"));
  EXPECT_EQ(Error({"--ranks"}), "flag --ranks needs a value: --ranks=N");
  EXPECT_EQ(ranks_, 1);
  EXPECT_EQ(grace_, 1);
}

TEST_F(FlagsTest, BooleansCanBeSwitchedOff) {
  keep_ = true;
  ASSERT_TRUE(flags_.Parse({"--keep-daemon=false"}).ok());
  EXPECT_FALSE(keep_);
}

TEST(NearestTest, NothingNear) {
  EXPECT_EQ(Nearest("staus", {"status", "jobs"}), "status");
  EXPECT_EQ(Nearest("jbo", {"status", "job"}), "job");
  EXPECT_EQ(Nearest("x", {"status", "jobs"}), "");
}

}  // namespace
}  // namespace shardd::cli

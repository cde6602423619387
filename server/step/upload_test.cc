#include "server/step/upload.h"

#include <gtest/gtest.h>

namespace shardd::step {
namespace {

contract::Layout MakeLayout() {
  return *contract::Layout::Create({{"a", {40}, 0}, {"empty", {0}, 0}, {"b", {100}, 0}}, {});
}

TEST(Upload, IsCompleteWhenEveryElementWasGiven) {
  const contract::Layout layout = MakeLayout();
  Upload upload(&layout, {}, false);
  EXPECT_FALSE(upload.complete());
  EXPECT_EQ(upload.FirstMissing(), "a");
  upload.Mark(0, 40);
  EXPECT_EQ(upload.FirstMissing(), "b");
  upload.Mark(64, 64);
  upload.Mark(64, 64);  // again
  EXPECT_FALSE(upload.complete());
  upload.Mark(128, 36);
  EXPECT_TRUE(upload.complete());
  EXPECT_EQ(upload.FirstMissing(), "");
}

TEST(Upload, FrozenParametersBelongToIt) {
  const contract::Layout layout = MakeLayout();
  Upload upload(&layout, {100, 0, 64}, false);
  upload.Mark(0, 40);
  upload.Mark(64, 100);
  EXPECT_FALSE(upload.complete());
  EXPECT_EQ(upload.FirstMissing(), "(frozen) 0");
  upload.MarkFrozen(0, 64, 36);
  upload.MarkFrozen(0, 64, 36);  // again
  upload.MarkFrozen(2, 0, 64);
  EXPECT_FALSE(upload.complete());
  upload.MarkFrozen(0, 0, 64);
  EXPECT_TRUE(upload.complete());
}

TEST(Upload, FrozenRangesMustLieInOne) {
  const contract::Layout layout = MakeLayout();
  const Upload upload(&layout, {100}, false);
  EXPECT_TRUE(upload.CheckFrozen(0, 0, 100).ok());
  EXPECT_TRUE(upload.CheckFrozen(0, 64, 36).ok());
  EXPECT_FALSE(upload.CheckFrozen(0, 0, 36).ok());
  EXPECT_FALSE(upload.CheckFrozen(0, 32, 64).ok());
  EXPECT_FALSE(upload.CheckFrozen(0, 64, 64).ok());
  EXPECT_FALSE(upload.CheckFrozen(0, 0, 0).ok());
  EXPECT_FALSE(upload.CheckFrozen(1, 0, 64).ok());
  EXPECT_FALSE(upload.CheckFrozen(0, ~uint64_t{0} - 63, 64).ok());
}

TEST(Upload, RangesMustLieInOneParameter) {
  const contract::Layout layout = MakeLayout();
  const Upload upload(&layout, {}, false);
  EXPECT_TRUE(upload.Check(0, 40).ok());
  EXPECT_TRUE(upload.Check(0, 32).ok());
  EXPECT_TRUE(upload.Check(32, 8).ok());
  EXPECT_TRUE(upload.Check(64, 100).ok());
  EXPECT_FALSE(upload.Check(0, 33).ok());   // ends between multiples of 32
  EXPECT_FALSE(upload.Check(0, 64).ok());   // padding
  EXPECT_FALSE(upload.Check(0, 128).ok());  // two parameters
  EXPECT_FALSE(upload.Check(8, 8).ok());    // begins between
  EXPECT_FALSE(upload.Check(0, 0).ok());
  EXPECT_FALSE(upload.Check(192, 1).ok());  // beyond the end
  EXPECT_FALSE(upload.Check(~uint64_t{31}, 64).ok());
  EXPECT_FALSE(upload.Check(0, ~uint64_t{0}).ok());
}

}  // namespace
}  // namespace shardd::step

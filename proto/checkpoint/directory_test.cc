#include "proto/checkpoint/directory.h"

#include <gtest/gtest.h>

namespace shardd::checkpoint {
namespace {

TEST(DirectoryName, ThereAndBack) {
  for (const StepDirectory& d :
       {StepDirectory{100, 1, 1}, {0, 1, 1}, {12345678901, 1, 1}, {7, 2, 3}, {7, 11, 12}}) {
    EXPECT_EQ(ParseDirectoryName(DirectoryName(d)), d) << DirectoryName(d);
  }
  EXPECT_EQ(DirectoryName({100, 1, 1}), "step-0000000100");
  EXPECT_EQ(DirectoryName({100, 2, 3}), "step-0000000100.2-of-3");
}

TEST(DirectoryName, NothingElseIsOne) {
  for (const char* name : {"step-100", "step-00000001000", "step--000000001", "step-000000010a",
                           ".step-0000000100.new", "step-0000000100.0-of-3",
                           "step-0000000100.4-of-3", "step-0000000100.1-of-1", "step-",
                           "step-0000000100.2", "", "export-step-0000000100-fp32.safetensors"}) {
    EXPECT_EQ(ParseDirectoryName(name), std::nullopt) << name;
  }
  EXPECT_TRUE(IsTemporaryName(TemporaryName({100, 2, 3})));
  EXPECT_FALSE(IsTemporaryName("step-0000000100"));
}

TEST(StepsAmong, AscendingWithoutWhatIsNone) {
  const auto steps = StepsAmong({"step-0000000020", ".step-0000000030.new", "notes.txt",
                                 "step-0000000010", "step-0000000010.2-of-2"});
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0], (StepDirectory{10, 1, 1}));
  EXPECT_EQ(steps[1], (StepDirectory{10, 2, 2}));
  EXPECT_EQ(steps[2], (StepDirectory{20, 1, 1}));
}

TEST(NewestCommonStep, DaemonAHas10And20AndBHas10) {
  const std::vector<std::vector<uint64_t>> daemons = {{10, 20}, {10}};
  EXPECT_EQ(NewestCommonStep(daemons), 10u);
}

TEST(NewestCommonStep, OneWithoutAnyOrWithoutACommonOne) {
  const std::vector<std::vector<uint64_t>> one_has_none = {{10, 20}, {}};
  EXPECT_EQ(NewestCommonStep(one_has_none), std::nullopt);
  const std::vector<std::vector<uint64_t>> disjoint = {{10, 30}, {20, 40}};
  EXPECT_EQ(NewestCommonStep(disjoint), std::nullopt);
  EXPECT_EQ(NewestCommonStep({}), std::nullopt);
  const std::vector<std::vector<uint64_t>> twice = {{10, 20, 20}, {10}};
  EXPECT_EQ(NewestCommonStep(twice), 10u);
}

TEST(NewestCompleteStep, AllMembersAreThere) {
  const std::vector<StepDirectory> directories = {{10, 1, 2}, {10, 2, 2}, {20, 1, 2}, {30, 1, 3}};
  EXPECT_EQ(NewestCompleteStep(directories), 10u);
  const std::vector<StepDirectory> single = {{10, 1, 1}, {20, 1, 1}};
  EXPECT_EQ(NewestCompleteStep(single), 20u);
  const std::vector<StepDirectory> none = {{20, 1, 2}};
  EXPECT_EQ(NewestCompleteStep(none), std::nullopt);
}

}  // namespace
}  // namespace shardd::checkpoint

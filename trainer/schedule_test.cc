#include "trainer/schedule.h"

#include "gtest/gtest.h"

namespace shardd::trainer {
namespace {

constexpr Schedule kCosine = {
    .kind = ScheduleKind::kCosine, .peak = 1.0, .final_fraction = 0.1, .warmup = 10, .steps = 110};

TEST(Schedule, WarmsUpToThePeak) {
  EXPECT_NEAR(kCosine.At(1), 0.1, 1e-6);
  EXPECT_NEAR(kCosine.At(5), 0.5, 1e-6);
  EXPECT_EQ(kCosine.At(10), 1.0);
}

TEST(Schedule, FallsToTheFinalFraction) {
  EXPECT_NEAR(kCosine.At(60), 0.55, 1e-6);
  EXPECT_NEAR(kCosine.At(110), 0.1, 1e-6);
  EXPECT_NEAR(kCosine.At(1000), 0.1, 1e-6) << "stays there";
  for (uint64_t s = 10; s < 110; ++s) EXPECT_GT(kCosine.At(s), kCosine.At(s + 1));
  Schedule linear = kCosine;
  linear.kind = ScheduleKind::kLinear;
  EXPECT_NEAR(linear.At(35), 0.1 + 0.9 * 0.75, 1e-6);
  Schedule constant = kCosine;
  constant.kind = ScheduleKind::kConstant;
  EXPECT_EQ(constant.At(110), 1.0);
}

TEST(Schedule, DegenerateLengths) {
  Schedule none = kCosine;
  none.warmup = 0;
  none.steps = 1;
  EXPECT_NEAR(none.At(1), 0.1, 1e-6);
  Schedule only_warmup = kCosine;
  only_warmup.steps = 5;
  EXPECT_NEAR(only_warmup.At(5), 0.5, 1e-6);
  EXPECT_EQ(only_warmup.At(20), 1.0);
}

TEST(Schedule, Names) {
  EXPECT_EQ(ParseScheduleKind("linear"), ScheduleKind::kLinear);
  EXPECT_EQ(ParseScheduleKind("cosin"), std::nullopt);
}

}  // namespace
}  // namespace shardd::trainer

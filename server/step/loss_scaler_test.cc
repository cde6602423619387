#include "server/step/loss_scaler.h"

#include <gtest/gtest.h>

namespace shardd::step {
namespace {

v1::LossScale Dynamic(double initial, uint32_t interval, uint32_t hysteresis) {
  v1::LossScale rule;
  rule.set_dynamic(true);
  rule.set_initial(initial);
  rule.set_growth_interval(interval);
  rule.set_hysteresis(hysteresis);
  rule.set_floor(1);
  return rule;
}

TEST(LossScaler, DoublesAfterCleanSteps) {
  const v1::LossScale rule = Dynamic(8, 3, 2);
  LossScaleState state = InitialLossScale(rule);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(AdvanceLossScale(rule, false, &state).ok());
  EXPECT_EQ(state.scale, 8);
  ASSERT_TRUE(AdvanceLossScale(rule, false, &state).ok());
  EXPECT_EQ(state.scale, 16);
}

TEST(LossScaler, AnOverflowEndsTheRunOfCleanSteps) {
  const v1::LossScale rule = Dynamic(8, 3, 2);
  LossScaleState state = InitialLossScale(rule);
  for (bool overflow : {false, false, true, false, false}) {
    ASSERT_TRUE(AdvanceLossScale(rule, overflow, &state).ok());
    EXPECT_EQ(state.scale, 8);  // the one overflow is forgiven
  }
  ASSERT_TRUE(AdvanceLossScale(rule, false, &state).ok());
  EXPECT_EQ(state.scale, 16);
}

TEST(LossScaler, HalvesOnEachOverflowAfterHysteresisAndGrowthRenewsIt) {
  const v1::LossScale rule = Dynamic(64, 1, 2);
  LossScaleState state = InitialLossScale(rule);
  ASSERT_TRUE(AdvanceLossScale(rule, true, &state).ok());
  EXPECT_EQ(state.scale, 64);
  ASSERT_TRUE(AdvanceLossScale(rule, true, &state).ok());
  EXPECT_EQ(state.scale, 32);
  ASSERT_TRUE(AdvanceLossScale(rule, true, &state).ok());
  EXPECT_EQ(state.scale, 16);
  ASSERT_TRUE(AdvanceLossScale(rule, false, &state).ok());
  EXPECT_EQ(state.scale, 32);
  ASSERT_TRUE(AdvanceLossScale(rule, true, &state).ok());
  EXPECT_EQ(state.scale, 32);  // forgiven again
}

TEST(LossScaler, AtTheFloorAnOverflowIsAnError) {
  const v1::LossScale rule = Dynamic(2, 10, 1);
  LossScaleState state = InitialLossScale(rule);
  ASSERT_TRUE(AdvanceLossScale(rule, true, &state).ok());
  EXPECT_EQ(state.scale, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(AdvanceLossScale(rule, true, &state)));
}

TEST(LossScaler, FixedNeverMoves) {
  v1::LossScale rule;
  rule.set_initial(128);
  LossScaleState state = InitialLossScale(rule);
  for (int i = 0; i < 3000; ++i) ASSERT_TRUE(AdvanceLossScale(rule, i % 2 == 0, &state).ok());
  EXPECT_EQ(state.scale, 128);
}

}  // namespace
}  // namespace shardd::step

#include "server/step/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace shardd::step {
namespace {

v1::Schedule Make(v1::ScheduleKind kind, uint64_t warmup, uint64_t total, double final_factor = 0) {
  v1::Schedule s;
  s.set_kind(kind);
  s.set_warmup_steps(warmup);
  s.set_total_steps(total);
  s.set_final_factor(final_factor);
  return s;
}

std::vector<double> Factors(const v1::Schedule& s, uint64_t last) {
  std::vector<double> out;
  for (uint64_t step = 1; step <= last; ++step) out.push_back(LrFactor(s, step));
  return out;
}

void ExpectNear(const std::vector<double>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-15) << "step " << i + 1;
}

TEST(Schedule, NoneIsConstant) { ExpectNear(Factors(v1::Schedule(), 3), {1, 1, 1}); }

TEST(Schedule, ConstantWarmsUp) {
  ExpectNear(Factors(Make(v1::constant, 4, 0), 6), {0.25, 0.5, 0.75, 1, 1, 1});
}

TEST(Schedule, LinearEndsAtTheFinalFactorAndStaysThere) {
  ExpectNear(Factors(Make(v1::linear, 2, 6, 0.2), 8), {0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2});
  ExpectNear(Factors(Make(v1::linear, 0, 4), 5), {0.75, 0.5, 0.25, 0, 0});
}

TEST(Schedule, CosineIsHalfACosine) {
  const double r = std::sqrt(0.5) / 2;
  ExpectNear(Factors(Make(v1::cosine, 1, 5), 6), {1, 0.5 + r, 0.5, 0.5 - r, 0, 0});
  EXPECT_NEAR(LrFactor(Make(v1::cosine, 0, 10, 0.1), 5), 0.55, 1e-15);
}

TEST(Schedule, WarmUpStableDecay) {
  v1::Schedule s = Make(v1::wsd, 2, 8, 0.5);
  s.set_decay_steps(2);
  ExpectNear(Factors(s, 9), {0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.5});
}

// The values of torch.optim.lr_scheduler.OneCycleLR(max_lr=1, total_steps=10, pct_start=0.3,
// div_factor=25, final_div_factor=1e4, anneal_strategy="cos"), by its own equations: phase one ends
// at step number 2, phase two at 9.
TEST(Schedule, OneCycleIsPyTorchs) {
  v1::Schedule s = Make(v1::one_cycle, 3, 10, 0.04 / 1e4);
  std::vector<double> want;
  const auto anneal = [](double start, double end, double share) {
    return end + (start - end) / 2.0 * (std::cos(M_PI * share) + 1);
  };
  for (int number = 0; number < 10; ++number) {
    want.push_back(number <= 2 ? anneal(0.04, 1, number / 2.0)
                               : anneal(1, 0.04 / 1e4, (number - 2) / 7.0));
  }
  ExpectNear(Factors(s, 10), want);
  EXPECT_EQ(LrFactor(s, 3), 1);
  s.set_initial_factor(0.5);
  EXPECT_EQ(LrFactor(s, 1), 0.5);
}

TEST(Schedule, OverflowingStepsAreNoTrouble) {
  const uint64_t most = ~uint64_t{0};
  EXPECT_EQ(LrFactor(Make(v1::linear, most - 1, most, 0.25), most), 0.25);
  EXPECT_EQ(LrFactor(Make(v1::cosine, 0, 1, 0.25), most), 0.25);
}

TEST(CheckSchedule, NamesTheFieldThatDoesNotFit) {
  const auto message = [](const v1::Schedule& s) {
    return std::string(CheckSchedule(s).message());
  };
  EXPECT_TRUE(CheckSchedule(v1::Schedule()).ok());
  EXPECT_TRUE(CheckSchedule(Make(v1::constant, 9, 0)).ok());
  EXPECT_EQ(message(Make(v1::linear, 5, 5)),
            "schedule.total_steps is 5; it must be above schedule.warmup_steps, 5");
  EXPECT_NE(message(Make(v1::wsd, 2, 8)).find("decay_steps"), std::string::npos);
  v1::Schedule s = Make(v1::wsd, 2, 8);
  s.set_decay_steps(7);
  EXPECT_NE(message(s).find("decay_steps"), std::string::npos);
  s.set_decay_steps(6);
  EXPECT_TRUE(CheckSchedule(s).ok());
  for (const double bad : {-0.1, HUGE_VAL, std::nan("")}) {
    EXPECT_NE(message(Make(v1::cosine, 0, 2, bad)).find("final_factor"), std::string::npos);
    s.set_initial_factor(bad);
    EXPECT_NE(message(s).find("initial_factor"), std::string::npos);
  }
  v1::Schedule unknown;
  unknown.set_kind(static_cast<v1::ScheduleKind>(77));
  EXPECT_NE(message(unknown).find("kind"), std::string::npos);
}

}  // namespace
}  // namespace shardd::step

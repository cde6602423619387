// Non-finite gradients, loss scales, and what bf16 weights can hold.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

ParameterSpec Param(const std::string& name, std::vector<int64_t> shape) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  return spec;
}

TEST(PrecisionCases, OneInfUnderBf16IsSkippedCountedAndNamed) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("inf", 2);
  job.grad_dtype = DType::kBFloat16;
  job.weight_dtype = DType::kBFloat16;
  ForEachRank(2, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 2, job, {Param("v", {8}), Param("w", {8})});
    const auto decision =
        TakeStep(session.get(), DType::kBFloat16, [](uint32_t slot, size_t p, uint64_t i) {
          return slot == 1 && p == 1 && i == 3 ? kInf : 1.0f;
        });
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_EQ(decision->result, StepResult::kSkipped);
    EXPECT_EQ(decision->reason, "Inf in the gradient's element 3 of parameter 'w' from rank 1");
    EXPECT_EQ(decision->applied, 0u);
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 1), std::vector<float>(8, 0.0f));
    const auto next =
        TakeStep(session.get(), DType::kBFloat16, [](uint32_t, size_t, uint64_t) { return 1.0f; });
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_EQ(next->result, StepResult::kApplied);
    EXPECT_EQ(next->step, 2u);
    EXPECT_EQ(next->applied, 1u);
    EXPECT_TRUE(session->Close().ok());
  });
  EXPECT_EQ(daemon.Job("inf").skipped_steps(), 1u);
  EXPECT_NE(daemon.Log().find("step 1 is skipped: Inf in the gradient's element 3 of parameter 'w'"
                              " from rank 1"),
            std::string::npos);
}

TEST(PrecisionCases, NanInOneOfFourRanksSkipsForAllAndTheNextStepWorks) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("nan", 4);
  ForEachRank(4, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 4, job, {Param("w", {5})});
    const auto first = TakeStep(
        session.get(), DType::kFloat32,
        [](uint32_t slot, size_t, uint64_t i) { return slot == 2 && i == 0 ? kNan : 1.0f; });
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_EQ(first->result, StepResult::kSkipped);
    EXPECT_NE(first->reason.find("NaN"), std::string::npos) << first->reason;
    EXPECT_NE(first->reason.find("rank 2"), std::string::npos) << first->reason;
    const auto second =
        TakeStep(session.get(), DType::kFloat32, [](uint32_t, size_t, uint64_t) { return 1.0f; });
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_EQ(second->result, StepResult::kApplied);
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment0, 0), std::vector<float>(5, 1.0f));
    EXPECT_TRUE(session->Close().ok());
  });
}

TEST(PrecisionCases, Fp16OverflowHalvesAfterHysteresisThenEndsAtTheFloor) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("fp16", 1);
  job.grad_dtype = DType::kFloat16;
  job.weight_dtype = DType::kFloat16;
  job.loss_scale.dynamic = true;
  job.loss_scale.initial = 65536;
  job.max_consecutive_skips = 0;
  auto session = OpenRank(daemon.socket(), 0, 1, job, {Param("w", {4})});
  EXPECT_EQ(session->loss_scale(), 65536);
  const auto overflow = [](uint32_t, size_t, uint64_t) { return kInf; };
  // The first overflow uses up the hysteresis; each of the next 16 halves to the floor.
  double expected = 65536;
  for (int skip = 1; skip <= 17; ++skip) {
    const auto decision = TakeStep(session.get(), DType::kFloat16, overflow);
    ASSERT_TRUE(decision.ok()) << "skip " << skip << ": " << decision.status();
    EXPECT_EQ(decision->result, StepResult::kSkipped);
    if (skip > 1) expected /= 2;
    EXPECT_EQ(decision->loss_scale, expected) << "skip " << skip;
    EXPECT_EQ(session->loss_scale(), expected);
  }
  EXPECT_EQ(expected, 1.0);
  const auto terminal = TakeStep(session.get(), DType::kFloat16, overflow);
  ASSERT_FALSE(terminal.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(terminal.status())) << terminal.status();
  EXPECT_NE(terminal.status().message().find("floor"), absl::string_view::npos)
      << terminal.status();
  const auto again = TakeStep(session.get(), DType::kFloat16, overflow);
  EXPECT_TRUE(absl::IsFailedPrecondition(again.status())) << again.status();
  EXPECT_EQ(daemon.Job("fp16").state(), "failed");
}

TEST(PrecisionCases, Bf16SkipsUntilMaxConsecutiveSkips) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("bf16", 1);
  job.grad_dtype = DType::kBFloat16;
  job.max_consecutive_skips = 3;
  auto session = OpenRank(daemon.socket(), 0, 1, job, {Param("w", {4})});
  const auto step = [&](float value) {
    return TakeStep(session.get(), DType::kBFloat16,
                    [=](uint32_t, size_t, uint64_t) { return value; });
  };
  EXPECT_EQ(step(kInf)->result, StepResult::kSkipped);
  EXPECT_EQ(step(kInf)->result, StepResult::kSkipped);
  EXPECT_EQ(step(1.0f)->result, StepResult::kApplied);  // not in a row any more
  EXPECT_EQ(step(kInf)->result, StepResult::kSkipped);
  EXPECT_EQ(step(kNan)->result, StepResult::kSkipped);
  const auto last = step(kInf);
  EXPECT_TRUE(absl::IsFailedPrecondition(last.status())) << last.status();
  EXPECT_NE(last.status().message().find("max_consecutive_skips"), absl::string_view::npos);
  EXPECT_EQ(daemon.Job("bf16").skipped_steps(), 5u);
}

TEST(PrecisionCases, SmallStepsMoveTheMasterAndInTheEndTheBf16Weight) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("tiny", 1);
  job.grad_dtype = DType::kBFloat16;
  job.weight_dtype = DType::kBFloat16;
  job.groups[0].lr = 1e-4;
  auto session = OpenRank(daemon.socket(), 0, 1, job, {Param("w", {1})}, 1.0f);
  const auto ones = [](uint32_t, size_t, uint64_t) { return 1.0f; };
  ASSERT_TRUE(TakeStep(session.get(), DType::kBFloat16, ones).ok());
  EXPECT_LT(ReadAll(session.get(), StateKind::kMaster, 0)[0], 1.0f);
  EXPECT_EQ(LoadAs(DType::kBFloat16, *session->WaitWeights(0)), 1.0f);  // 1e-4 is below its grain
  for (int i = 1; i < 100; ++i) ASSERT_TRUE(TakeStep(session.get(), DType::kBFloat16, ones).ok());
  EXPECT_NEAR(ReadAll(session.get(), StateKind::kMaster, 0)[0], 0.99f, 1e-4);
  EXPECT_EQ(LoadAs(DType::kBFloat16, *session->WaitWeights(0)), 0.98828125f);
  EXPECT_TRUE(session->Close().ok());
}

}  // namespace
}  // namespace shardd::test

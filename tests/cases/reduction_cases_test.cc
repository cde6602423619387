// What everybody uses is the mean over the slots, however they lie on ranks.
#include <gtest/gtest.h>

#include <atomic>

#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

ParameterSpec Param(const std::string& name, std::vector<int64_t> shape, uint32_t group = 0) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  spec.group = group;
  return spec;
}

void CheckMeanOfSlots(uint32_t world, const std::vector<float>& slots, float mean) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("mean", static_cast<uint32_t>(slots.size()));
  ForEachRank(world, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, world, job, {Param("w", {1})});
    const auto decision = TakeStep(session.get(), DType::kFloat32,
                                   [&](uint32_t slot, size_t, uint64_t) { return slots[slot]; });
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_EQ(decision->grad_norm, mean);
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment0, 0)[0], mean);
    EXPECT_TRUE(session->Close().ok());
  });
}

TEST(ReductionCases, FourSlotsOnOneRank) { CheckMeanOfSlots(1, {1, 2, 3, 4}, 2.5f); }
TEST(ReductionCases, FourSlotsOnFourRanks) { CheckMeanOfSlots(4, {1, 2, 3, 4}, 2.5f); }
TEST(ReductionCases, FourSlotsOnThreeRanks) { CheckMeanOfSlots(3, {1, 2, 3, 4}, 2.5f); }
TEST(ReductionCases, TwoRanksWithOneOneAndThreeFive) { CheckMeanOfSlots(2, {1, 1, 3, 5}, 2.5f); }

TEST(ReductionCases, SlotsWithDifferentTokensGiveTheTokenMean) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("tokens", 3);
  job.reference_tokens = 8;
  const std::vector<uint64_t> tokens = {3, 5, 8};
  const std::vector<float> mean_of_slot = {2.0f, 4.0f, 1.0f};
  const double expected = (3 * 2.0 + 5 * 4.0 + 8 * 1.0) / 16;
  ForEachRank(3, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 3, job, {Param("w", {1})});
    StepReport report;
    report.slots = {{mean_of_slot[rank], tokens[rank]}};
    // The worker scales its slot's mean by n_i / n_ref.
    const auto decision = TakeStep(
        session.get(), DType::kFloat32,
        [&](uint32_t slot, size_t, uint64_t) {
          return mean_of_slot[slot] * static_cast<float>(tokens[slot]) / 8.0f;
        },
        report);
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_DOUBLE_EQ(decision->grad_norm, expected);
    EXPECT_DOUBLE_EQ(decision->loss, expected);
    EXPECT_TRUE(session->Close().ok());
  });
}

TEST(ReductionCases, ParameterWithoutGradientStays) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("absent", 1);
  auto session =
      OpenRank(daemon.socket(), 0, 1, job, {Param("used", {2}), Param("unused", {3})}, 1.0f);
  for (int step = 0; step < 3; ++step) {
    ASSERT_TRUE(GiveGrad(session.get(), DType::kFloat32, 0, 0, [](size_t, uint64_t i) {
                  return i == 0 ? 3.0f : 4.0f;
                }).ok());
    StepReport report;
    report.slots.resize(1);
    report.absent = {1};
    ASSERT_TRUE(session->EndStep(report).ok());
    const auto decision = session->WaitDecision();
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_EQ(decision->grad_norm, 5.0);
  }
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 1), std::vector<float>(3, 1.0f));
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment1, 1), std::vector<float>(3, 0.0f));
  EXPECT_EQ(*session->ParameterApplied(0), 3u);
  EXPECT_EQ(*session->ParameterApplied(1), 0u);
  EXPECT_TRUE(session->Close().ok());
}

TEST(ReductionCases, DeclaredAbsentByOneRankAndGivenByAnother) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("or", 2);
  ForEachRank(2, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 2, job, {Param("a", {1}), Param("b", {1})});
    ASSERT_TRUE(GiveGrad(session.get(), DType::kFloat32, 0, rank, [](size_t, uint64_t) {
                  return 6.0f;
                }).ok());
    StepReport report;
    report.slots.resize(1);
    if (rank == 0) {
      ASSERT_TRUE(GiveGrad(session.get(), DType::kFloat32, 1, rank, [](size_t, uint64_t) {
                    return 4.0f;
                  }).ok());
    } else {
      report.absent = {1};
    }
    ASSERT_TRUE(session->EndStep(report).ok());
    const auto decision = session->WaitDecision();
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment0, 0)[0], 6.0f);
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment0, 1)[0], 2.0f);
    EXPECT_EQ(*session->ParameterApplied(1), 1u);
    EXPECT_TRUE(session->Close().ok());
  });
}

TEST(ReductionCases, NeitherGivenNorDeclaredAbsentFailsAtOnceByName) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("silent", 2);
  std::atomic<bool> rank1_failed{false};
  ForEachRank(2, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 2, job, {Param("a", {1}), Param("b", {1})});
    ASSERT_TRUE(GiveGrad(session.get(), DType::kFloat32, 0, rank, [](size_t, uint64_t) {
                  return 1.0f;
                }).ok());
    StepReport report;
    report.slots.resize(1);
    if (rank == 0) {
      ASSERT_TRUE(GiveGrad(session.get(), DType::kFloat32, 1, rank, [](size_t, uint64_t) {
                    return 1.0f;
                  }).ok());
    } else {
      const absl::Status status = session->EndStep(report);
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_NE(status.message().find("'b'"), absl::string_view::npos) << status;
      EXPECT_NE(status.message().find("rank 1"), absl::string_view::npos) << status;
      rank1_failed = true;
      report.absent = {1};  // said now, the step goes on
    }
    ASSERT_TRUE(session->EndStep(report).ok());
    const auto decision = session->WaitDecision();
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_TRUE(session->Close().ok());
  });
  EXPECT_TRUE(rank1_failed);
}

// Ranks finish parameters in opposite orders, in many buckets, through rings of the
// smallest size (the client makes them no larger than two buckets).
TEST(ReductionCases, RanksThatFinishInDifferentOrdersDoNotDeadlock) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("orders", 4);
  std::vector<ParameterSpec> parameters;
  for (int p = 0; p < 40; ++p) parameters.push_back(Param("p" + std::to_string(p), {3000}));
  ForEachRank(4, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 4, job, parameters);
    for (int step = 0; step < 5; ++step) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        const size_t p = rank % 2 == 0 ? i : parameters.size() - 1 - i;
        ASSERT_TRUE(GiveGrad(session.get(), DType::kFloat32, p, rank, [&](size_t, uint64_t) {
                      return static_cast<float>(rank);
                    }).ok());
      }
      StepReport report;
      report.slots.resize(1);
      ASSERT_TRUE(session->EndStep(report).ok());
      const auto decision = session->WaitDecision();
      ASSERT_TRUE(decision.ok()) << decision.status();
    }
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment0, 7), std::vector<float>(3000, 1.5f));
    EXPECT_TRUE(session->Close().ok());
  });
}

TEST(ReductionCases, GroupsWithTheirOwnHyperparametersAndLrChangedAtStep2) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("groups", 1);
  job.groups = {ParameterGroup{"slow", 1e-3, 0.0, 0.0, 1e-12, 0.0},
                ParameterGroup{"fast", 1e-1, 0.0, 0.0, 1e-12, 0.5}};
  auto session =
      OpenRank(daemon.socket(), 0, 1, job, {Param("a", {3}, 0), Param("b", {4}, 1)}, 1.0f);
  const auto ones = [](uint32_t, size_t, uint64_t) { return 1.0f; };
  ASSERT_TRUE(TakeStep(session.get(), DType::kFloat32, ones).ok());
  // With both betas 0 an AdamW step is the sign: 1 - lr * wd, less lr.
  EXPECT_NEAR(ReadAll(session.get(), StateKind::kMaster, 0)[2], 1 - 1e-3, 1e-7);
  EXPECT_NEAR(ReadAll(session.get(), StateKind::kMaster, 1)[3], 0.95 - 0.1, 1e-6);
  StepReport report;
  report.slots.resize(1);
  report.groups = job.groups;
  report.groups[1].lr = 0.2;
  ASSERT_TRUE(TakeStep(session.get(), DType::kFloat32, ones, report).ok());
  EXPECT_NEAR(ReadAll(session.get(), StateKind::kMaster, 0)[0], 1 - 2e-3, 1e-7);
  EXPECT_NEAR(ReadAll(session.get(), StateKind::kMaster, 1)[0], 0.85 * 0.9 - 0.2, 1e-6);
  EXPECT_TRUE(session->Close().ok());
}

TEST(ReductionCases, RanksWithDifferentHyperparametersAreRefused) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("differ", 2);
  std::atomic<int> refused{0};
  ForEachRank(2, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 2, job, {Param("a", {1})});
    ASSERT_TRUE(GiveGrad(session.get(), DType::kFloat32, 0, rank, [](size_t, uint64_t) {
                  return 1.0f;
                }).ok());
    StepReport report;
    report.slots.resize(1);
    report.groups = job.groups;
    if (rank == 1) report.groups[0].lr = 0.5;
    absl::Status status = session->EndStep(report);
    if (!status.ok()) {
      ++refused;
      EXPECT_NE(status.message().find("hyper-parameters"), absl::string_view::npos) << status;
      report.groups = job.groups;  // rank 1 came second and puts it right
      if (rank == 0) report.groups[0].lr = 0.5;
      status = session->EndStep(report);
    }
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(session->WaitDecision().ok());
    EXPECT_TRUE(session->Close().ok());
  });
  EXPECT_EQ(refused, 1);
}

}  // namespace
}  // namespace shardd::test

// Parameter groups with hyper-parameters of their own, and schedules.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>

#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

ParameterSpec Param(const std::string& name, std::vector<int64_t> shape, uint32_t group = 0) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  spec.group = group;
  return spec;
}

// With both betas 0 an AdamW step is lr times the sign, and the decay.
ParameterGroup Signs(const std::string& name, double lr, double weight_decay = 0) {
  return ParameterGroup{name, lr, 0.0, 0.0, 1e-12, weight_decay};
}

float One(uint32_t, size_t, uint64_t) { return 1.0f; }

std::vector<double> LrOf(const v1::JobStatus& status) {
  std::vector<double> lr;
  for (const v1::GroupStatus& group : status.groups()) lr.push_back(group.lr());
  return lr;
}

TEST(ParameterGroupCases, EmptyGroupsKeepTheirIndices) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("empty", 2);
  job.groups = {Signs("none", 0.5), Signs("decay", 0.25, 0.5), Signs("none either", 0.75),
                Signs("no decay", 0.125)};
  const std::vector<ParameterSpec> model = {Param("b", {3}, 3), Param("w", {5000}, 1),
                                            Param("c", {2}, 3)};
  ForEachRank(2, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 2, job, model, 1.0f);
    auto decision = TakeStep(session.get(), DType::kFloat32, One);
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_THAT(decision->lr, ElementsAre(0.5, 0.25, 0.75, 0.125));
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 0), std::vector<float>(3, 0.875f));
    // 1 - lr * (1 + decay)
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 1), std::vector<float>(5000, 0.625f));
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 2), std::vector<float>(2, 0.875f));
    // Another lr for an empty group goes with the step as any.
    StepReport report;
    report.groups = job.groups;
    report.groups[0].lr = 7;
    report.groups[3].lr = 0.5;
    decision = TakeStep(session.get(), DType::kFloat32, One, report);
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_THAT(decision->lr, ElementsAre(7, 0.25, 0.75, 0.5));
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 0), std::vector<float>(3, 0.375f));
    EXPECT_TRUE(session->Close().ok());
  });
  const v1::JobStatus status = daemon.Job("empty");
  EXPECT_THAT(LrOf(status), ElementsAre(7, 0.25, 0.75, 0.5));
  ASSERT_EQ(status.groups_size(), 4);
  EXPECT_EQ(status.groups(0).parameters(), 0u);
  EXPECT_EQ(status.groups(1).name(), "decay");
  EXPECT_EQ(status.groups(1).elements(), 5000u);
  EXPECT_EQ(status.groups(3).parameters(), 2u);
  EXPECT_EQ(status.groups(3).elements(), 5u);
}

TEST(ParameterGroupCases, BetasAndEpsOfTheirOwn) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("betas", 1);
  job.groups = {ParameterGroup{"a", 0.5, 0.0, 0.0, 1.0, 0.0},
                ParameterGroup{"b", 0.5, 0.5, 0.75, 1e-12, 0.0}};
  auto session = OpenRank(daemon.socket(), 0, 1, job, {Param("a", {2}, 0), Param("b", {2}, 1)});
  ASSERT_TRUE(TakeStep(session.get(), DType::kFloat32, One).ok());
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 0)[0], -0.25f);  // 1 / (1 + eps)
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment0, 0)[0], 1.0f);
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 1)[0], -0.5f);
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment0, 1)[0], 0.5f);
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMoment1, 1)[0], 0.25f);
  EXPECT_TRUE(session->Close().ok());
}

TEST(ParameterGroupCases, FrozenBesideAnEmptyGroup) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("frozen", 1);
  job.groups = {Signs("frozen ones were here", 1), Signs("all", 0.5)};
  job.frozen = {FrozenSpec{"emb", {4}, DType::kFloat32, {}}};
  auto session = Session::Open(RankOptions(daemon.socket(), 0, 1), job, {Param("w", {2}, 1)});
  ASSERT_TRUE(session.ok()) << session.status();
  const std::vector<float> emb = {1, 2, 3, 4}, w = {1, 1};
  ASSERT_TRUE((*session)->Upload(0, 0, w).ok());
  ASSERT_TRUE((*session)->UploadFrozen(0, 0, std::as_bytes(std::span(emb))).ok());
  ASSERT_TRUE((*session)->FinishUpload().ok());
  const auto decision = TakeStep(session->get(), DType::kFloat32, One);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_THAT(decision->lr, ElementsAre(1, 0.5));
  EXPECT_EQ(ReadAll(session->get(), StateKind::kMaster, 0), (std::vector<float>{0.5f, 0.5f}));
  std::vector<float> back(4);
  ASSERT_TRUE((*session)->ReadFrozen(0, 0, std::as_writable_bytes(std::span(back))).ok());
  EXPECT_EQ(back, emb);
  EXPECT_TRUE((*session)->Close().ok());
}

class ScheduleCases : public testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> StartDaemon() {
    DaemonProcess::Options options;
    options.state_directory = state_.path() + "/state";
    options.socket = state_.path() + "/d.sock";
    return std::make_unique<DaemonProcess>(options);
  }
  static JobOptions Linear(const std::string& name) {
    JobOptions job = SmallJob(name, 1);
    job.groups = {Signs("a", 1.0), Signs("b", 0.5)};
    job.schedule = {
        .kind = ScheduleKind::kLinear, .warmup_steps = 2, .total_steps = 6, .final_factor = 0};
    return job;
  }
  const std::vector<ParameterSpec> model_ = {Param("a", {1}, 0), Param("b", {1}, 1)};
  TempDir state_{"/dev/shm"};
};

TEST_F(ScheduleCases, MultipliesTheLrOfEachGroupAndIsSaid) {
  auto daemon = StartDaemon();
  auto session = OpenRank(daemon->socket(), 0, 1, Linear("lin"), model_);
  const double factors[] = {0.5, 1, 0.75, 0.5, 0.25, 0, 0};
  double sum = 0;
  for (const double factor : factors) {
    const auto decision = TakeStep(session.get(), DType::kFloat32, One);
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_THAT(decision->lr, ElementsAre(factor, factor / 2));
    EXPECT_THAT(LrOf(daemon->Job("lin")), ElementsAre(factor, factor / 2));
    sum += factor;
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 0)[0], static_cast<float>(-sum));
    EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 1)[0], static_cast<float>(-sum / 2));
  }
  const auto records = session->StepRecords(1);
  ASSERT_TRUE(records.ok());
  ASSERT_EQ(records->size(), std::size(factors));
  for (size_t i = 0; i < records->size(); ++i) EXPECT_EQ((*records)[i].lr, factors[i]);
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(ScheduleCases, ASkippedStepDoesNotCountAndTheTrainersLrIsMultiplied) {
  auto daemon = StartDaemon();
  auto session = OpenRank(daemon->socket(), 0, 1, Linear("skip"), model_);
  StepReport report;
  report.groups = Linear("").groups;
  report.groups[1].lr = 8;
  auto decision = TakeStep(session.get(), DType::kFloat32, One, report);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_THAT(decision->lr, ElementsAre(0.5, 4));
  decision = TakeStep(session.get(), DType::kFloat32,
                      [](uint32_t, size_t, uint64_t) { return HUGE_VALF; });
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->result, StepResult::kSkipped);
  decision = TakeStep(session.get(), DType::kFloat32, One);  // with the groups of the last step
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->step, 3u);
  EXPECT_THAT(decision->lr, ElementsAre(1, 8));
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(ScheduleCases, GoesOnWhereItWasAfterTheDaemonsDeath) {
  auto daemon = StartDaemon();
  const JobOptions job = Linear("death");
  auto session = OpenRank(daemon->socket(), 0, 1, job, model_);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(TakeStep(session.get(), DType::kFloat32, One).ok());
  session.reset();
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  daemon = StartDaemon();
  EXPECT_THAT(LrOf(daemon->Job("death")), ElementsAre(0.75, 0.375));
  // A later run may plan for longer: the schedule is its own, as lr is.
  JobOptions longer = job;
  longer.schedule.total_steps = 10;
  session = OpenRank(daemon->socket(), 0, 1, longer, model_);
  EXPECT_EQ(session->next_step(), 4u);
  const auto decision = TakeStep(session.get(), DType::kFloat32, One);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_THAT(decision->lr, ElementsAre(0.75, 0.375));
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 0)[0], -3.0f);
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(ScheduleCases, OneThatCannotBeIsRefusedByName) {
  auto daemon = StartDaemon();
  JobOptions job = Linear("bad");
  job.schedule.total_steps = 2;
  const auto session = Session::Open(RankOptions(daemon->socket(), 0, 1), job, model_);
  EXPECT_EQ(session.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(session.status().message()), HasSubstr("schedule.total_steps is 2"));
  EXPECT_FALSE(daemon->HasJob("bad"));
}

}  // namespace
}  // namespace shardd::test

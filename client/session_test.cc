// The session against a fake daemon: the verbs of a step, refusals and endings.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/session_fixture.h"

namespace shardd {
namespace {

using absl::StatusCode;

TEST_F(SessionTest, AStepFromUploadToDecision) {
  auto session = OpenReady();
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->next_step(), 1u);
  EXPECT_EQ(session->loss_scale(), 1.0);
  EXPECT_EQ(session->num_parameters(), 3u);
  EXPECT_FALSE(session->initialising());
  EXPECT_EQ(log_, "");
  for (size_t p = 0; p < 3; ++p) {
    absl::StatusOr<const void*> weights = session->WaitWeights(p);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const std::vector<float> want = Initial(p);
    EXPECT_EQ(std::memcmp(*weights, want.data(), want.size() * 4), 0);
  }
  ASSERT_TRUE(GiveAll(session.get()).ok());
  StepReport report = Report(*session, "blob 1");
  report.slots[0] = {3.25, 17};
  ASSERT_TRUE(session->EndStep(report).ok());
  const absl::StatusOr<Decision> decision = session->WaitDecision();
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->step, 1u);
  EXPECT_EQ(decision->applied, 1u);
  EXPECT_EQ(decision->result, StepResult::kApplied);
  EXPECT_EQ(decision->loss, 1.5);
  EXPECT_EQ(decision->grad_norm, 2.0);
  EXPECT_EQ(decision->loss_scale, 2.0);
  EXPECT_EQ(session->loss_scale(), 2.0);
  EXPECT_EQ(session->next_step(), 2u);
  // What the daemon was told.
  const v1::EndStepRequest told = daemon_->EndSteps().at(0);
  EXPECT_EQ(told.step(), 1u);
  EXPECT_EQ(told.blob(), "blob 1");
  EXPECT_EQ(told.slots(0).loss(), 3.25);
  EXPECT_EQ(told.slots(0).tokens(), 17u);
  EXPECT_EQ(told.groups(0).lr(), 0.5);
  // And the weights of step 2 are those minus lr.
  absl::StatusOr<const void*> weights = session->WaitWeights(2);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(static_cast<const float*>(*weights)[1024], 20.0f + 1.0f - 0.5f);
  EXPECT_TRUE(session->Close().ok());
  EXPECT_TRUE(session->Close().ok()) << "closing twice is no error";
  EXPECT_EQ(session->WaitWeights(0).status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, AnotherSessionResumesAndSaysSo) {
  {
    auto session = OpenReady();
    ASSERT_TRUE(GiveAll(session.get()).ok());
    ASSERT_TRUE(session->EndStep(Report(*session, "position 1")).ok());
    ASSERT_TRUE(session->WaitDecision().ok());
    daemon_->NewGeneration();  // as the daemon does when the session ends
    ASSERT_TRUE(session->Close().ok());
  }
  auto session = OpenReady();
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(log_, "resuming job at step 2\n");
  EXPECT_EQ(session->next_step(), 2u);
  EXPECT_EQ(session->blob(), "position 1");
}

TEST_F(SessionTest, SeveralSlotsAddUpAndHyperparametersStick) {
  job_.slots = 4;
  auto session = OpenReady();
  EXPECT_EQ(session->slots().hi, 4u);
  std::vector<ParameterGroup> groups = job_.groups;
  for (uint64_t step = 1; step <= 3; ++step) {
    for (uint32_t slot = 0; slot < 4; ++slot) {
      for (size_t p = 0; p < 3; ++p) {
        ASSERT_TRUE(Give(session.get(), p, slot, static_cast<float>(slot + 1)).ok());
      }
    }
    StepReport report = Report(*session);
    if (step == 2) {
      groups[0].lr = 0.125;
      report.groups = groups;
    }
    ASSERT_TRUE(session->EndStep(report).ok());
    ASSERT_TRUE(session->WaitDecision().ok());
    for (size_t p = 0; p < 3; ++p) {
      const contract::Range range = daemon_->layout().parameter_range(p);
      EXPECT_EQ(daemon_->Sum(step)[range.begin], 10.0f);
      EXPECT_EQ(daemon_->Sum(step)[range.end - 1], 10.0f);
    }
    EXPECT_EQ(daemon_->EndSteps().back().groups(0).lr(), step == 1 ? 0.5 : 0.125);
  }
}

TEST_F(SessionTest, EndStepFailsByNameAndCanBeRepeated) {
  auto session = OpenReady();
  ASSERT_TRUE(Give(session.get(), 0, 0).ok());
  ASSERT_TRUE(Give(session.get(), 2, 0).ok());
  absl::Status status = session->EndStep(Report(*session));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "EndStep of step 1 by rank 0: parameter 'b' was neither given nor declared absent by "
            "rank 0; give its gradient, or name it in StepReport::absent");
  EXPECT_TRUE(daemon_->EndSteps().empty());

  StepReport report = Report(*session);
  report.absent = {0, 1};
  status = session->EndStep(report);
  EXPECT_NE(std::string(status.message()).find("'a' is declared absent, but"), std::string::npos);
  report.absent = {3};
  EXPECT_EQ(session->EndStep(report).code(), StatusCode::kInvalidArgument);
  report.absent = {1};
  report.slots.clear();
  EXPECT_EQ(session->EndStep(report).code(), StatusCode::kInvalidArgument);
  report = Report(*session, std::string(contract::kMaxBlobBytes + 1, 'x'));
  report.absent = {1};
  EXPECT_EQ(session->EndStep(report).code(), StatusCode::kInvalidArgument);
  report.blob.pop_back();
  report.groups.resize(2);
  EXPECT_EQ(session->EndStep(report).code(), StatusCode::kInvalidArgument);
  report.groups.clear();

  EXPECT_EQ(session->WaitDecision().status().code(), StatusCode::kFailedPrecondition);
  // The daemon may refuse it, too.
  daemon_->NextEndStep(absl::InvalidArgumentError("hyper-parameters differ"));
  EXPECT_EQ(session->EndStep(report).message(), "hyper-parameters differ");
  ASSERT_TRUE(session->EndStep(report).ok());
  EXPECT_EQ(session->EndStep(report).code(), StatusCode::kFailedPrecondition) << "ended twice";
  ASSERT_TRUE(session->WaitDecision().ok());
  EXPECT_EQ(daemon_->EndSteps().at(0).absent(0), 1u);
  const contract::Range b = daemon_->layout().parameter_range(1);
  EXPECT_EQ(daemon_->Sum(1)[b.begin], 0.0f);
  EXPECT_EQ(daemon_->Sum(1)[b.begin - 32], 1.0f);
}

// A daemon that holds a part of a job waits for the weights of the others' after a restart.
TEST_F(SessionTest, NothingIsUploadedWhereAllWasUploadedAndIsNotThereYet) {
  ASSERT_TRUE(OpenReady()->Close().ok());
  daemon_->NewGeneration();
  daemon_->Initialising(true);
  const uint64_t before = daemon_->groups();
  bool initialising = true;
  std::thread trainer([&] {
    auto session = Open();
    ASSERT_TRUE(session.ok()) << session.status();
    initialising = (*session)->initialising();
    EXPECT_EQ((*session)->Upload(0, 0, Initial(0)).code(), StatusCode::kFailedPrecondition);
    EXPECT_TRUE((*session)->Close().ok());
  });
  EXPECT_TRUE(daemon_->WaitUntil([&] { return daemon_->groups() > before; }));
  daemon_->Initialising(false);
  trainer.join();
  EXPECT_FALSE(initialising);
}

TEST_F(SessionTest, CallsOutOfPlaceAreRefusedByName) {
  job_.slots = 2;
  auto fresh = Open();
  ASSERT_TRUE(fresh.ok());
  EXPECT_TRUE((*fresh)->initialising());
  EXPECT_EQ((*fresh)->AcquireGrad(0, 0).status().code(), StatusCode::kFailedPrecondition);
  const std::vector<float> values(64);
  EXPECT_EQ((*fresh)->Upload(3, 0, values).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*fresh)->Upload(0, 1, values).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*fresh)->Upload(0, 4992, values).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*fresh)->Upload(0, 0, std::span(values).first(33)).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ((*fresh)->Upload(0, UINT64_MAX - 31, values).code(), StatusCode::kInvalidArgument);
  for (size_t p = 0; p < 3; ++p) ASSERT_TRUE((*fresh)->Upload(p, 0, Initial(p)).ok());
  ASSERT_TRUE((*fresh)->FinishUpload().ok());
  EXPECT_EQ((*fresh)->Upload(0, 0, values).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ((*fresh)->AcquireGrad(3, 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*fresh)->AcquireGrad(0, 2).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*fresh)->WaitWeights(3).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*fresh)->ReadyGrad(0, 0).code(), StatusCode::kFailedPrecondition);
  daemon_->HoldDecisions(true);
  ASSERT_TRUE(GiveAll(fresh->get()).ok());
  ASSERT_TRUE((*fresh)->EndStep(Report(**fresh)).ok());
  EXPECT_EQ((*fresh)->WaitWeights(0).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ((*fresh)->AcquireGrad(0, 0).status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, StateIsReadThroughTheWindowInParts) {
  auto session = OpenReady();
  std::vector<float> got(5000);
  ASSERT_TRUE(session->ReadState(StateKind::kMaster, 0, 0, got).ok());
  EXPECT_EQ(got, Initial(0));
  ASSERT_TRUE(session->ReadState(StateKind::kMaster, 2, 5000, std::span(got).first(1000)).ok());
  EXPECT_EQ(got[999], Initial(2)[5999]);
  EXPECT_EQ(session->ReadState(StateKind::kMaster, 0, 1, got).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(session->ReadState(StateKind::kMaster, 0, 5000, {}).ok());
  EXPECT_EQ(*session->ParameterApplied(1), 0u);
}

TEST_F(SessionTest, ASkippedStepSaysWhy) {
  auto session = OpenReady();
  daemon_->NextResult(v1::STEP_SKIPPED, "parameter 'b', rank 0: NaN");
  ASSERT_TRUE(GiveAll(session.get()).ok());
  ASSERT_TRUE(session->EndStep(Report(*session)).ok());
  const absl::StatusOr<Decision> decision = session->WaitDecision();
  ASSERT_TRUE(decision.ok());
  EXPECT_EQ(decision->result, StepResult::kSkipped);
  EXPECT_EQ(decision->reason, "parameter 'b', rank 0: NaN");
  EXPECT_EQ(decision->applied, 0u);
  const auto records = session->StepRecords(0);
  ASSERT_TRUE(records.ok());
  ASSERT_EQ(records->size(), 1u);
  EXPECT_EQ((*records)[0].result, StepResult::kSkipped);
  EXPECT_EQ((*records)[0].reason, decision->reason);
  EXPECT_TRUE(session->StepRecords(2)->empty());
}

// --- endings --------------------------------------------------------------

TEST_F(SessionTest, ARefusedSessionIsToldWhyAtEveryVerb) {
  auto session = OpenReady();
  daemon_->Refuse(0, absl::AbortedError("rank 0 was taken over by another process"));
  for (int i = 0; i < 2; ++i) {
    for (const absl::Status& status :
         {session->WaitWeights(0).status(), session->AcquireGrad(0, 0).status(),
          session->ReadyGrad(0, 0), session->EndStep(Report(*session)),
          session->WaitDecision().status(), session->FinishUpload()}) {
      EXPECT_EQ(status.code(), StatusCode::kAborted);
      EXPECT_EQ(status.message(), "rank 0 was taken over by another process");
      EXPECT_FALSE(GetRegrouped(status).has_value()) << "it may not go on";
    }
  }
}

TEST_F(SessionTest, ARefusalEndsAWaitAndAJoin) {
  auto session = OpenReady();
  daemon_->HoldDecisions(true);
  ASSERT_TRUE(GiveAll(session.get()).ok());
  ASSERT_TRUE(session->EndStep(Report(*session)).ok());
  absl::Status status;
  std::thread waiter([&] { status = session->WaitDecision().status(); });
  daemon_->Refuse(0, absl::DataLossError("the ring's memory is gone"));
  waiter.join();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  daemon_->NewGeneration();
  EXPECT_EQ(session->WaitDecision().status().code(), StatusCode::kDataLoss);
}

TEST_F(SessionTest, AFailedJobSaysWhy) {
  auto session = OpenReady();
  ASSERT_TRUE(GiveAll(session.get()).ok());
  daemon_->HoldDecisions(true);
  ASSERT_TRUE(session->EndStep(Report(*session)).ok());
  daemon_->FailJob("overflow at the floor");
  const absl::Status status = session->WaitDecision().status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "overflow at the floor");
  std::vector<float> got(12);
  EXPECT_TRUE(session->ReadState(StateKind::kMaster, 1, 0, got).ok()) << "the state is there";
}

TEST_F(SessionTest, ADeadlineNamesWhoIsMissing) {
  job_.step_timeout = absl::Milliseconds(200);
  auto session = OpenReady();
  daemon_->HoldDecisions(true);
  ASSERT_TRUE(GiveAll(session.get()).ok());
  ASSERT_TRUE(session->EndStep(Report(*session)).ok());
  const absl::Status status = session->WaitDecision().status();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "step waits for EndStep of rank 1");
  // It may be waited for again.
  daemon_->HoldDecisions(false);
  EXPECT_TRUE(session->WaitDecision().ok());
}

TEST_F(SessionTest, ADaemonThatHangsUpEndsWaits) {
  reconnect_timeout_ = absl::ZeroDuration();
  auto session = OpenReady();
  daemon_->HoldDecisions(true);
  ASSERT_TRUE(GiveAll(session.get()).ok());
  ASSERT_TRUE(session->EndStep(Report(*session)).ok());
  absl::Status status;
  std::thread waiter([&] { status = session->WaitDecision().status(); });
  daemon_->HangUp(0);
  waiter.join();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(std::string(status.message()).find("the daemon of job 'job' at "), std::string::npos);
  EXPECT_EQ(log_, "");
}

TEST_F(SessionTest, ADeadDaemonIsUnavailableEverywhere) {
  reconnect_timeout_ = absl::ZeroDuration();
  auto session = OpenReady();
  ASSERT_TRUE(GiveAll(session.get()).ok());
  daemon_.reset();
  EXPECT_EQ(session->EndStep(Report(*session)).code(), StatusCode::kUnavailable);
  EXPECT_EQ(session->StepRecords(0).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(session->Close().code(), StatusCode::kUnavailable);
  connect_timeout_ = absl::Milliseconds(50);
  EXPECT_EQ(Open().status().code(), StatusCode::kUnavailable);
}

TEST_F(SessionTest, PrivateWeightsAtEveryStage) {
  job_.weights = WeightsMode::kPrivate;
  for (int stage : {1, 3}) {
    daemon_.reset();
    daemon_ = std::make_unique<FakeDaemon>(socket_);
    job_.stage = stage;
    auto session = OpenReady();
    ASSERT_NE(session, nullptr);
    const size_t all[] = {0, 1, 2};
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(session->WaitWeights(2).ok(), stage == 1);
      ASSERT_TRUE(session->Gather(all).ok());
      const void* weights = *session->WaitWeights(2);
      EXPECT_EQ(static_cast<const float*>(weights)[2048], 22.0f - 0.5f * static_cast<float>(step));
      ASSERT_TRUE(session->Release(all).ok());
      ASSERT_TRUE(GiveAll(session.get()).ok());
      ASSERT_TRUE(session->EndStep(Report(*session)).ok());
      ASSERT_TRUE(session->WaitDecision().ok());
    }
    const size_t wrong[] = {3};
    EXPECT_EQ(session->Gather(wrong).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(session->Release(wrong).code(), StatusCode::kInvalidArgument);
  }
}

TEST_F(SessionTest, TwoRanksWithThreeSlotsEach) {
  job_.slots = 6;
  std::unique_ptr<Session> sessions[2];
  std::thread openers[2];
  for (uint32_t rank : {0u, 1u}) {
    openers[rank] = std::thread([&, rank] {
      auto session = Open(rank, 2);
      ASSERT_TRUE(session.ok()) << session.status();
      for (size_t p = rank; p < 3; p += 2) ASSERT_TRUE((*session)->Upload(p, 0, Initial(p)).ok());
      ASSERT_TRUE((*session)->FinishUpload().ok());
      for (int step = 1; step <= 3; ++step) {
        StepReport report = Report(**session, absl::StrCat("blob ", step, " of rank ", rank));
        for (uint32_t slot = (*session)->slots().lo; slot < (*session)->slots().hi; ++slot) {
          for (size_t p = 0; p < 3; ++p) {
            if (p == 1 && slot != 4) continue;  // b: only in slot 4, which is rank 1's
            ASSERT_TRUE(Give(session->get(), p, slot, static_cast<float>(1 << slot)).ok());
          }
        }
        if (rank == 0) report.absent = {1};
        ASSERT_TRUE((*session)->EndStep(report).ok());
        ASSERT_TRUE((*session)->WaitDecision().ok());
      }
      sessions[rank] = *std::move(session);
    });
  }
  for (std::thread& opener : openers) opener.join();
  EXPECT_EQ(daemon_->Sum(3)[0], 63.0f);
  EXPECT_EQ(daemon_->Sum(3)[daemon_->layout().parameter_range(1).begin], 16.0f);
  for (const v1::EndStepRequest& request : daemon_->EndSteps()) {
    EXPECT_TRUE(request.blob().empty() || request.blob().ends_with("of rank 0"));
    EXPECT_EQ(request.groups_size(), request.blob().empty() ? 0 : 1);
  }
}

}  // namespace
}  // namespace shardd

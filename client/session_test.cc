// The session against a fake daemon: the verbs of a step, regrouping at each of them,
// refusals and endings.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/fake_daemon.h"

namespace shardd {
namespace {

using absl::StatusCode;

class SessionTest : public testing::Test {
 protected:
  SessionTest() {
    char pattern[] = "/tmp/session_test_XXXXXX";
    directory_ = mkdtemp(pattern);
    socket_ = directory_ + "/s";
    daemon_ = std::make_unique<FakeDaemon>(socket_);
    job_.name = "job";
    job_.grad_dtype = DType::kFloat32;
    job_.weight_dtype = DType::kFloat32;
    job_.chunk_elements = 4096;
    job_.bucket_elements = 4096;
    job_.groups[0].lr = 0.5;
    job_.step_timeout = absl::Seconds(30);
    job_.join_timeout = absl::Seconds(30);
    parameters_ = {{"a", {5000}, 0, {}, {}}, {"b", {3, 4}, 0, {}, {}}, {"c", {6000}, 0, {}, {}}};
  }
  ~SessionTest() override {
    daemon_.reset();
    rmdir(directory_.c_str());
  }

  absl::StatusOr<std::unique_ptr<Session>> Open(uint32_t rank = 0, uint32_t world_size = 1) {
    SessionOptions options;
    options.address = socket_;
    options.rank = rank;
    options.world_size = world_size;
    options.connect_timeout = connect_timeout_;
    options.log = [this](const std::string& line) { log_ += line + "\n"; };
    return Session::Open(options, job_, parameters_);
  }

  // Opens one rank and uploads element i of parameter p as 10 p + i / 1024.
  std::unique_ptr<Session> OpenReady() {
    auto session = Open();
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return nullptr;
    for (size_t p = 0; p < parameters_.size() && (*session)->initialising(); ++p) {
      const absl::Status status = (*session)->Upload(p, 0, Initial(p));
      EXPECT_TRUE(status.ok()) << status;
    }
    EXPECT_TRUE((*session)->FinishUpload().ok());
    return *std::move(session);
  }
  std::vector<float> Initial(size_t parameter) const {
    uint64_t count = 1;
    for (int64_t extent : parameters_[parameter].shape) count *= static_cast<uint64_t>(extent);
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) {
      values[i] = 10.0f * static_cast<float>(parameter) + static_cast<float>(i) / 1024.0f;
    }
    return values;
  }

  absl::Status Give(Session* session, size_t parameter, uint32_t slot, float value = 1.0f) {
    absl::StatusOr<void*> grad = session->AcquireGrad(parameter, slot);
    if (!grad.ok()) return grad.status();
    std::fill_n(static_cast<float*>(*grad), session->parameter_elements(parameter), value);
    return session->ReadyGrad(parameter, slot);
  }
  absl::Status GiveAll(Session* session) {
    absl::Status status;
    for (uint32_t slot = session->slots().lo; slot < session->slots().hi; ++slot) {
      for (size_t p = parameters_.size(); p-- > 0;) status.Update(Give(session, p, slot));
    }
    return status;
  }
  StepReport Report(const Session& session, const std::string& blob = "") const {
    StepReport report;
    report.slots.resize(session.slots().hi - session.slots().lo);
    report.blob = blob;
    return report;
  }

  void ExpectRegrouped(const absl::Status& status, uint64_t next_step, const std::string& blob) {
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status;
    const std::optional<Regrouped> regrouped = GetRegrouped(status);
    ASSERT_TRUE(regrouped.has_value()) << status;
    EXPECT_EQ(regrouped->next_step, next_step);
    EXPECT_EQ(regrouped->blob, blob);
  }

  std::string directory_, socket_, log_;
  absl::Duration connect_timeout_ = absl::Seconds(20);
  std::unique_ptr<FakeDaemon> daemon_;
  JobOptions job_;
  std::vector<ParameterSpec> parameters_;
};

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

// --- a new generation, at each verb ---------------------------------------

class RegroupTest : public SessionTest {
 protected:
  // One decided step, then a new generation that the session has not seen.
  void Begin() {
    session_ = OpenReady();
    ASSERT_TRUE(GiveAll(session_.get()).ok());
    ASSERT_TRUE(session_->EndStep(Report(*session_, "blob 1")).ok());
    ASSERT_TRUE(session_->WaitDecision().ok());
  }
  // The verb regrouped; the step can be computed as if nothing had been.
  void ExpectFresh(const absl::Status& status) {
    ExpectRegrouped(status, 2, "blob 1");
    EXPECT_EQ(session_->next_step(), 2u);
    EXPECT_EQ(session_->blob(), "blob 1");
    EXPECT_EQ(session_->generation(), daemon_->generation());
    ASSERT_TRUE(session_->WaitWeights(0).ok());
    for (size_t p = 0; p < 3; ++p) ASSERT_TRUE(Give(session_.get(), p, 0, 4.0f).ok());
    ASSERT_TRUE(session_->EndStep(Report(*session_)).ok());
    const absl::StatusOr<Decision> decision = session_->WaitDecision();
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_EQ(decision->step, 2u);
    // Nothing of what was given before the change came in.
    EXPECT_EQ(daemon_->Sum(2)[0], 4.0f);
  }
  std::unique_ptr<Session> session_;
};

TEST_F(RegroupTest, AtWaitWeights) {
  Begin();
  daemon_->NewGeneration();
  ExpectFresh(session_->WaitWeights(0).status());
}

TEST_F(RegroupTest, AtGather) {
  Begin();
  daemon_->NewGeneration();
  const size_t all[] = {0, 1, 2};
  ExpectFresh(session_->Gather(all));
}

TEST_F(RegroupTest, AtAcquireGrad) {
  Begin();
  ASSERT_TRUE(Give(session_.get(), 0, 0, 9.0f).ok());
  daemon_->NewGeneration();
  ExpectFresh(session_->AcquireGrad(1, 0).status());
}

TEST_F(RegroupTest, AtReadyGrad) {
  Begin();
  ASSERT_TRUE(Give(session_.get(), 2, 0, 9.0f).ok());
  ASSERT_TRUE(session_->AcquireGrad(1, 0).ok());
  daemon_->NewGeneration();
  ExpectFresh(session_->ReadyGrad(1, 0));
}

TEST_F(RegroupTest, WhileReadyGradWaitsForRingSpace) {
  parameters_[0].shape = {40000};  // more buckets than the ring holds
  Begin();
  daemon_->HoldRings(true);
  ASSERT_TRUE(Give(session_.get(), 0, 0, 9.0f).ok());
  ASSERT_TRUE(Give(session_.get(), 1, 0, 9.0f).ok());
  const uint64_t bells = daemon_->doorbells();
  absl::Status status;
  std::thread blocked([&] { status = Give(session_.get(), 2, 0, 9.0f); });
  // The last one lets all buckets go; the ring takes 64 KiB, which is four of them.
  ASSERT_TRUE(daemon_->WaitUntil([&] { return daemon_->doorbells() >= bells + 4; }));
  daemon_->NewGeneration();
  blocked.join();
  daemon_->HoldRings(false);
  ExpectFresh(status);
}

TEST_F(RegroupTest, AtEndStep) {
  Begin();
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  daemon_->NewGeneration();
  ExpectFresh(session_->EndStep(Report(*session_, "lost")));
}

TEST_F(RegroupTest, WhenTheDaemonAnswersEndStepWithAborted) {
  Begin();
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  daemon_->NextEndStep(absl::AbortedError("generation 1 is over"));
  // The board may show it only after the answer.
  const absl::Status first = session_->EndStep(Report(*session_, "lost"));
  EXPECT_EQ(first.code(), StatusCode::kAborted);
  EXPECT_FALSE(GetRegrouped(first).has_value());
  daemon_->NewGeneration();
  ExpectFresh(session_->EndStep(Report(*session_, "lost")));
}

TEST_F(RegroupTest, WhileWaitDecisionWaits) {
  Begin();
  daemon_->HoldDecisions(true);
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  ASSERT_TRUE(session_->EndStep(Report(*session_, "lost")).ok());
  absl::Status status;
  std::thread waiter([&] { status = session_->WaitDecision().status(); });
  daemon_->NewGeneration();
  waiter.join();
  daemon_->HoldDecisions(false);
  ExpectFresh(status);
}

TEST_F(RegroupTest, ADecisionThatWasTakenBeforeIsNotLost) {
  Begin();
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  ASSERT_TRUE(session_->EndStep(Report(*session_, "blob 2")).ok());
  ASSERT_TRUE(daemon_->WaitUntil([&] { return daemon_->committed_step() == 2; }));
  daemon_->NewGeneration();
  ExpectRegrouped(session_->WaitDecision().status(), 3, "blob 2");
  EXPECT_EQ(session_->next_step(), 3u);
}

TEST_F(RegroupTest, AtUpload) {
  auto session = Open();
  ASSERT_TRUE(session.ok());
  daemon_->NewGeneration();
  ExpectRegrouped((*session)->Upload(0, 0, Initial(0)), 1, "");
  for (size_t p = 0; p < 3; ++p) ASSERT_TRUE((*session)->Upload(p, 0, Initial(p)).ok());
  EXPECT_TRUE((*session)->FinishUpload().ok());
}

TEST_F(RegroupTest, AGenerationLostWhileJoiningIsJoinedAgain) {
  Begin();
  daemon_->NextJoin(absl::AbortedError("rank 1 was lost meanwhile"));
  daemon_->NewGeneration();
  ExpectFresh(session_->WaitWeights(0).status());
}

TEST_F(RegroupTest, AGroupThatDoesNotFormIsToldAndTriedAgain) {
  Begin();
  daemon_->NextJoin(absl::DeadlineExceededError("missing rank 1"));
  daemon_->NewGeneration();
  const absl::Status status = session_->WaitWeights(0).status();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "missing rank 1");
  ExpectFresh(session_->WaitWeights(0).status());
}

TEST_F(RegroupTest, EverybodyStartsFromTheCommittedWeights) {
  Begin();
  daemon_->WeightsReady(false);
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  ASSERT_TRUE(session_->EndStep(Report(*session_, "blob 2")).ok());
  ASSERT_TRUE(session_->WaitDecision().ok());
  daemon_->NewGeneration();
  absl::Status status;
  std::thread joiner([&] { status = session_->AcquireGrad(0, 0).status(); });
  const uint64_t joined = daemon_->generation();
  ASSERT_TRUE(daemon_->WaitUntil([&] { return daemon_->generation() == joined; }));
  daemon_->WeightsReady(true);
  joiner.join();
  ExpectRegrouped(status, 3, "blob 2");
}

TEST_F(RegroupTest, TwoThreadsSeeTheSameChange) {
  Begin();
  daemon_->HoldRings(true);
  daemon_->WeightsReady(false);
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  daemon_->HoldRings(false);
  ASSERT_TRUE(session_->EndStep(Report(*session_, "blob 2")).ok());
  ASSERT_TRUE(session_->WaitDecision().ok());
  absl::Status statuses[2];
  std::thread threads[2];
  for (int i : {0, 1}) {
    threads[i] = std::thread([&, i] { statuses[i] = session_->WaitWeights(i).status(); });
  }
  daemon_->NewGeneration();
  daemon_->WeightsReady(true);
  for (std::thread& thread : threads) thread.join();
  int regrouped = 0;
  for (const absl::Status& status : statuses) {
    // One that came late found the new generation in place and its weights ready.
    EXPECT_TRUE(status.ok() || GetRegrouped(status).has_value()) << status;
    regrouped += GetRegrouped(status).has_value() ? 1 : 0;
  }
  EXPECT_GE(regrouped, 1);
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
  auto session = OpenReady();
  daemon_->HoldDecisions(true);
  ASSERT_TRUE(GiveAll(session.get()).ok());
  ASSERT_TRUE(session->EndStep(Report(*session)).ok());
  absl::Status status;
  std::thread waiter([&] { status = session->WaitDecision().status(); });
  daemon_->HangUp(0);
  waiter.join();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(std::string(status.message()).find("the daemon of job 'job' is gone"),
            std::string::npos);
}

TEST_F(SessionTest, ADeadDaemonIsUnavailableEverywhere) {
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

// A new generation, at each verb of a session.
#include <gtest/gtest.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "client/session_fixture.h"

namespace shardd {
namespace {

using absl::StatusCode;

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

}  // namespace
}  // namespace shardd

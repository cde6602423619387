// A daemon that dies and comes back, at each verb of a session.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/session_fixture.h"

namespace shardd {
namespace {

using absl::StatusCode;

class ReattachTest : public RegroupTest {
 protected:
  // The daemon comes back once the session waits for it.
  ReattachTest() {
    on_log_ = [this](const std::string& line) {
      if (!line.starts_with("the daemon of job went away")) return;
      ++losses_;
      // A session may notice while the daemon is still dying.
      std::lock_guard<std::mutex> lock(dying_);
      if (down_) ComeBack();
    };
  }
  void Die() {
    std::lock_guard<std::mutex> lock(dying_);
    daemon_->Die();
    down_ = true;
  }
  void ComeBack() {
    down_ = false;
    if (before_return_) before_return_();
    daemon_->ComeBack();
  }
  static size_t WeightMappings() {
    std::ifstream maps("/proc/self/maps");
    size_t count = 0;
    for (std::string line; std::getline(maps, line);) {
      count += line.find("memfd:weights") != std::string::npos ? 1 : 0;
    }
    return count;
  }

  std::atomic<int> losses_{0};
  std::mutex dying_;
  bool down_ = false;
  std::function<void()> before_return_;
};

TEST_F(ReattachTest, AtWaitWeights) {
  Begin();
  Die();
  ComeBack();
  ExpectFresh(session_->WaitWeights(0).status());
  EXPECT_EQ(losses_, 1);
  EXPECT_TRUE(
      log_.starts_with("the daemon of job went away; waiting up to 30s for it to come "
                       "back\nre-attached to the daemon of job after "))
      << log_;
  EXPECT_NE(log_.find(" at step 2, generation 2\n"), std::string::npos) << log_;
}

TEST_F(ReattachTest, WhileWaitWeightsWaits) {
  Begin();
  daemon_->WeightsReady(false);
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  ASSERT_TRUE(session_->EndStep(Report(*session_, "blob 2")).ok());
  ASSERT_TRUE(session_->WaitDecision().ok());
  before_return_ = [&] { daemon_->WeightsReady(true); };
  absl::Status status;
  std::thread waiter([&] { status = session_->WaitWeights(0).status(); });
  Die();
  waiter.join();
  ExpectRegrouped(status, 3, "blob 2");
}

TEST_F(ReattachTest, AtGather) {
  Begin();
  Die();
  ComeBack();
  const size_t all[] = {0, 1, 2};
  ExpectFresh(session_->Gather(all));
}

TEST_F(ReattachTest, AtAcquireGrad) {
  Begin();
  ASSERT_TRUE(Give(session_.get(), 0, 0, 9.0f).ok());
  Die();
  ComeBack();
  ExpectFresh(session_->AcquireGrad(1, 0).status());
}

TEST_F(ReattachTest, AtReadyGrad) {
  Begin();
  ASSERT_TRUE(session_->AcquireGrad(1, 0).ok());
  Die();
  ComeBack();
  ExpectFresh(session_->ReadyGrad(1, 0));
}

TEST_F(ReattachTest, WhileReadyGradWaitsForRingSpace) {
  parameters_[0].shape = {40000};  // more buckets than the ring holds
  Begin();
  daemon_->HoldRings(true);
  ASSERT_TRUE(Give(session_.get(), 0, 0, 9.0f).ok());
  ASSERT_TRUE(Give(session_.get(), 1, 0, 9.0f).ok());
  const uint64_t bells = daemon_->doorbells();
  absl::Status status;
  std::thread blocked([&] { status = Give(session_.get(), 2, 0, 9.0f); });
  ASSERT_TRUE(daemon_->WaitUntil([&] { return daemon_->doorbells() >= bells + 4; }));
  Die();
  blocked.join();
  daemon_->HoldRings(false);
  ExpectFresh(status);
}

TEST_F(ReattachTest, AtEndStep) {
  Begin();
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  Die();
  ExpectFresh(session_->EndStep(Report(*session_, "lost")));
}

TEST_F(ReattachTest, WhenADaemonThatEndsSaysSo) {
  Begin();
  // The fake one learns of the hang-up as the real one does: it ends the generation.
  on_log_ = [&](const std::string& line) {
    if (line.starts_with("the daemon of job went away")) daemon_->NewGeneration();
  };
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  daemon_->NextEndStep(absl::UnavailableError("the daemon is shutting down"));
  daemon_->NextOpen(absl::UnavailableError("the daemon is shutting down"));
  ExpectRegrouped(session_->EndStep(Report(*session_, "lost")), 2, "blob 1");
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  daemon_->NextEndStep(absl::CancelledError("CANCELLED"));
  ExpectFresh(session_->EndStep(Report(*session_, "lost")));
}

TEST_F(ReattachTest, WhileWaitDecisionWaits) {
  Begin();
  daemon_->HoldDecisions(true);
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  ASSERT_TRUE(session_->EndStep(Report(*session_, "lost")).ok());
  before_return_ = [&] { daemon_->HoldDecisions(false); };
  absl::Status status;
  std::thread waiter([&] { status = session_->WaitDecision().status(); });
  Die();
  waiter.join();
  ExpectFresh(status);
}

TEST_F(ReattachTest, ADecisionThatWasTakenBeforeIsTold) {
  Begin();
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  ASSERT_TRUE(session_->EndStep(Report(*session_, "blob 2")).ok());
  ASSERT_TRUE(daemon_->WaitUntil([&] { return daemon_->committed_step() == 2; }));
  Die();
  ComeBack();
  const absl::StatusOr<Decision> decision = session_->WaitDecision();
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->step, 2u);
  EXPECT_EQ(decision->applied, 2u);
  EXPECT_EQ(decision->loss, 2.5);
  EXPECT_EQ(losses_, 1);
  EXPECT_EQ(session_->next_step(), 3u);
  ExpectRegrouped(session_->WaitWeights(0).status(), 3, "blob 2");
}

TEST_F(ReattachTest, AnUploadBeginsAnew) {
  auto session = Open();
  ASSERT_TRUE(session.ok());
  ASSERT_TRUE((*session)->Upload(0, 0, Initial(0)).ok());
  before_return_ = [&] { daemon_->LoseJob(); };
  absl::Status status;
  std::thread waiter([&] { status = (*session)->FinishUpload(); });
  Die();
  waiter.join();
  ExpectRegrouped(status, 1, "");
  EXPECT_TRUE((*session)->initialising());
  EXPECT_EQ((*session)->Upload(0, 1, Initial(0)).code(), StatusCode::kInvalidArgument);
  for (size_t p = 0; p < 3; ++p) ASSERT_TRUE((*session)->Upload(p, 0, Initial(p)).ok());
  ASSERT_TRUE((*session)->FinishUpload().ok());
  ASSERT_TRUE(GiveAll(session->get()).ok());
  ASSERT_TRUE((*session)->EndStep(Report(**session)).ok());
  EXPECT_EQ((*session)->WaitDecision()->step, 1u);
}

TEST_F(ReattachTest, ReadingGoesOnAsIfNothingHadBeen) {
  Begin();
  Die();
  auto records = session_->StepRecords(1);
  ASSERT_TRUE(records.ok()) << records.status();
  EXPECT_EQ(records->size(), 1u);
  Die();
  std::vector<float> got(5000);
  ASSERT_TRUE(session_->ReadState(StateKind::kMaster, 0, 0, got).ok());
  EXPECT_EQ(got[1], Initial(0)[1] - 0.5f);
  Die();
  EXPECT_EQ(*session_->ParameterApplied(1), 1u);
  EXPECT_EQ(losses_, 3);
  ExpectFresh(session_->WaitWeights(0).status());
}

TEST_F(ReattachTest, AtClose) {
  Begin();
  Die();
  EXPECT_TRUE(session_->Close().ok());
  EXPECT_EQ(losses_, 1);
  EXPECT_EQ(session_->WaitWeights(0).status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(ReattachTest, WhileTheGroupForms) {
  daemon_->NextJoin(absl::UnavailableError("it died"));
  auto session = OpenReady();
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(losses_, 1);
  EXPECT_EQ(session->next_step(), 1u);
}

TEST_F(ReattachTest, ADaemonThatDiesAgainMeanwhile) {
  Begin();
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  daemon_->NextJoin(absl::UnavailableError("it died"));
  Die();
  ExpectFresh(session_->EndStep(Report(*session_, "lost")));
  EXPECT_EQ(losses_, 2);
}

TEST_F(ReattachTest, TwoThreadsAndOneReattach) {
  Begin();
  daemon_->WeightsReady(false);
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  ASSERT_TRUE(session_->EndStep(Report(*session_, "blob 2")).ok());
  ASSERT_TRUE(session_->WaitDecision().ok());
  before_return_ = [&] { daemon_->WeightsReady(true); };
  absl::Status statuses[2];
  std::thread threads[2];
  for (int i : {0, 1}) {
    threads[i] = std::thread([&, i] { statuses[i] = session_->WaitWeights(i).status(); });
  }
  Die();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(losses_, 1);
  int regrouped = 0;
  for (const absl::Status& status : statuses) {
    // One that came late found the new group in place.
    EXPECT_TRUE(status.ok() || GetRegrouped(status).has_value()) << status;
    regrouped += GetRegrouped(status).has_value() ? 1 : 0;
  }
  EXPECT_GE(regrouped, 1);
}

TEST_F(ReattachTest, MemoryStaysUntilTheNextDecision) {
  Begin();
  const size_t mappings = WeightMappings();
  const auto* weights = static_cast<const float*>(*session_->WaitWeights(2));
  const float was = weights[7];
  auto* grad = static_cast<float*>(*session_->AcquireGrad(2, 0));
  Die();
  ComeBack();
  const absl::Status status = session_->AcquireGrad(1, 0).status();
  EXPECT_EQ(WeightMappings(), mappings + 1);
  EXPECT_EQ(weights[7], was);
  std::fill_n(grad, 6000, 9.0f);
  ExpectFresh(status);
  EXPECT_EQ(WeightMappings(), mappings);
}

TEST_F(ReattachTest, PrivateWeightsKeepTheirPlaceAndAreRefreshed) {
  job_.weights = WeightsMode::kPrivate;
  Begin();
  const auto* weights = static_cast<const float*>(*session_->WaitWeights(2));
  const float was = weights[7];
  std::memset(const_cast<float*>(weights), 0, 64);
  Die();
  ComeBack();
  const absl::Status status = session_->AcquireGrad(1, 0).status();
  EXPECT_EQ(*session_->WaitWeights(2), weights);
  EXPECT_EQ(weights[7], was);
  ExpectFresh(status);
}

TEST_F(ReattachTest, ADaemonThatStaysAwayIsNamed) {
  reconnect_timeout_ = absl::Milliseconds(50);
  Begin();
  ASSERT_TRUE(GiveAll(session_.get()).ok());
  daemon_->Die();
  const absl::Status status = session_->EndStep(Report(*session_));
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  const std::string message(status.message());
  EXPECT_NE(message.find(socket_ + " did not come back within"), std::string::npos) << message;
  EXPECT_NE(message.find("start shardd there with the same state directory"), std::string::npos);
  EXPECT_NE(message.find("SHARDD_RECONNECT_SECONDS"), std::string::npos);
  // It is over: nobody waits a second time.
  daemon_->ComeBack();
  EXPECT_EQ(session_->WaitWeights(0).status(), status);
  EXPECT_EQ(session_->StepRecords(1).status(), status);
  EXPECT_EQ(session_->Close(), status);
  EXPECT_EQ(losses_, 1);
}

TEST_F(ReattachTest, ADaemonWithoutTheJobIsRefused) {
  Begin();
  before_return_ = [&] { daemon_->LoseJob(); };
  Die();
  const absl::Status status = session_->StepRecords(1).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(status.message()).find("came back without job 'job'"), std::string::npos)
      << status;
}

TEST_F(ReattachTest, AnotherTimelineIsRefused) {
  Begin();
  Die();
  daemon_->LoseJob();
  ComeBack();
  auto other = Open();
  ASSERT_TRUE(other.ok());
  const absl::Status status = session_->StepRecords(1).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(status.message()).find("timeline 100"), std::string::npos) << status;
  EXPECT_NE(std::string(status.message()).find("timeline 99"), std::string::npos) << status;
  EXPECT_EQ(session_->WaitWeights(0).status(), status);
}

}  // namespace
}  // namespace shardd

// Ranks that leave in good order, early or late, and those that take their places.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>

#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"
#include "tests/support/raw_session.h"

namespace shardd::test {
namespace {

constexpr uint64_t kElements = 100;  // one bucket

class LeaverCases : public testing::Test {
 protected:
  // All ranks of a fresh job, joined and with their weights there.
  void StartRanks(const std::string& job, uint32_t world_size) {
    std::vector<std::future<void>> starting;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      ranks_.push_back(std::make_unique<RawSession>(daemon_.socket()));
      starting.push_back(std::async(std::launch::async, [this, job, rank, world_size] {
        ranks_[rank]->Start(job, kElements, rank, world_size);
      }));
    }
    for (auto& started : starting) started.get();
  }
  // Another process's session at `rank`, without its ring.
  std::unique_ptr<RawSession> Successor(const std::string& job, uint32_t rank,
                                        uint32_t world_size) {
    auto session = std::make_unique<RawSession>(daemon_.socket());
    const grpc::Status opened = session->Open(session->MakeOpen(job, kElements, rank, world_size));
    EXPECT_TRUE(opened.ok()) << opened.error_message();
    return session;
  }
  // The caller's ring is attached if need be; the answer comes when all have joined.
  static std::future<grpc::Status> JoinSoon(RawSession* session) {
    if (session->ring() == nullptr) {
      EXPECT_TRUE(session->AttachRing(65536)) << session->error();
    }
    return std::async(std::launch::async, [session] {
      v1::JoinReply reply;
      return session->Join(&reply);
    });
  }
  // Both publish and end the step; true when it is decided.
  bool TakeStep(const std::vector<RawSession*>& ranks) {
    for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
      ranks[rank]->Publish(ranks[rank]->Gradient());
      const grpc::Status ended = ranks[rank]->EndStep(ranks[rank]->MakeEndStep());
      EXPECT_TRUE(ended.ok()) << ended.error_message();
    }
    return ranks[0]->AwaitCommitted(ranks[0]->joined().next_step());
  }

  DaemonProcess daemon_;
  std::vector<std::unique_ptr<RawSession>> ranks_;
};

// What a rank published goes with it: neither the daemon nor the sum may miss it.
TEST_F(LeaverCases, ClosesInTheMiddleOfAStepAndComesBack) {
  StartRanks("amid", 2);
  ranks_[0]->Publish(ranks_[0]->Gradient());
  EXPECT_TRUE(ranks_[0]->EndStep(ranks_[0]->MakeEndStep()).ok());  // and has read the gradient
  EXPECT_TRUE(ranks_[0]->Close().ok());
  ranks_[0].reset();
  ASSERT_TRUE(daemon_.AwaitLog("rank 0 closed in the middle of a step"));
  std::unique_ptr<RawSession> back = Successor("amid", 0, 2);
  ranks_[1]->Publish(ranks_[1]->Gradient());  // of the generation that is over
  EXPECT_TRUE(ranks_[1]->AwaitReleased(1));
  auto first = JoinSoon(back.get()), second = JoinSoon(ranks_[1].get());
  EXPECT_TRUE(first.get().ok());
  EXPECT_TRUE(second.get().ok());
  EXPECT_EQ(back->joined().next_step(), 1u);
  EXPECT_TRUE(TakeStep({back.get(), ranks_[1].get()}));
  EXPECT_EQ(daemon_.Job("amid").applied(), 1u);
  EXPECT_EQ(daemon_.Job("amid").recomputed_steps(), 1u);
}

TEST_F(LeaverCases, SuccessorOfAClosedRankEndsTheRunningGroup) {
  StartRanks("successor", 2);
  EXPECT_TRUE(ranks_[0]->Close().ok());
  ranks_[0].reset();
  std::unique_ptr<RawSession> back = Successor("successor", 0, 2);
  auto first = JoinSoon(back.get());
  ASSERT_TRUE(daemon_.AwaitLog("rank 0 came back"));
  EXPECT_EQ(ranks_[1]->EndStep(ranks_[1]->MakeEndStep()).error_code(), grpc::StatusCode::ABORTED);
  auto second = JoinSoon(ranks_[1].get());
  EXPECT_TRUE(first.get().ok());
  EXPECT_TRUE(second.get().ok());
  EXPECT_TRUE(TakeStep({back.get(), ranks_[1].get()}));
}

TEST_F(LeaverCases, ClosesRightAfterTheEndStepThatCompletesAStep) {
  StartRanks("last", 2);
  for (uint32_t rank : {1u, 0u}) {
    ranks_[rank]->Publish(ranks_[rank]->Gradient());
    EXPECT_TRUE(ranks_[rank]->EndStep(ranks_[rank]->MakeEndStep()).ok());
  }
  EXPECT_TRUE(ranks_[0]->Close().ok());
  EXPECT_TRUE(ranks_[1]->AwaitCommitted(1));
  EXPECT_EQ(daemon_.Job("last").recomputed_steps(), 0u);
}

// The hang-up and the new Open come by different ways.
TEST_F(LeaverCases, OpensAgainRightAfterItHungUp) {
  for (int i = 0; i < 100; ++i) {
    RawSession session(daemon_.socket());
    const grpc::Status opened = session.Open(session.MakeOpen("again", kElements, 0, 1));
    ASSERT_TRUE(opened.ok()) << i << ": " << opened.error_message();
  }
}

TEST_F(LeaverCases, OpensWhileTheJobOfThatNameIsRemoved) {
  for (int i = 0; i < 50; ++i) {
    RawSession session(daemon_.socket());
    session.Start("removed", kElements, 0, 1);
    auto removal =
        std::async(std::launch::async, [this] { return daemon_.DeleteJob("removed", true); });
    RawSession next(daemon_.socket());
    // Before the removal it finds the rank taken; later there is a fresh job.
    const grpc::Status opened = next.Open(next.MakeOpen("removed", kElements, 0, 1));
    EXPECT_TRUE(opened.ok() || opened.error_code() == grpc::StatusCode::ALREADY_EXISTS)
        << i << ": " << opened.error_message();
    EXPECT_TRUE(removal.get().ok());
  }
}

// Killed between Close and the end of its process, after all had closed: the launcher starts it
// again, and the others do not come back.
TEST_F(LeaverCases, RestartedAfterAllRanksHaveClosed) {
  StartRanks("closed", 2);
  for (auto& rank : ranks_) EXPECT_TRUE(rank->Close().ok());
  ranks_.clear();
  ASSERT_TRUE(daemon_.AwaitLog("all ranks have closed"));
  RawSession again(daemon_.socket());
  v1::OpenRequest request = again.MakeOpen("closed", kElements, 0, 2);
  request.set_restarted(true);
  ASSERT_TRUE(again.Open(request).ok());
  EXPECT_TRUE(JoinSoon(&again).get().ok());
  EXPECT_TRUE(again.Close().ok());
  // A new run waits for all of its ranks.
  std::unique_ptr<RawSession> first = Successor("closed", 0, 2);
  auto joined = JoinSoon(first.get());
  std::unique_ptr<RawSession> second = Successor("closed", 1, 2);
  while (second->Refusal().find("missing rank 1") == std::string::npos) {
    ASSERT_TRUE(daemon_.Alive());
  }
  EXPECT_TRUE(JoinSoon(second.get()).get().ok());
  EXPECT_TRUE(joined.get().ok());
  EXPECT_TRUE(TakeStep({first.get(), second.get()}));
  EXPECT_EQ(daemon_.Job("closed").regroups(), 2u);
}

TEST_F(LeaverCases, ClientClosesWithoutWaitingForTheDecision) {
  const JobOptions job = SmallJob("impatient", 2);
  ParameterSpec w;
  w.name = "w";
  w.shape = {100};
  std::promise<void> ended;
  ForEachRank(2, [&](uint32_t rank) {
    std::unique_ptr<Session> session = OpenRank(daemon_.socket(), rank, 2, job, {w});
    if (rank == 1) ended.get_future().wait();
    ASSERT_TRUE(GiveGrad(session.get(), DType::kFloat32, 0, rank, [](size_t, uint64_t) {
                  return 1.0f;
                }).ok());
    StepReport report;
    report.slots = {{1.0, 1}};
    const absl::Status status = session->EndStep(report);
    EXPECT_TRUE(status.ok()) << status;
    if (rank == 0) ended.set_value();
    EXPECT_TRUE(session->Close().ok());
  });
  EXPECT_EQ(daemon_.Job("impatient").committed_step(), 1u);
  EXPECT_EQ(daemon_.Job("impatient").recomputed_steps(), 0u);
}

// Ranks 0 and 1 form anew after a death; rank 2 has nothing more to do and closes.
TEST_F(LeaverCases, OthersThatWaitInJoinGoOnWhenTheLastOneCloses) {
  StartRanks("waiting", 3);
  ranks_[1].reset();
  ASSERT_TRUE(daemon_.AwaitLog("generation 2 begins"));
  auto first = JoinSoon(ranks_[0].get());
  std::unique_ptr<RawSession> back = Successor("waiting", 1, 3);
  auto second = JoinSoon(back.get());
  while (ranks_[2]->Refusal().find("missing rank 2") == std::string::npos) {
    ASSERT_TRUE(daemon_.Alive());
  }
  EXPECT_TRUE(ranks_[2]->Close().ok());
  EXPECT_TRUE(first.get().ok());
  EXPECT_TRUE(second.get().ok());
}

}  // namespace
}  // namespace shardd::test

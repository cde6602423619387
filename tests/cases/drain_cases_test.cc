// A daemon that is replaced in good order.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <thread>

#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"

namespace shardd::test {
namespace {

using Processes = std::vector<std::unique_ptr<RankProcess>>;

constexpr uint32_t kWorld = 3;

Processes StartRanks(const DaemonProcess& daemon) {
  Processes ranks;
  for (uint32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(std::make_unique<RankProcess>(daemon.socket(), r, kWorld,
                                                  std::vector<std::string>{"--job=toy"}));
  }
  return ranks;
}

std::string Finish(Processes* ranks) {
  std::string digest;
  for (auto& rank : *ranks) {
    const std::string done = rank->AwaitLine("done");
    EXPECT_NE(done, "");
    EXPECT_EQ(rank->Wait(), 0);
    if (digest.empty()) digest = done;
    EXPECT_EQ(done, digest);
  }
  return digest;
}

class DrainCases : public testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> StartDaemon() {
    DaemonProcess::Options options;
    options.state_directory = state_.path() + "/state";
    return std::make_unique<DaemonProcess>(options);
  }
  std::string Undisturbed() {
    DaemonProcess daemon;
    Processes ranks = StartRanks(daemon);
    return Finish(&ranks);
  }

  TempDir state_{"/dev/shm"};
};

TEST_F(DrainCases, TheStepThatIsBeingTakenIsFinished) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitFailpoint("step.decide.before");
  v1::DrainReply drained;
  std::thread drain([&] { drained = daemon->Drain(60); });
  daemon->ReleaseFailpoint("step.decide.before");
  drain.join();
  ASSERT_EQ(drained.jobs_size(), 1);
  EXPECT_TRUE(drained.jobs(0).between_steps());
  EXPECT_GE(drained.jobs(0).committed_step(), 3u);
  const int status = daemon->AwaitDeath();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  ranks.clear();

  daemon = StartDaemon();
  const v1::ServerInfoReply info = daemon->Info();
  EXPECT_EQ(info.adopted_jobs(), 1u);
  EXPECT_GT(info.down_seconds(), 0);
  EXPECT_EQ(daemon->Job("toy").committed_step(), drained.jobs(0).committed_step());
  EXPECT_EQ(daemon->Job("toy").recomputed_steps(), 0u);
  ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks), expected);
}

TEST_F(DrainCases, AStepThatDoesNotEndIsComputedAgain) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  Processes ranks = StartRanks(*daemon);
  for (auto& rank : ranks) ASSERT_NE(rank->AwaitLine("step 1"), "");
  ranks[1]->Signal(SIGSTOP);
  // The others have ended the step that rank 1 does not take.
  while (daemon->Job("toy").committed_step() == 0) {
  }
  const v1::DrainReply drained = daemon->Drain(0.3);
  ASSERT_EQ(drained.jobs_size(), 1);
  const uint64_t step = drained.jobs(0).committed_step();
  EXPECT_TRUE(WIFEXITED(daemon->AwaitDeath()));
  ranks.clear();
  daemon = StartDaemon();
  EXPECT_EQ(daemon->Job("toy").committed_step(), step);
  ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks), expected);
}

TEST_F(DrainCases, WhoOpensAJobMeanwhileWaitsForTheSuccessor) {
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitFailpoint("step.decide.before");
  std::thread drain([&] { daemon->Drain(60); });
  ASSERT_TRUE(daemon->AwaitLog("is being drained"));
  RankProcess hasty(daemon->socket(), 0, 1, {"--job=hasty", "--reconnect=0"});
  EXPECT_NE(hasty.AwaitLine("error UNAVAILABLE"), "");
  RankProcess patient(daemon->socket(), 0, 1, {"--job=patient"});
  daemon->ReleaseFailpoint("step.decide.before");
  drain.join();
  EXPECT_TRUE(WIFEXITED(daemon->AwaitDeath()));
  DaemonProcess::Options options;
  options.state_directory = state_.path() + "/state";
  options.socket = daemon->socket();
  const DaemonProcess successor(options);
  EXPECT_NE(patient.AwaitLine("done"), "");
  EXPECT_NE(Finish(&ranks), "");
}

}  // namespace
}  // namespace shardd::test

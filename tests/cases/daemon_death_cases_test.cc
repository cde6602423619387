// A daemon that dies, wherever it is, and the one that takes up what it left.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"
#include "tests/support/ranks.h"

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

std::string Undisturbed() {
  DaemonProcess daemon;
  Processes ranks = StartRanks(daemon);
  return Finish(&ranks);
}

class DaemonDeathCases : public testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> StartDaemon() {
    DaemonProcess::Options options;
    options.state_directory = state_.path() + "/state";
    return std::make_unique<DaemonProcess>(options);
  }

  // Kills the daemon at `point` after `skip` passes, starts another one on its state and lets
  // new ranks finish: the bits are those of the undisturbed run.
  void KillAt(const std::string& point, uint32_t skip) {
    const std::string expected = Undisturbed();
    auto daemon = StartDaemon();
    daemon->ArmFailpoint(point, "kill", skip);
    Processes ranks = StartRanks(*daemon);
    EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
    for (auto& rank : ranks) {
      EXPECT_NE(rank->AwaitLine("error UNAVAILABLE"), "");
      EXPECT_NE(rank->Wait(), 0);
    }
    daemon = StartDaemon();
    EXPECT_NE(daemon->Log().find("job toy: adopted at step"), std::string::npos) << daemon->Log();
    ranks = StartRanks(*daemon);
    EXPECT_EQ(Finish(&ranks), expected);
    EXPECT_EQ(daemon->Job("toy").committed_step(), 5u);
    EXPECT_EQ(daemon->Job("toy").applied(), 5u);
  }

  TempDir state_{"/dev/shm"};
};

// Three ranks with four slots: 12 descriptors, 4 buckets and 4 chunks a step.
TEST_F(DaemonDeathCases, WhilePublishing) { KillAt("step.publish.after_descriptor", 29); }
TEST_F(DaemonDeathCases, BeforeABucketIsSummed) { KillAt("step.reduce.before", 9); }
TEST_F(DaemonDeathCases, AfterABucketIsSummed) { KillAt("step.reduce.after", 10); }
TEST_F(DaemonDeathCases, BeforeTheDecision) { KillAt("step.decide.before", 2); }
TEST_F(DaemonDeathCases, AfterTheDecisionIsRecorded) { KillAt("step.decide.after_record", 2); }
TEST_F(DaemonDeathCases, BeforeTheUpdate) { KillAt("step.update.before", 2); }
TEST_F(DaemonDeathCases, InTheMiddleOfTheUpdate) { KillAt("step.update.after_chunk", 9); }
TEST_F(DaemonDeathCases, AfterTheUpdate) { KillAt("step.update.after", 2); }
TEST_F(DaemonDeathCases, WhenAGroupHasFormedAfterTheFirstStep) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitFailpoint("step.decide.before");
  ranks[1]->Signal(SIGKILL);
  ranks[1]->Wait();
  daemon->ArmFailpoint("session.join.before_reply", "kill");
  daemon->ReleaseFailpoint("step.decide.before");
  ASSERT_TRUE(daemon->AwaitLog("generation 2 begins"));
  ranks[1] = std::make_unique<RankProcess>(daemon->socket(), 1, kWorld,
                                           std::vector<std::string>{"--job=toy"});
  EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
  for (auto& rank : ranks) rank->Wait();
  daemon = StartDaemon();
  ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks), expected);
}

TEST_F(DaemonDeathCases, DuringRecoveryItselfTwice) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.update.after_chunk", "kill", 8);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitDeath();
  for (auto& rank : ranks) rank->Wait();
  for (int i = 0; i < 2; ++i) {
    // Killed between mending and redoing; such a daemon never gets to listen.
    const TempDir dir;
    const std::string command = Runfile("server/shardd") + " --listen.socket=" + dir.path() +
                                "/d.sock --store.directory=" + state_.path() +
                                "/state --arm_failpoint=recover.after_mend:kill 2>/dev/null";
    const int status = std::system(command.c_str());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGKILL) << status;
  }
  daemon = StartDaemon();
  ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks), expected);
}

TEST_F(DaemonDeathCases, KilledAtRandomMoments) {
  const std::string expected = Undisturbed();
  unsigned random = 4711;
  int killed = 0;
  for (int round = 0; round < 25; ++round) {
    auto daemon = StartDaemon();
    Processes ranks = StartRanks(*daemon);
    // Some work of the ranks' own measures the time to the kill: any moment will do.
    ASSERT_NE(ranks[0]->AwaitLine("open"), "");
    random = random * 1664525 + 1013904223;
    volatile unsigned sink = 0;
    for (unsigned spin = 0; spin < random % 30'000'000; ++spin) sink = sink + spin;
    kill(daemon->pid(), SIGKILL);
    daemon->AwaitDeath();
    ++killed;
    for (auto& rank : ranks) rank->Wait();
  }
  auto daemon = StartDaemon();
  Processes ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks), expected);
  EXPECT_EQ(killed, 25);
}

TEST_F(DaemonDeathCases, OrderlyRestartLosesNothing) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  Processes ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks), expected);
  EXPECT_EQ(daemon->Stop(), 0);
  daemon = StartDaemon();
  EXPECT_NE(daemon->Log().find("adopted at step 5"), std::string::npos) << daemon->Log();
  EXPECT_NE(daemon->Log().find("0 of 4 chunks were redone"), std::string::npos) << daemon->Log();
  ranks = StartRanks(*daemon);  // they have nothing left to do
  EXPECT_EQ(Finish(&ranks), expected);
}

TEST_F(DaemonDeathCases, DamagedStateIsNamedAndLeftUntouched) {
  auto daemon = StartDaemon();
  Processes ranks = StartRanks(*daemon);
  Finish(&ranks);
  EXPECT_EQ(daemon->Stop(), 0);
  const std::string state = state_.path() + "/state/jobs/toy/state";
  {
    std::fstream file(state, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(24);
    file.put('\x5a');
  }
  daemon = StartDaemon();
  EXPECT_NE(daemon->Log().find("has a damaged header at chunk 0"), std::string::npos)
      << daemon->Log();
  EXPECT_TRUE(std::filesystem::exists(state));
  // Its name is not free, and says why; other jobs are served.
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  const auto refused = Session::Open(RankOptions(daemon->socket(), 0, 1), SmallJob("toy", 1), {w});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  auto other = OpenRank(daemon->socket(), 0, 1, SmallJob("other", 1), {w});
  EXPECT_TRUE(other->Close().ok());
}

}  // namespace
}  // namespace shardd::test

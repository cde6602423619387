// A daemon that dies, wherever it is, and the one that takes up what it left.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "absl/time/clock.h"
#include "proto/contract/attach.h"
#include "proto/contract/fd_passing.h"
#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

using Processes = std::vector<std::unique_ptr<RankProcess>>;

constexpr uint32_t kWorld = 3;

Processes StartRanks(const DaemonProcess& daemon, std::vector<std::string> flags = {}) {
  flags.push_back("--job=toy");
  Processes ranks;
  for (uint32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(std::make_unique<RankProcess>(daemon.socket(), r, kWorld, flags));
  }
  return ranks;
}

// What the ranks printed until the end, which is a good one.
struct Ending {
  std::string digest;                        // the same on all ranks
  std::vector<std::vector<uint64_t>> steps;  // by rank: as decided, in the order they were told
  std::vector<int> reattached;               // by rank: how often
};

Ending Finish(Processes* ranks) {
  Ending ending;
  for (auto& rank : *ranks) {
    std::string done;
    ending.steps.emplace_back();
    ending.reattached.push_back(0);
    for (std::string line = rank->AwaitLine(""); !line.empty(); line = rank->AwaitLine("")) {
      if (line.starts_with("step ")) ending.steps.back().push_back(std::stoull(line.substr(5)));
      if (line.starts_with("log re-attached")) ++ending.reattached.back();
      if (line.starts_with("done ")) done = line;
      EXPECT_FALSE(line.starts_with("error")) << line;
    }
    EXPECT_NE(done, "");
    EXPECT_EQ(rank->Wait(), 0);
    if (ending.digest.empty()) ending.digest = done;
    EXPECT_EQ(done, ending.digest);
  }
  return ending;
}

std::string Undisturbed(const std::vector<std::string>& flags = {}) {
  DaemonProcess daemon;
  Processes ranks = StartRanks(daemon, flags);
  return Finish(&ranks).digest;
}

class DaemonDeathCases : public testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> StartDaemon(const std::string& state = "/state") {
    DaemonProcess::Options options;
    options.state_directory = state_.path() + state;
    options.socket = run_.path() + "/d.sock";
    return std::make_unique<DaemonProcess>(options);
  }

  // The ranks ran through a death of their daemon on their own: nobody was told a step twice,
  // none is missing, and the bits are those of the undisturbed run.
  void ExpectCarriedOn(Processes* ranks, const std::string& expected, int deaths = 1) {
    const Ending ending = Finish(ranks);
    EXPECT_EQ(ending.digest, expected);
    for (uint32_t r = 0; r < kWorld; ++r) {
      EXPECT_EQ(ending.steps[r], (std::vector<uint64_t>{1, 2, 3, 4, 5})) << "rank " << r;
      EXPECT_EQ(ending.reattached[r], deaths) << "rank " << r;
    }
  }

  // Kills the daemon at `point` after `skip` passes and starts another one in its place.
  void KillAt(const std::string& point, uint32_t skip) {
    const std::string expected = Undisturbed();
    auto daemon = StartDaemon();
    daemon->ArmFailpoint(point, "kill", skip);
    Processes ranks = StartRanks(*daemon);
    EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
    daemon = StartDaemon();
    EXPECT_NE(daemon->Log().find("job toy: adopted at step"), std::string::npos) << daemon->Log();
    ExpectCarriedOn(&ranks, expected);
    EXPECT_EQ(daemon->Job("toy").committed_step(), 5u);
    EXPECT_EQ(daemon->Job("toy").applied(), 5u);
  }

  // A daemon that is killed between mending and redoing; it never gets to listen.
  void DieInRecovery() {
    const std::string command = Runfile("server/shardd") + " --listen.socket=" + run_.path() +
                                "/d.sock --store.directory=" + state_.path() +
                                "/state --arm_failpoint=recover.after_mend:kill 2>/dev/null";
    const int status = std::system(command.c_str());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGKILL) << status;
  }

  TempDir state_{"/dev/shm"};
  TempDir run_{"/tmp"};
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
// The last step: nobody has anything left to compute with the next daemon.
TEST_F(DaemonDeathCases, AfterTheLastDecisionIsRecorded) { KillAt("step.decide.after_record", 4); }
TEST_F(DaemonDeathCases, BeforeTheLastUpdate) { KillAt("step.update.before", 4); }

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
  daemon = StartDaemon();
  EXPECT_EQ(Finish(&ranks).digest, expected);
}

TEST_F(DaemonDeathCases, DuringRecoveryItselfTwice) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.update.after_chunk", "kill", 8);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitDeath();
  for (int i = 0; i < 2; ++i) DieInRecovery();
  daemon = StartDaemon();
  ExpectCarriedOn(&ranks, expected);
}

TEST_F(DaemonDeathCases, KilledAtRandomMoments) {
  const std::vector<std::string> steps = {"--steps=500"};
  const std::string expected = Undisturbed(steps);
  auto daemon = StartDaemon();
  Processes ranks = StartRanks(*daemon, steps);
  unsigned random = 4711;
  for (int round = 0; round < 25; ++round) {
    // Some work of the ranks' own measures the time to the kill: any moment will do.
    ASSERT_NE(ranks[0]->AwaitLine("step"), "") << "they had ended before kill " << round;
    random = random * 1664525 + 1013904223;
    volatile unsigned sink = 0;
    for (unsigned spin = 0; spin < random % 10'000'000; ++spin) sink = sink + spin;
    kill(daemon->pid(), SIGKILL);
    daemon->AwaitDeath();
    daemon = StartDaemon();
  }
  EXPECT_EQ(Finish(&ranks).digest, expected);
  EXPECT_EQ(daemon->Job("toy").committed_step(), 500u);
  EXPECT_EQ(daemon->Job("toy").applied(), 500u);
}

TEST_F(DaemonDeathCases, InTheMiddleOfAnUpload) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  // Rank 2 stops before its part; the others have uploaded theirs or are about to.
  Processes ranks;
  for (uint32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(std::make_unique<RankProcess>(
        daemon->socket(), r, kWorld,
        std::vector<std::string>{"--job=upload", r == 2 ? "--stop=uploading" : "--stop="}));
  }
  ASSERT_NE(ranks[2]->AwaitLine("uploading"), "");
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  daemon = StartDaemon();
  EXPECT_NE(daemon->Log().find("job upload: never had all of its weights"), std::string::npos)
      << daemon->Log();
  ranks[2]->Signal(SIGCONT);
  ExpectCarriedOn(&ranks, expected);
}

TEST_F(DaemonDeathCases, ADaemonThatDoesNotComeBackIsNamed) {
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.decide.before", "kill", 2);
  Processes ranks = StartRanks(*daemon, {"--reconnect=0.5"});
  const std::string socket = daemon->socket();
  daemon->AwaitDeath();
  const absl::Time died = absl::Now();
  for (auto& rank : ranks) {
    const std::string error = rank->AwaitLine("error UNAVAILABLE");
    EXPECT_NE(error.find(socket + " did not come back within 500ms"), std::string::npos) << error;
    EXPECT_NE(error.find("start shardd there with the same state directory"), std::string::npos);
    EXPECT_NE(rank->Wait(), 0);
  }
  EXPECT_LT(absl::Now() - died, absl::Seconds(20));
}

// One that does not wait is started again by whoever minds it.
TEST_F(DaemonDeathCases, RanksThatDoNotWaitAreStartedAgain) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.update.before", "kill", 2);
  Processes ranks = StartRanks(*daemon, {"--reconnect=0"});
  daemon->AwaitDeath();
  for (auto& rank : ranks) {
    EXPECT_NE(rank->AwaitLine("error UNAVAILABLE"), "");
    EXPECT_NE(rank->Wait(), 0);
  }
  daemon = StartDaemon();
  ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks).digest, expected);
}

TEST_F(DaemonDeathCases, ADaemonWithoutTheJobIsRefused) {
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.decide.before", "kill", 2);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitDeath();
  daemon = StartDaemon("/another");
  for (auto& rank : ranks) {
    const std::string error = rank->AwaitLine("error FAILED_PRECONDITION");
    EXPECT_NE(error.find("came back without job 'toy'"), std::string::npos) << error;
    EXPECT_NE(rank->Wait(), 0);
  }
}

TEST_F(DaemonDeathCases, AnotherTimelineIsRefused) {
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitFailpoint("step.decide.before");
  for (auto& rank : ranks) rank->Signal(SIGSTOP);
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  // A job of the same name and form, but trained by others.
  daemon = StartDaemon("/another");
  Processes others = StartRanks(*daemon);
  const std::string digest = Finish(&others).digest;
  for (auto& rank : ranks) rank->Signal(SIGCONT);
  for (auto& rank : ranks) {
    const std::string error = rank->AwaitLine("error FAILED_PRECONDITION");
    EXPECT_NE(error.find("came back with another job 'toy'"), std::string::npos) << error;
    EXPECT_NE(rank->Wait(), 0);
  }
  EXPECT_EQ(daemon->Job("toy").committed_step(), 5u);
  EXPECT_NE(digest, "");
}

// The process that listens there.
pid_t ListenerOf(const std::string& socket) {
  absl::StatusOr<contract::UniqueFd> fd =
      contract::ConnectUnix(socket + contract::kAttachSuffix, SOCK_SEQPACKET);
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (!fd.ok() || getsockopt(fd->get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return 0;
  return peer.pid;
}

// A rank alone, whose daemon nobody else minds.
TEST_F(DaemonDeathCases, APrivateDaemonIsStartedAgainByItsRank) {
  std::string expected;
  const std::string steps = "--steps=300";
  {
    DaemonProcess daemon;
    RankProcess rank(daemon.socket(), 0, 1, {"--job=toy", steps});
    expected = rank.AwaitLine("done");
    EXPECT_EQ(rank.Wait(), 0);
  }
  const std::string job = "toy-" + std::to_string(getpid());
  RankProcess rank("", 0, 1,
                   {"--job=" + job, steps, "--daemon_binary=" + Runfile("server/shardd")});
  ASSERT_NE(rank.AwaitLine("step 1"), "");
  const std::string user = "/shardd-" + std::to_string(geteuid()) + "-private/" + job;
  const pid_t daemon = ListenerOf("/tmp" + user + "/shardd.sock");
  ASSERT_GT(daemon, 0);
  kill(daemon, SIGKILL);
  EXPECT_NE(rank.AwaitLine("log re-attached"), "");
  EXPECT_EQ(rank.AwaitLine("done"), expected);
  EXPECT_EQ(rank.Wait(), 0);
  EXPECT_EQ(ListenerOf("/tmp" + user + "/shardd.sock"), 0) << "Close ended it";
  std::filesystem::remove_all("/tmp" + user);
  std::filesystem::remove_all("/dev/shm" + user);
}

TEST_F(DaemonDeathCases, AFrozenDaemonIsNotADeadOne) {
  const std::vector<std::string> steps = {"--steps=300"};
  const std::string expected = Undisturbed(steps);
  auto daemon = StartDaemon();
  Processes ranks = StartRanks(*daemon, steps);
  ASSERT_NE(ranks[0]->AwaitLine("step 1"), "");
  kill(daemon->pid(), SIGSTOP);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(daemon->pid()), &info, WSTOPPED), 0);
  // Ranks look whether it lives twenty times a second.
  EXPECT_FALSE(daemon->AnswersWithin(1.0));
  kill(daemon->pid(), SIGCONT);
  const Ending ending = Finish(&ranks);
  EXPECT_EQ(ending.digest, expected);
  EXPECT_EQ(ending.reattached, std::vector<int>(kWorld, 0));
  EXPECT_EQ(daemon->Job("toy").regroups(), 1u) << "that all have closed";
}

TEST_F(DaemonDeathCases, OneThatIsDrainedForAnUpgrade) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitFailpoint("step.decide.before");
  std::thread drain([&] { daemon->Drain(60); });
  ASSERT_TRUE(daemon->AwaitLog("is being drained"));
  daemon->ReleaseFailpoint("step.decide.before");
  drain.join();
  EXPECT_TRUE(WIFEXITED(daemon->AwaitDeath()));
  daemon = StartDaemon();
  ExpectCarriedOn(&ranks, expected);
}

TEST_F(DaemonDeathCases, OrderlyRestartLosesNothing) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  Processes ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks).digest, expected);
  EXPECT_EQ(daemon->Stop(), 0);
  daemon = StartDaemon();
  EXPECT_NE(daemon->Log().find("adopted at step 5"), std::string::npos) << daemon->Log();
  EXPECT_NE(daemon->Log().find("0 of 4 chunks were redone"), std::string::npos) << daemon->Log();
  ranks = StartRanks(*daemon);  // they have nothing left to do
  EXPECT_EQ(Finish(&ranks).digest, expected);
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

// Ranks that die, stop, come back or never come.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <memory>
#include <thread>

#include "absl/time/clock.h"
#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

using Processes = std::vector<std::unique_ptr<RankProcess>>;

std::unique_ptr<RankProcess> StartRank(const DaemonProcess& daemon, uint32_t rank, uint32_t world,
                                       std::vector<std::string> flags = {"--job=toy"}) {
  return std::make_unique<RankProcess>(daemon.socket(), rank, world, std::move(flags));
}

// Lets all ranks finish; they must agree, and their state is returned as a digest.
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

// The digest of an undisturbed run of 5 steps.
std::string Undisturbed(uint32_t world) {
  DaemonProcess daemon;
  Processes ranks;
  for (uint32_t r = 0; r < world; ++r) ranks.push_back(StartRank(daemon, r, world));
  const std::string digest = Finish(&ranks);
  EXPECT_EQ(daemon.Job("toy").committed_step(), 5u);
  EXPECT_EQ(daemon.Job("toy").recomputed_steps(), 0u);
  return digest;
}

// What three ranks with four slots pass in one step: 4 buckets of 3 nodes, 4 chunks.
constexpr uint32_t kDescriptors = 12;
constexpr uint32_t kBuckets = 4;
constexpr uint32_t kChunks = 4;

// Kills `victim` while the daemon is held at `failpoint`, which it has passed `skip` times,
// starts it again and lets all finish.
void KillAt(const std::string& failpoint, uint32_t skip, uint32_t victim) {
  const std::string expected = Undisturbed(3);
  DaemonProcess daemon;
  daemon.ArmFailpoint(failpoint, "wait", skip);
  Processes ranks;
  for (uint32_t r = 0; r < 3; ++r) ranks.push_back(StartRank(daemon, r, 3));
  daemon.AwaitFailpoint(failpoint);
  ranks[victim]->Signal(SIGKILL);
  EXPECT_TRUE(WIFSIGNALED(ranks[victim]->Wait()));
  daemon.ReleaseFailpoint(failpoint);
  ASSERT_TRUE(daemon.AwaitLog("generation 2 begins"));
  ranks[victim] = StartRank(daemon, victim, 3);
  EXPECT_NE(ranks[(victim + 1) % 3]->AwaitLine("regrouped"), "");
  EXPECT_EQ(Finish(&ranks), expected);
  const v1::JobStatus job = daemon.Job("toy");
  EXPECT_EQ(job.committed_step(), 5u);
  EXPECT_EQ(job.applied(), 5u);
  EXPECT_LE(job.recomputed_steps(), 1u);  // at most one step per kill
}

TEST(GroupCases, RankKilledWhilePublishing) {
  KillAt("step.publish.after_descriptor", 2 * kDescriptors + 4, 1);
}
TEST(GroupCases, RankKilledWhileABucketIsSummed) {
  KillAt("step.reduce.before", 2 * kBuckets + 1, 2);
}
TEST(GroupCases, RankKilledBeforeTheDecision) { KillAt("step.decide.before", 2, 1); }
TEST(GroupCases, RankKilledWhileUpdating) { KillAt("step.update.after_chunk", 2 * kChunks + 1, 2); }

TEST(GroupCases, Rank0KilledBetweenDecisionAndTheReadingOfItsAnswer) {
  const std::string expected = Undisturbed(3);
  DaemonProcess daemon;
  daemon.ArmFailpoint("step.decide.after_record", "wait", 2);
  Processes ranks;
  for (uint32_t r = 0; r < 3; ++r) ranks.push_back(StartRank(daemon, r, 3));
  daemon.AwaitFailpoint("step.decide.after_record");
  ranks[0]->Signal(SIGKILL);
  ranks[0]->Wait();
  daemon.ReleaseFailpoint("step.decide.after_record");
  ranks[0] = StartRank(daemon, 0, 3);
  // The recorded step is not computed again: toy_rank checks the blob, and goes on after it.
  const std::string open = ranks[0]->AwaitLine("open");
  ASSERT_NE(open, "");
  EXPECT_GE(std::stoi(open.substr(5)), 3);
  EXPECT_EQ(Finish(&ranks), expected);
  // Only what the others had begun of the step after it may have been computed again.
  EXPECT_LE(daemon.Job("toy").recomputed_steps(), 1u);
  // Its metrics can be completed: every step once, in order.
  ParameterSpec a, b, c;
  a.name = "a", a.shape = {5000};
  b.name = "b", b.shape = {100, 100};
  c.name = "c", c.shape = {7};
  JobOptions job = SmallJob("toy", 4);
  job.groups[0].beta1 = 0.9;
  auto session = Session::Open(RankOptions(daemon.socket(), 0, 1), job, {a, b, c});
  ASSERT_TRUE(session.ok()) << session.status();
  const auto records = (*session)->StepRecords(1);
  ASSERT_TRUE(records.ok());
  ASSERT_EQ(records->size(), 5u);
  for (uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ((*records)[i].step, i + 1);
    EXPECT_EQ((*records)[i].applied, i + 1);
    EXPECT_DOUBLE_EQ((*records)[i].loss, static_cast<double>(i + 1) + 1.5);
  }
}

TEST(GroupCases, OthersAreToldWithinTwoHeartbeats) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("told", 2);
  job.heartbeat = absl::Seconds(1);
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  auto victim = std::make_unique<RankProcess>(daemon.socket(), 1, 2,
                                              std::vector<std::string>{"--job=told2", "--slots=2"});
  auto other = std::make_unique<RankProcess>(
      daemon.socket(), 0, 2,
      std::vector<std::string>{"--job=told2", "--slots=2", "--steps=1000000"});
  ASSERT_NE(victim->AwaitLine("step 1"), "");
  victim->Signal(SIGKILL);
  victim->Wait();
  const absl::Time start = absl::Now();
  ASSERT_TRUE(daemon.AwaitLog("rank 1 (pid"));
  ASSERT_TRUE(daemon.AwaitLog("generation 2 begins"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));  // two heartbeats
}

// Rank 0 has more to do at the end than the others (export, evaluation). When it dies there, it
// can come back although they have left.
TEST(GroupCases, RankThatDiesAfterTheOthersHaveFinishedComesBackAlone) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("late", 2);
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  const auto ones = [](uint32_t, size_t, uint64_t) { return 1.0f; };
  ForEachRank(2, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 2, job, {w});
    ASSERT_TRUE(TakeStep(session.get(), DType::kFloat32, ones).ok());
    if (rank == 1) EXPECT_TRUE(session->Close().ok());
    if (rank == 0) ASSERT_TRUE(daemon.AwaitLog("rank 1 (pid"));
    session.reset();  // rank 0: without Close, as a process that died
  });
  auto again = OpenRank(daemon.socket(), 0, 2, job, {w});
  EXPECT_EQ(again->next_step(), 2u);
  EXPECT_TRUE(again->WaitWeights(0).ok());
  // But it cannot train on alone: the group waits for rank 1 then.
  std::thread rank1;
  const auto step = TakeStep(again.get(), DType::kFloat32, [&](uint32_t, size_t, uint64_t) {
    if (!rank1.joinable()) {
      rank1 = std::thread([&] {
        auto session = OpenRank(daemon.socket(), 1, 2, job, {w});
        EXPECT_TRUE(TakeStep(session.get(), DType::kFloat32, ones).ok());
        EXPECT_TRUE(session->Close().ok());
      });
    }
    return 1.0f;
  });
  EXPECT_TRUE(GetRegrouped(step.status()).has_value()) << step.status();
  EXPECT_TRUE(TakeStep(again.get(), DType::kFloat32, ones).ok());
  rank1.join();
  EXPECT_TRUE(again->Close().ok());
}

TEST(GroupCases, OnlyOneOfTwoRanksStarts) {
  DaemonProcess daemon;
  JobOptions job = SmallJob("half", 2);
  job.join_timeout = absl::Seconds(1);
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  const auto session = Session::Open(RankOptions(daemon.socket(), 0, 2), job, {w});
  ASSERT_FALSE(session.ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(session.status())) << session.status();
  EXPECT_NE(session.status().message().find("missing rank 1"), absl::string_view::npos)
      << session.status();
}

TEST(GroupCases, RankHeldByALivingProcessIsRefusedToAnother) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("held", 1);
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  auto first = OpenRank(daemon.socket(), 0, 1, job, {w});
  const auto second = Session::Open(RankOptions(daemon.socket(), 0, 1), job, {w});
  ASSERT_FALSE(second.ok());
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_NE(second.status().message().find(std::to_string(getpid())), absl::string_view::npos);
  EXPECT_TRUE(
      TakeStep(first.get(), DType::kFloat32, [](uint32_t, size_t, uint64_t) { return 1.0f; }).ok());
  EXPECT_TRUE(first->Close().ok());
}

TEST(GroupCases, PausedRankThatComesBackAfterItsPlaceWasTakenIsRefused) {
  const std::string expected = Undisturbed(2);
  DaemonProcess daemon;
  const std::vector<std::string> flags = {"--job=toy", "--heartbeat=0.2"};
  daemon.ArmFailpoint("step.decide.before", "wait", 1);
  auto zero = StartRank(daemon, 0, 2, flags);
  auto paused = StartRank(daemon, 1, 2, flags);
  daemon.AwaitFailpoint("step.decide.before");
  paused->Signal(SIGSTOP);
  daemon.ReleaseFailpoint("step.decide.before");
  // Refused while its heartbeats have not lapsed, then let in: a supervisor would try again.
  std::unique_ptr<RankProcess> successor;
  for (int attempt = 0; attempt < 200; ++attempt) {
    successor = StartRank(daemon, 1, 2, flags);
    if (successor->AwaitLine("open") != "") break;
    successor->Wait();
  }
  ASSERT_TRUE(daemon.AwaitLog("taken over by another process"));
  paused->Signal(SIGCONT);
  EXPECT_NE(paused->AwaitLine("error ABORTED"), "");
  EXPECT_NE(paused->Wait(), 0);
  Processes ranks;
  ranks.push_back(std::move(zero));
  ranks.push_back(std::move(successor));
  EXPECT_EQ(Finish(&ranks), expected);
}

TEST(GroupCases, WorldSizeThatDiffersFromTheGroupsIsRefused) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("world", 4);
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  auto first = OpenRank(daemon.socket(), 0, 1, job, {w});
  const auto second = Session::Open(RankOptions(daemon.socket(), 1, 2), job, {w});
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
  EXPECT_TRUE(first->Close().ok());
  first.reset();
  // With nobody there, another number of ranks is fine.
  ForEachRank(2, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, 2, job, {w});
    EXPECT_TRUE(session->Close().ok());
  });
}

}  // namespace
}  // namespace shardd::test

// durability = peer: the machine of daemon a is lost with its disk. What is left of its job is the
// mirror that daemon b keeps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>

#include "absl/time/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int kSteps = 12;
constexpr size_t kA = 0, kB = 1;

std::vector<std::string> RankFlags(int steps = kSteps) {
  return {"--job=toy", "--durability=3", "--steps=" + std::to_string(steps)};
}

// The digest of the run that nothing disturbs, without a journal.
std::string Undisturbed(int steps = kSteps) {
  static std::map<int, std::string>* digests = new std::map<int, std::string>;
  std::string& digest = (*digests)[steps];
  if (digest.empty()) {
    DaemonProcess daemon;
    Processes ranks;
    for (uint32_t r = 0; r < 3; ++r) {
      ranks.push_back(std::make_unique<RankProcess>(
          daemon.socket(), r, 3,
          std::vector<std::string>{"--job=toy", "--steps=" + std::to_string(steps)}));
    }
    digest = FinishRanks(&ranks);
  }
  return digest;
}

class MirrorCases : public testing::Test {
 protected:
  static std::vector<std::string> Flags(std::vector<std::string> more = {}) {
    std::vector<std::string> flags = {
        "--journal.directory={own}/journal", "--journal.segment_bytes=262144",
        "--journal.log_bytes_max=400000", "--journal.mirror_seconds=2",
        "--journal.mirror_fetch_seconds=60"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  explicit MirrorCases(std::vector<std::string> more = {}) : cluster_(2, {}, Flags(more)) {}

  Processes Train(int steps = kSteps) {
    return StartRanks(&cluster_, {kA, kA, kA}, RankFlags(steps));
  }
  // Kills the ranks; the last step that one of them had seen committed.
  static uint64_t KillAndSee(Processes* ranks) {
    uint64_t seen = 0;
    for (auto& rank : *ranks) {
      rank->Signal(SIGKILL);
      for (std::string line = rank->AwaitLine("step "); !line.empty();
           line = rank->AwaitLine("step ")) {
        seen = std::max<uint64_t>(seen, std::stoul(line.substr(5)));
      }
      rank->Wait();
    }
    return seen;
  }
  void LoseA() {
    cluster_.Kill(kA);
    cluster_.LoseMachineAndDisk(kA);
  }
  // Daemon a on a new disk has all that was committed, and the run ends as if nothing had been.
  void ExpectNothingLost(uint64_t seen, int steps = kSteps) {
    cluster_.Start(kA);
    if (seen > 0) {
      ASSERT_TRUE(cluster_[kA].AwaitLog("recovered from its journal")) << Logs();
      Await([&] { return cluster_[kA].HasJob("toy"); });
      EXPECT_GE(cluster_[kA].Job("toy").committed_step(), seen) << Logs();
    }
    Processes ranks = Train(steps);
    EXPECT_EQ(FinishRanks(&ranks), Undisturbed(steps)) << Logs();
    EXPECT_EQ(cluster_[kA].Job("toy").committed_step(), static_cast<uint64_t>(steps));
    EXPECT_EQ(cluster_[kA].Job("toy").applied(), static_cast<uint64_t>(steps));
  }
  // Daemon a is killed at `point` after `skip` passes, and its disk is lost.
  void LoseAAt(const std::string& point, uint32_t skip) {
    SCOPED_TRACE(point);
    cluster_[kA].ArmFailpoint(point, "kill", skip);
    Processes ranks = Train();
    cluster_.AwaitDeath(kA);
    const uint64_t seen = KillAndSee(&ranks);
    cluster_.LoseMachineAndDisk(kA);
    ExpectNothingLost(seen);
  }
  // The mirror's daemon is killed there; a goes on when it is back, and then loses all.
  void KillBAt(const std::string& point, uint32_t skip) {
    SCOPED_TRACE(point);
    cluster_[kB].ArmFailpoint(point, "kill", skip);
    Processes ranks = Train();
    cluster_.AwaitDeath(kB);
    cluster_.Start(kB);
    EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
    LoseA();
    ExpectNothingLost(kSteps);
  }
  // Both at once: what was committed is on b's disk.
  void KillBAndLoseAAt(const std::string& point, uint32_t skip) {
    SCOPED_TRACE(point);
    cluster_[kB].ArmFailpoint(point, "kill", skip);
    Processes ranks = Train();
    cluster_.AwaitDeath(kB);
    cluster_.Kill(kA);
    const uint64_t seen = KillAndSee(&ranks);
    cluster_.LoseMachineAndDisk(kA);
    cluster_.Start(kB);
    ExpectNothingLost(seen);
  }
  void Await(const std::function<bool()>& done) {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (!done()) ASSERT_LT(absl::Now(), deadline) << Logs();
  }
  void AwaitMirror(const std::string& text) {
    Await([&] { return cluster_[kA].Job("toy").mirror_state().find(text) != std::string::npos; });
  }
  std::vector<std::string> Mirrored() const {
    std::vector<std::string> names;
    const std::string path = cluster_.own_directory(kB) + "/journal/.mirror/a";
    if (!fs::exists(path)) return names;
    for (const auto& entry : fs::directory_iterator(path)) names.push_back(entry.path().filename());
    return names;
  }
  size_t Notes() const {
    const std::string path = cluster_.own_directory(kA) + "/journal/.unmirror";
    return fs::exists(path) ? static_cast<size_t>(std::distance(fs::directory_iterator(path),
                                                                fs::directory_iterator()))
                            : 0;
  }
  std::string Logs() { return cluster_[kA].Log() + "\n--- b\n" + cluster_[kB].Log(); }

  Cluster cluster_;
};

// --- The machine of a is lost with its disk.

// Three ranks with four slots: 12 descriptors, 4 buckets and 4 chunks a step.
TEST_F(MirrorCases, WhilePublishing) { LoseAAt("step.publish.after_descriptor", 41); }
TEST_F(MirrorCases, AfterTheDecisionIsRecorded) { LoseAAt("step.decide.after_record", 4); }
TEST_F(MirrorCases, AfterARecordIsWritten) { LoseAAt("journal.append.after", 23); }
TEST_F(MirrorCases, WhileTheStepIsSynced) { LoseAAt("mirror.sync.before_wait", 9); }
TEST_F(MirrorCases, AfterTheStepIsSynced) { LoseAAt("journal.sync.after", 6); }
TEST_F(MirrorCases, InTheMiddleOfTheUpdate) { LoseAAt("step.update.after_chunk", 17); }
TEST_F(MirrorCases, InALaterSnapshot) { LoseAAt("journal.snapshot.after_chunk", 6); }
TEST_F(MirrorCases, BeforeTheManifestIsRenamed) { LoseAAt("journal.manifest.before_rename", 1); }
TEST_F(MirrorCases, AfterTheManifestIsRenamed) { LoseAAt("journal.manifest.after_rename", 1); }
TEST_F(MirrorCases, WhileTheFirstMirrorIsSent) { LoseAAt("mirror.copy.after_piece", 0); }

TEST_F(MirrorCases, AtRandomMomentsAgainAndAgain) {
  for (const int step : {2, 3, 5, 8, 11}) {
    Processes ranks = Train();
    ranks[0]->AwaitLine("step " + std::to_string(step));
    cluster_.Kill(kA);
    const uint64_t seen = KillAndSee(&ranks);
    EXPECT_GE(seen, static_cast<uint64_t>(step));
    cluster_.LoseMachineAndDisk(kA);
    cluster_.Start(kA);
    ASSERT_TRUE(cluster_[kA].AwaitLog("recovered from its journal")) << Logs();
    Await([&] { return cluster_[kA].HasJob("toy"); });
    EXPECT_GE(cluster_[kA].Job("toy").committed_step(), seen);
  }
  Processes ranks = Train();
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
}

TEST_F(MirrorCases, RanksThatLiveGoOnWithTheDaemonOnTheNewDisk) {
  Processes ranks = Train();
  ranks[0]->AwaitLine("step 4");
  LoseA();
  cluster_.Start(kA);
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
}

// --- While it is brought back.

TEST_F(MirrorCases, LostAgainWhileItIsFetched) {
  for (const std::string point : {"mirror.fetch.after_piece", "mirror.fetch.before_rename"}) {
    Processes ranks = Train(5);
    FinishRanks(&ranks);
    AwaitMirror("in step");
    LoseA();
    cluster_.Partition(kA);
    cluster_.Start(kA);
    cluster_[kA].ArmFailpoint(point, "kill");
    cluster_.Heal(kA);
    cluster_.AwaitDeath(kA);
    EXPECT_FALSE(fs::exists(cluster_.own_directory(kA) + "/journal/toy"));
    ExpectNothingLost(5, 5);
    EXPECT_TRUE(cluster_[kA].DeleteJob("toy", true).ok());
    Await([&] { return Notes() == 0; });
  }
}

TEST_F(MirrorCases, APeerThatIsReachedLateDoesNotCostTheJob) {
  Processes ranks = Train(5);
  FinishRanks(&ranks);
  AwaitMirror("in step");
  LoseA();
  cluster_.Partition(kA);
  cluster_.SetFlags(kA, {"--journal.mirror_fetch_seconds=1"});
  cluster_.Start(kA);
  // Who wants the job now learns that it cannot be had yet.
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  JobOptions job = SmallJob("toy", 1);
  job.durability = Durability::kPeer;
  SessionOptions options = RankOptions(cluster_[kA].socket(), 0, 1);
  options.reconnect_timeout = absl::ZeroDuration();
  const auto opened = Session::Open(options, job, {w});
  ASSERT_FALSE(opened.ok());
  EXPECT_THAT(std::string(opened.status().message()),
              HasSubstr("peer b, which may mirror it, is not reached"));
  cluster_.Kill(kA);
  cluster_.SetFlags(kA, {});
  cluster_.Start(kA);
  ranks = Train();
  cluster_.Heal(kA);
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
  EXPECT_THAT(cluster_[kA].Log(), HasSubstr("recovered from its journal"));
}

TEST_F(MirrorCases, AJobThatIsHereIsNotFetched) {
  Processes ranks = Train(5);
  FinishRanks(&ranks);
  AwaitMirror("in step");
  cluster_.Kill(kA);
  fs::remove_all(cluster_.state_directory(kA));  // the machine without its disk
  ExpectNothingLost(5);
  EXPECT_EQ(cluster_[kA].Log().find("fetched"), std::string::npos);
}

// --- The mirror's daemon.

TEST_F(MirrorCases, TheMirrorsDaemonDiesBeforeItSaysThatItHasSynced) {
  KillBAt("mirror.store.after_sync", 9);
}
TEST_F(MirrorCases, TheMirrorsDaemonDiesBeforeACopyCounts) {
  KillBAt("mirror.store.before_rename", 0);
}
TEST_F(MirrorCases, TheMirrorsDaemonDiesWhenACopyCounts) {
  KillBAt("mirror.store.after_rename", 0);
}
TEST_F(MirrorCases, BothDieAfterTheMirrorIsSynced) {
  KillBAndLoseAAt("mirror.store.after_sync", 12);
}

TEST_F(MirrorCases, BothDieWhileANewCopyTakesTheOldOnesPlace) {
  for (const std::string point : {"mirror.store.before_rename", "mirror.store.after_rename"}) {
    Processes ranks = Train(6);
    FinishRanks(&ranks);
    AwaitMirror("in step");
    cluster_[kB].ArmFailpoint(point, "kill");
    cluster_.Kill(kA);
    cluster_.Start(kA);  // takes up the job and sends a new copy
    cluster_.AwaitDeath(kB);
    LoseA();
    cluster_.Start(kB);
    ExpectNothingLost(6, 6);
    EXPECT_EQ(Mirrored().size(), 1u);
    EXPECT_TRUE(cluster_[kA].DeleteJob("toy", true).ok());
    Await([&] { return Notes() == 0; });
  }
}

TEST_F(MirrorCases, WithStopStepsWaitForTheMirrorsDaemon) {
  Processes ranks = Train();
  ranks[0]->AwaitLine("step 3");
  cluster_.Kill(kB);
  Await([&] { return cluster_[kA].Job("toy").journal_state() == "stalled"; });
  const v1::JobStatus job = cluster_[kA].Job("toy");
  EXPECT_EQ(job.mirror_peer(), "b");
  EXPECT_THAT(job.journal_failure(), HasSubstr("peer b"));
  EXPECT_THAT(job.mirror_state(), HasSubstr("behind: peer b"));
  EXPECT_THAT(job.crash_cost(), HasSubstr("machine with its disk: "));
  EXPECT_LT(job.committed_step(), static_cast<uint64_t>(kSteps));
  cluster_.Start(kB);
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
  EXPECT_EQ(cluster_[kA].Job("toy").mirror_step(), static_cast<uint64_t>(kSteps));
  EXPECT_EQ(cluster_[kA].Job("toy").mirror_state(), "in step");
  LoseA();
  ExpectNothingLost(kSteps);
}

class DegradingMirrorCases : public MirrorCases {
 protected:
  DegradingMirrorCases()
      : MirrorCases({"--journal.on_failure=degrade", "--journal.mirror_seconds=1"}) {}
};

TEST_F(DegradingMirrorCases, TheJobGoesOnWithoutTheMirrorsDaemon) {
  std::vector<std::string> flags = RankFlags();
  flags.push_back("--heartbeat=60");
  Processes ranks = StartRanks(&cluster_, {kA, kA, kA}, flags);
  ranks[0]->AwaitLine("step 3");
  ranks[0]->Signal(SIGSTOP);  // steps do not wait for the first copy here
  AwaitMirror("in step");
  cluster_.Kill(kB);
  ranks[0]->Signal(SIGCONT);
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
  AwaitMirror("behind: peer b");
  v1::JobStatus job = cluster_[kA].Job("toy");
  EXPECT_EQ(job.journal_state(), "whole");  // this machine's
  EXPECT_EQ(job.durable_step(), static_cast<uint64_t>(kSteps));
  EXPECT_LT(job.mirror_step(), static_cast<uint64_t>(kSteps));
  EXPECT_THAT(job.crash_cost(), HasSubstr("up to which peer b has the mirror"));
  cluster_.Start(kB);
  AwaitMirror("in step");
  job = cluster_[kA].Job("toy");
  EXPECT_EQ(job.mirror_step(), static_cast<uint64_t>(kSteps));
  EXPECT_THAT(job.crash_cost(), HasSubstr("from the mirror at peer b"));
  LoseA();
  ExpectNothingLost(kSteps);
}

TEST_F(MirrorCases, ADiskThatIsFullThereIsNamed) {
  cluster_.Kill(kB);
  cluster_.SetFlags(kB, {"--file_faults=*/.mirror/*:write:3+:enospc"});
  cluster_.Start(kB);
  Processes ranks = Train();
  Await([&] {
    return cluster_[kA].HasJob("toy") && cluster_[kA].Job("toy").journal_state() == "stalled";
  });
  const std::string failure = cluster_[kA].Job("toy").journal_failure();
  EXPECT_THAT(failure, HasSubstr("peer b"));
  EXPECT_THAT(cluster_[kA].Log(), HasSubstr(".mirror/a/toy@"));
  cluster_.Kill(kB);
  cluster_.SetFlags(kB, {});
  cluster_.Start(kB);
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
  LoseA();
  ExpectNothingLost(kSteps);
}

TEST_F(MirrorCases, APeerWithoutAJournalDirectoryIsNamed) {
  cluster_.Kill(kB);
  cluster_.SetFlags(kB, {"--journal.directory="});
  cluster_.Start(kB);
  Processes ranks = Train(5);
  Await([&] {
    return cluster_[kA].HasJob("toy") && cluster_[kA].Job("toy").journal_state() == "stalled";
  });
  AwaitMirror("daemon b keeps no journals");
  cluster_.Kill(kB);
  cluster_.SetFlags(kB, {});
  cluster_.Start(kB);
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed(5)) << Logs();
}

TEST_F(MirrorCases, TheNetworkFailsAndComesBack) {
  Processes ranks = Train();
  ranks[0]->AwaitLine("step 3");
  cluster_.Partition(kA);
  cluster_.Heal(kA);
  ranks[0]->AwaitLine("step 6");
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
  LoseA();
  ExpectNothingLost(kSteps);
}

// --- Deletion.

TEST_F(MirrorCases, ADeletedJobIsNotMirroredAndItsNameIsFree) {
  Processes ranks = Train(5);
  FinishRanks(&ranks);
  AwaitMirror("in step");
  EXPECT_EQ(Mirrored().size(), 1u);
  ASSERT_TRUE(cluster_[kA].DeleteJob("toy", true).ok());
  Await([&] { return Mirrored().empty() && Notes() == 0; });
  ranks = Train();
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
  LoseA();
  ExpectNothingLost(kSteps);
}

TEST_F(MirrorCases, DeletedWhileTheMirrorsDaemonIsDown) {
  Processes ranks = Train(5);
  FinishRanks(&ranks);
  AwaitMirror("in step");
  cluster_.Kill(kB);
  ASSERT_TRUE(cluster_[kA].DeleteJob("toy", true).ok());
  EXPECT_EQ(Notes(), 1u);
  cluster_.Kill(kA);
  cluster_.Start(kA);
  EXPECT_EQ(Mirrored().size(), 1u);
  cluster_.Start(kB);
  Await([&] { return Mirrored().empty() && Notes() == 0; });
  EXPECT_FALSE(cluster_[kA].HasJob("toy"));
  ranks = Train();
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << Logs();
}

TEST_F(MirrorCases, ADeletionThatTheDaemonDiesInLosesNothingThatIsLeft) {
  Processes ranks = Train(5);
  FinishRanks(&ranks);
  AwaitMirror("in step");
  cluster_[kA].ArmFailpoint("mirror.delete.after_note", "kill");
  EXPECT_FALSE(cluster_[kA].DeleteJob("toy", true).ok());
  cluster_.AwaitDeath(kA);
  cluster_.Start(kA);  // the job is still there
  Await([&] { return Notes() == 0; });
  AwaitMirror("in step");
  LoseA();
  ExpectNothingLost(5, 5);
}

}  // namespace
}  // namespace shardd::test

// One job of several daemons with durability = node: machines that die, and disks that fail.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "tests/support/cluster.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

constexpr size_t kCoordinator = 0, kOther = 1;
// Four slots: each daemon has 2 ranks, 8 descriptors, 2 chunks in 2 buckets a step. A sync for
// what is prepared, at the coordinator one with the decision, elsewhere one for the decision.
constexpr int kSteps = 12;

std::vector<std::string> Flags(const std::string& faults = "") {
  return {"--journal.directory={own}/journal", "--journal.segment_bytes=262144",
          "--journal.log_bytes_max=400000",
          "--file_faults=unsynced" + (faults.empty() ? "" : "," + faults)};
}

std::vector<std::string> RankFlags(int steps) {
  return {"--job=toy", "--steps=" + std::to_string(steps)};
}

const std::string& Undisturbed(int steps = kSteps) {
  static std::map<int, std::string>* digests = new std::map<int, std::string>;
  std::string& digest = (*digests)[steps];
  if (digest.empty()) {
    DaemonProcess daemon;
    Processes ranks;
    for (uint32_t r = 0; r < 4; ++r) {
      ranks.push_back(std::make_unique<RankProcess>(daemon.socket(), r, 4, RankFlags(steps)));
    }
    digest = FinishRanks(&ranks);
  }
  return digest;
}

class PeerMachineCases : public testing::Test {
 protected:
  // The ranks of daemon `i` die with their machine; the last step that one of them had seen.
  uint64_t KillRanksOf(size_t i) {
    uint64_t seen = 0;
    for (size_t r = 0; r < where_.size(); ++r) {
      if (where_[r] != i) continue;
      ranks_[r]->Signal(SIGKILL);
      for (std::string line = ranks_[r]->AwaitLine("step "); !line.empty();
           line = ranks_[r]->AwaitLine("step ")) {
        seen = std::max<uint64_t>(seen, std::stoul(line.substr(5)));
      }
      ranks_[r]->Wait();
    }
    return seen;
  }
  void StartRanksOf(size_t i) {
    for (uint32_t r = 0; r < where_.size(); ++r) {
      if (where_[r] != i) continue;
      ranks_[r] = std::make_unique<RankProcess>(
          cluster_[i].socket(), r, static_cast<uint32_t>(where_.size()), RankFlags(steps_));
    }
  }
  void Begin(const std::vector<size_t>& where, int steps = kSteps) {
    where_ = where;
    steps_ = steps;
    ranks_ = StartRanks(&cluster_, where, RankFlags(steps));
  }
  // After the death of daemon i: all that its machine had in memory goes, and it comes back. A
  // step that one of its ranks has seen is there at once.
  void MachineComesBack(size_t i, uint64_t seed = 0) {
    const uint64_t seen = KillRanksOf(i);
    cluster_.LoseMachine(i, "journal", seed);
    cluster_.Start(i);
    if (seen > 0) {
      ASSERT_TRUE(cluster_[i].HasJob("toy")) << cluster_[i].Log();
      EXPECT_GE(cluster_[i].Job("toy").committed_step(), seen) << cluster_[i].Log();
    }
    StartRanksOf(i);
  }
  void ExpectUndisturbed() {
    EXPECT_EQ(FinishRanks(&ranks_), Undisturbed(steps_)) << cluster_[0].Log() << "\n---\n"
                                                         << cluster_[1].Log();
    for (size_t i : {kCoordinator, kOther}) {
      const v1::JobStatus job = cluster_[i].Job("toy");
      EXPECT_EQ(job.committed_step(), static_cast<uint64_t>(steps_)) << "daemon " << i;
      EXPECT_EQ(job.applied(), static_cast<uint64_t>(steps_)) << "daemon " << i;
      EXPECT_EQ(job.durable_step(), static_cast<uint64_t>(steps_)) << "daemon " << i;
      EXPECT_EQ(job.journal_state(), "whole") << "daemon " << i;
    }
  }
  void KillMachineAt(const std::string& point, size_t victim, uint32_t skip, uint64_t seed = 0) {
    Undisturbed();
    cluster_[victim].ArmFailpoint(point, "kill", skip);
    Begin({0, 0, 1, 1});
    cluster_.AwaitDeath(victim);
    MachineComesBack(victim, seed);
    ExpectUndisturbed();
  }
  void KillMachineInItsFirstSnapshot(size_t victim) {
    Undisturbed();
    cluster_[victim].ArmFailpoint("journal.snapshot.after_chunk", "kill", 1);
    Begin({0, 0, 1, 1});
    cluster_.AwaitDeath(victim);
    for (size_t i : {kCoordinator, kOther}) EXPECT_EQ(KillRanksOf(i), 0u);
    cluster_.LoseMachine(victim, "journal");
    cluster_.Start(victim);
    while (cluster_[1 - victim].HasJob("toy")) ASSERT_TRUE(cluster_[1 - victim].Alive());
    Begin({0, 0, 1, 1});
    ExpectUndisturbed();
  }

  Cluster cluster_{2, {}, Flags()};
  std::vector<size_t> where_;
  int steps_ = kSteps;
  Processes ranks_;
};

TEST_F(PeerMachineCases, EachDaemonKeepsAJournalOfItsPart) {
  Begin({0, 1, 0, 1});  // two ranges each
  ExpectUndisturbed();
  for (size_t i : {kCoordinator, kOther}) {
    EXPECT_EQ(cluster_[i].Job("toy").own_chunks(), 2u);
    EXPECT_NE(cluster_[i].Job("toy").crash_cost().find("machine: at most one step"),
              std::string::npos);
    EXPECT_TRUE(std::filesystem::exists(cluster_.own_directory(i) + "/journal/toy/PEERS"));
  }
}

// --- Either machine, at prepare, after the decision, and elsewhere.
TEST_F(PeerMachineCases, OtherWhenItHasPreparedAndSaidNothing) {
  KillMachineAt("peer.prepared", kOther, 4);
}
TEST_F(PeerMachineCases, OtherBeforeWhatItPreparesIsSynced) {
  KillMachineAt("journal.sync.before", kOther, 7);
}
TEST_F(PeerMachineCases, OtherAfterWhatItPreparesIsSynced) {
  KillMachineAt("journal.sync.after", kOther, 8);
}
TEST_F(PeerMachineCases, OtherAfterTheDecisionCame) {
  KillMachineAt("peer.decision.received", kOther, 4);
}
TEST_F(PeerMachineCases, OtherWhileARecordIsWrittenAndHalfOfItStays) {
  KillMachineAt("journal.append.after", kOther, 13, 7);
}
TEST_F(PeerMachineCases, OtherBeforeItsUpdate) { KillMachineAt("step.update.before", kOther, 4); }
TEST_F(PeerMachineCases, OtherInTheMiddleOfItsUpdate) {
  KillMachineAt("step.update.after_chunk", kOther, 9);
}
TEST_F(PeerMachineCases, OtherAfterItsUpdate) { KillMachineAt("step.update.after", kOther, 4); }
// Nothing was committed yet, and the first weights are gone: the job ends for all, and those who
// come anew begin it anew.
TEST_F(PeerMachineCases, OtherInItsFirstSnapshot) { KillMachineInItsFirstSnapshot(kOther); }
TEST_F(PeerMachineCases, OtherInALaterSnapshot) {
  KillMachineAt("journal.snapshot.after_chunk", kOther, 3);
}
TEST_F(PeerMachineCases, CoordinatorBeforeTheDecision) {
  KillMachineAt("step.decide.before", kCoordinator, 4);
}
TEST_F(PeerMachineCases, CoordinatorAfterTheRecord) {
  KillMachineAt("step.decide.after_record", kCoordinator, 4);
}
TEST_F(PeerMachineCases, CoordinatorBeforeTheDecisionIsSynced) {
  KillMachineAt("journal.sync.before", kCoordinator, 6);
}
TEST_F(PeerMachineCases, CoordinatorAfterTheDecisionIsSynced) {
  KillMachineAt("journal.sync.after", kCoordinator, 6);
}
TEST_F(PeerMachineCases, CoordinatorAfterTheDecisionBeforeItIsSent) {
  KillMachineAt("peer.decision.before_send", kCoordinator, 4);
}
TEST_F(PeerMachineCases, CoordinatorInTheMiddleOfItsUpdate) {
  KillMachineAt("step.update.after_chunk", kCoordinator, 9);
}
TEST_F(PeerMachineCases, CoordinatorAfterItsUpdate) {
  KillMachineAt("step.update.after", kCoordinator, 4);
}
TEST_F(PeerMachineCases, CoordinatorInItsFirstSnapshot) {
  KillMachineInItsFirstSnapshot(kCoordinator);
}

// The daemon alone: its segments live, and what its journal lacks is written again.
TEST_F(PeerMachineCases, OtherDaemonAloneBetweenDecisionAndJournal) {
  Undisturbed();
  cluster_[kOther].ArmFailpoint("peer.decision.received", "kill", 4);
  Begin({0, 0, 1, 1});
  cluster_.AwaitDeath(kOther);
  cluster_.Start(kOther);
  ExpectUndisturbed();
}

TEST_F(PeerMachineCases, BothMachinesAtOnceAfterTheDecision) {
  Undisturbed();
  cluster_[0].ArmFailpoint("peer.decision.before_send", "kill", 4);
  Begin({0, 0, 1, 1});
  cluster_.AwaitDeath(0);
  cluster_.Kill(1);
  for (size_t i : {kOther, kCoordinator}) MachineComesBack(i, 3);
  ExpectUndisturbed();
}

TEST_F(PeerMachineCases, OneAfterTheOtherAtRandomMoments) {
  constexpr int kMany = 40;
  Undisturbed(kMany);
  std::mt19937 random(1);
  Begin({0, 0, 1, 1}, kMany);
  for (const auto& rank : ranks_) ASSERT_NE(rank->AwaitLine("step "), "");
  for (size_t round = 0; round < 8; ++round) {
    const size_t victim = random() % 2;
    const uint64_t before = cluster_[victim].Job("toy").committed_step();
    while (cluster_[victim].Job("toy").committed_step() == before && before < kMany) {
    }
    cluster_.Kill(victim);
    MachineComesBack(victim, random() | 1);
  }
  ExpectUndisturbed();
}

// --- Chunks that move.
TEST_F(PeerMachineCases, ChunksThatMovedAreInTheJournalsOfThoseWhoHaveThem) {
  Begin({0, 0, 1, 1}, 4);
  FinishRanks(&ranks_);
  Begin({0, 1, 1}, 8);
  FinishRanks(&ranks_);
  EXPECT_EQ(cluster_[0].Job("toy").own_chunks(), 1u);
  EXPECT_EQ(cluster_[1].Job("toy").own_chunks(), 3u);
  for (size_t i : {kCoordinator, kOther}) {
    cluster_.Kill(i);
    cluster_.LoseMachine(i, "journal");
  }
  for (size_t i : {kCoordinator, kOther}) {
    cluster_.Start(i);
    EXPECT_EQ(cluster_[i].Job("toy").committed_step(), 8u) << cluster_[i].Log();
  }
  Begin({0, 1, 1});
  ExpectUndisturbed();
  EXPECT_EQ(cluster_[0].Job("toy").own_chunks(), 1u);
}

class PeerMachineMoves : public PeerMachineCases {
 protected:
  void KillMachineWhileMoving(const std::string& point, size_t victim) {
    Undisturbed();
    Begin({0, 0, 1, 1}, 4);
    FinishRanks(&ranks_);
    cluster_[victim].ArmFailpoint(point, "kill");
    Begin({0, 1, 1});
    cluster_.AwaitDeath(victim);
    KillRanksOf(victim);
    cluster_.LoseMachine(victim, "journal");
    cluster_.Start(victim);
    EXPECT_EQ(cluster_[victim].Job("toy").committed_step(), 4u) << cluster_[victim].Log();
    StartRanksOf(victim);
    ExpectUndisturbed();
    EXPECT_EQ(cluster_[0].Job("toy").own_chunks(), 1u);
    EXPECT_EQ(cluster_[1].Job("toy").own_chunks(), 3u);
  }
};
TEST_F(PeerMachineMoves, ReceiverWhenItHasStored) {
  KillMachineWhileMoving("peer.reshard.stored", kOther);
}
TEST_F(PeerMachineMoves, CoordinatorAfterTheCopy) {
  KillMachineWhileMoving("reshard.after_copy", kCoordinator);
}
TEST_F(PeerMachineMoves, CoordinatorAfterTheRecord) {
  KillMachineWhileMoving("reshard.after_record", kCoordinator);
}
// It has stored, the coordinator counts on that, and it does not know.
TEST_F(PeerMachineMoves, ReceiverThatDoesNotKnowThatItsChunksCount) {
  Undisturbed();
  Begin({0, 0, 1, 1}, 4);
  FinishRanks(&ranks_);
  cluster_[kCoordinator].ArmFailpoint("reshard.after_record", "wait");
  Begin({0, 1, 1});
  cluster_[kCoordinator].AwaitFailpoint("reshard.after_record");
  cluster_.Kill(kOther);
  cluster_[kCoordinator].ReleaseFailpoint("reshard.after_record");
  MachineComesBack(kOther);
  ExpectUndisturbed();
  EXPECT_EQ(cluster_[1].Job("toy").own_chunks(), 3u);
}

TEST_F(PeerMachineCases, TheNewCoordinatorsMachineAfterAHandover) {
  Undisturbed();
  Begin({0, 0, 1, 1}, 4);
  FinishRanks(&ranks_);
  ASSERT_TRUE(cluster_[0].HandOver("toy", "b").ok());
  for (size_t i : {kOther, kCoordinator}) {
    cluster_.Kill(i);
    cluster_.LoseMachine(i, "journal");
    cluster_.Start(i);
    EXPECT_EQ(cluster_[i].Job("toy").coordinator(), "b");
  }
  Begin({0, 0, 1, 1});
  ExpectUndisturbed();
}

TEST_F(PeerMachineCases, ADeletedJobLeavesNoJournal) {
  Begin({0, 0, 1, 1}, 2);
  FinishRanks(&ranks_);
  ASSERT_TRUE(cluster_[0].DeleteJob("toy", false).ok());
  while (cluster_[1].HasJob("toy")) ASSERT_TRUE(cluster_[1].Alive());
  for (size_t i : {kCoordinator, kOther}) {
    cluster_.Kill(i);
    cluster_.LoseMachine(i, "journal");
    cluster_.Start(i);
    EXPECT_FALSE(cluster_[i].HasJob("toy"));
  }
}

// --- Disks that fail.

// EIO on one of four shards: nobody commits, and all say so by the deadline.
void EioAt(size_t victim) {
  Cluster cluster(2, {}, Flags());
  cluster.Kill(victim);
  cluster.SetFlags(victim, {"--file_faults=*/log-*:write:12+:eio"});
  cluster.Start(victim);
  cluster.AwaitLinks();
  std::vector<std::string> flags = RankFlags(kSteps);
  flags.push_back("--step_timeout=3");
  flags.push_back("--stop=failed");  // the end of one is not what the others fail of
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, flags);
  for (auto& rank : ranks) {
    const std::string error = rank->AwaitLine("error");
    EXPECT_NE(error.find("DEADLINE_EXCEEDED"), std::string::npos) << error;
    EXPECT_NE(error.find("journal"), std::string::npos) << error;
    EXPECT_NE(error.find("log-"), std::string::npos) << error;  // what fails
  }
  const uint64_t committed = cluster[0].Job("toy").committed_step();
  EXPECT_GT(committed, 0u);
  EXPECT_LT(committed, static_cast<uint64_t>(kSteps));
  EXPECT_EQ(cluster[1].Job("toy").committed_step(), committed);
  EXPECT_EQ(cluster[victim].Job("toy").journal_state(), "stalled");
  KillRanks(&ranks);
}
TEST(PeerDisks, EioAtOneOfTwoDaemonsNobodyCommitsAndAllSayWhy) { EioAt(kOther); }
TEST(PeerDisks, EioAtTheCoordinatorNobodyCommitsAndAllSayWhy) { EioAt(kCoordinator); }

TEST(PeerDisks, TheJobGoesOnByItselfWhenTheDiskWorksAgain) {
  Undisturbed();
  Cluster cluster(2, {}, Flags());
  cluster.Kill(kOther);
  cluster.SetFlags(kOther, {"--file_faults=*/log-*:write:12-15:eio"});
  cluster.Start(kOther);
  cluster.AwaitLinks();
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, RankFlags(kSteps));
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  EXPECT_NE(cluster[kOther].Log().find("its journal failed"), std::string::npos);
  EXPECT_EQ(cluster[kOther].Job("toy").durable_step(), static_cast<uint64_t>(kSteps));
}

TEST(PeerDisks, ADaemonWithoutAJournalIsNamed) {
  Cluster cluster(2);
  cluster.Kill(kCoordinator);
  cluster.SetFlags(kCoordinator, Flags());
  cluster.Start(kCoordinator);
  cluster.AwaitLinks();
  std::vector<std::string> flags = RankFlags(2);
  flags.push_back("--join=5");
  flags.push_back("--durability=2");
  Processes ranks = StartRanks(&cluster, {0, 1}, flags);
  EXPECT_NE(ranks[1]->AwaitLine("error").find("durability"), std::string::npos);
  KillRanks(&ranks);
}

}  // namespace
}  // namespace shardd::test

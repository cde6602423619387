// Checkpoints of jobs that span daemons.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/support/cluster.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace shardd::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::vector<std::string> Steps(int steps) {
  return {"--job=toy", "--steps=" + std::to_string(steps)};
}

const std::string& Undisturbed() {
  static const std::string digest = [] {
    DaemonProcess daemon;
    Processes ranks;
    for (uint32_t r = 0; r < 4; ++r) {
      ranks.push_back(std::make_unique<RankProcess>(daemon.socket(), r, 4, Steps(5)));
    }
    return FinishRanks(&ranks);
  }();
  return digest;
}

class PeerCheckpoints : public testing::Test {
 protected:
  std::vector<std::string> Flags() const { return {"--checkpoint.directory=" + dir_.path()}; }
  static Finished Ctl(DaemonProcess& daemon, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), Runfile("client/cli/shardctl"));
    arguments.push_back("--address=" + daemon.socket());
    return RunProgram(arguments);
  }
  static void RunTo(Cluster* cluster, const std::vector<size_t>& where, int steps) {
    Processes ranks = StartRanks(cluster, where, Steps(steps));
    FinishRanks(&ranks);
  }
  static void ExpectUndisturbed(Cluster* cluster, const std::vector<size_t>& where) {
    Processes ranks = StartRanks(cluster, where, Steps(5));
    EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
    EXPECT_EQ((*cluster)[where[0]].Job("toy").committed_step(), 5u);
  }
  TempDir dir_{"/tmp"};
};

TEST_F(PeerCheckpoints, SavedAndRestoredOntoOtherDaemons) {
  {
    Cluster cluster(2, {}, Flags());
    RunTo(&cluster, {0, 1, 0, 1}, 2);
    EXPECT_EQ(cluster[1].Job("toy").own_chunks(), 2u);
    const Finished saved = Ctl(cluster[0], {"checkpoint", "save", "toy"});
    EXPECT_EQ(saved.code, 0) << saved.err;
    EXPECT_EQ(cluster[0].Job("toy").own_chunks(), 4u);
    ExpectUndisturbed(&cluster, {0, 1, 0, 1});
    EXPECT_EQ(cluster[1].Job("toy").own_chunks(), 2u);
    // Back to step 2, over what is there, on other ranks.
    const Finished restored = Ctl(cluster[0], {"checkpoint", "restore", "toy", "--replace"});
    EXPECT_EQ(restored.code, 0) << restored.err;
    EXPECT_EQ(cluster[0].Job("toy").committed_step(), 2u);
    ExpectUndisturbed(&cluster, {0, 1, 1});
    EXPECT_EQ(cluster[1].Job("toy").own_chunks(), 3u);
  }
  Cluster three(3, {}, Flags());
  const Finished restored = Ctl(three[2], {"checkpoint", "restore", "toy"});
  EXPECT_EQ(restored.code, 0) << restored.err;
  ExpectUndisturbed(&three, {2, 0, 1, 2});
  EXPECT_EQ(three[0].Job("toy").own_chunks(), 1u);
}

TEST_F(PeerCheckpoints, ADaemonThatIsDownIsNamed) {
  Cluster cluster(2, {}, Flags());
  RunTo(&cluster, {0, 0, 1, 1}, 2);
  cluster.Kill(1);
  while (cluster[0].Job("toy").waits_for().find("daemon b") == std::string::npos) {
    ASSERT_TRUE(cluster[0].Alive());
  }
  const Finished refused = Ctl(cluster[0], {"checkpoint", "save", "toy"});
  EXPECT_NE(refused.code, 0);
  EXPECT_NE(refused.err.find("daemon b is not reached"), std::string::npos) << refused.err;
  cluster.Start(1);
  cluster.AwaitLinks();
  ExpectUndisturbed(&cluster, {0, 0, 1, 1});
}

// A slow save of a job that lies with one daemon, and ranks that come at two meanwhile.
TEST_F(PeerCheckpoints, ChunksDoNotMoveWhileASaveReadsThem) {
  Cluster cluster(2, {}, Flags());
  RunTo(&cluster, {0, 0}, 2);
  const Finished begun =
      Ctl(cluster[0], {"checkpoint", "save", "toy", "--rate=100000", "--detach"});
  ASSERT_EQ(begun.code, 0) << begun.err;
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, Steps(5));
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  EXPECT_EQ(cluster[0].Job("toy").checkpoint_step(), 2u);
  const Finished verified = Ctl(cluster[0], {"checkpoint", "verify", "toy"});
  EXPECT_EQ(verified.code, 0) << verified.err;
  const Finished restored = Ctl(cluster[0], {"checkpoint", "restore", "toy", "--replace"});
  EXPECT_EQ(restored.code, 0) << restored.err;
  ExpectUndisturbed(&cluster, {0, 0, 1, 1});
}

// Each daemon keeps its checkpoints to itself.
class PeerSaves : public PeerCheckpoints {
 protected:
  static constexpr int kSteps = 12;
  explicit PeerSaves(const std::string& directory = "{own}/checkpoints")
      : cluster_(2, {}, {"--checkpoint.directory=" + directory}) {}

  // Rank 0 sleeps, and with it the job, some steps on from where it is.
  void Sleep(Processes* ranks) {
    cluster_[1].AwaitFailpoint("peer.prepared");
    (*ranks)[0]->Signal(SIGSTOP);
    cluster_[1].ReleaseFailpoint("peer.prepared");
  }
  Processes TrainTo(uint32_t steps, const std::vector<size_t>& where = {0, 0, 1, 1}) {
    cluster_[1].ArmFailpoint("peer.prepared", "wait", steps);
    Processes ranks = StartRanks(&cluster_, where, {"--job=toy", "--steps=12", "--heartbeat=60"});
    Sleep(&ranks);
    return ranks;
  }
  void Advance(Processes* ranks, uint32_t steps) {
    cluster_[1].ArmFailpoint("peer.prepared", "wait", steps);
    GoOn(ranks);
    Sleep(ranks);
  }
  void GoOn(Processes* ranks) { (*ranks)[0]->Signal(SIGCONT); }
  Finished Save(std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), {"checkpoint", "save", "toy"});
    return Ctl(cluster_[0], flags);
  }
  // A save that runs on while this test does something else.
  std::future<Finished> BeginSave(std::vector<std::string> flags = {}) {
    return std::async(std::launch::async, [this, flags] { return Save(flags); });
  }
  std::string Directory(size_t daemon) const {
    return cluster_.own_directory(daemon) + "/checkpoints/toy";
  }
  std::vector<std::string> Names(size_t daemon) const {
    std::vector<std::string> names;
    if (!fs::exists(Directory(daemon))) return names;
    for (const auto& entry : fs::directory_iterator(Directory(daemon))) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  void AwaitState(size_t daemon, const std::string& text) {
    while (cluster_[daemon].Job("toy").checkpoint_state().find(text) == std::string::npos) {
      ASSERT_TRUE(cluster_[daemon].Alive());
    }
  }
  static const std::string& Whole() {
    static const std::string digest = [] {
      DaemonProcess daemon;
      Processes ranks;
      for (uint32_t r = 0; r < 4; ++r) {
        ranks.push_back(std::make_unique<RankProcess>(daemon.socket(), r, 4, Steps(kSteps)));
      }
      return FinishRanks(&ranks);
    }();
    return digest;
  }
  // What all daemons have, brought to one that knows nothing else: the newest that is whole is
  // `step`, and training goes on from there to the same end.
  void ExpectRestored(uint64_t step) {
    for (size_t i = 0; i < cluster_.size(); ++i) {
      if (!fs::exists(Directory(i))) continue;
      fs::create_directories(dir_.path() + "/toy");
      fs::copy(Directory(i), dir_.path() + "/toy",
               fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    }
    DaemonProcess::Options options;
    options.flags = Flags();
    DaemonProcess daemon(options);
    const Finished verified = Ctl(daemon, {"checkpoint", "verify", "toy"});
    EXPECT_EQ(verified.code, 0) << verified.err;
    const Finished restored = Ctl(daemon, {"checkpoint", "restore", "toy"});
    ASSERT_EQ(restored.code, 0) << restored.err;
    EXPECT_EQ(daemon.Job("toy").committed_step(), step);
    Processes ranks;
    for (uint32_t r = 0; r < 3; ++r) {
      ranks.push_back(std::make_unique<RankProcess>(daemon.socket(), r, 3, Steps(kSteps)));
    }
    EXPECT_EQ(FinishRanks(&ranks), Whole());
  }
  Cluster cluster_;
};

TEST_F(PeerSaves, AnotherDaemonNamesTheCoordinatorAndAnExportWaits) {
  Processes ranks = TrainTo(2);
  const Finished other = Ctl(cluster_[1], {"checkpoint", "save", "toy"});
  EXPECT_NE(other.code, 0);
  EXPECT_NE(other.err.find("coordinator, daemon a"), std::string::npos) << other.err;
  const Finished file = Ctl(cluster_[0], {"checkpoint", "export", "toy"});
  EXPECT_NE(file.code, 0);
  EXPECT_NE(file.err.find("its ranks are attached"), std::string::npos) << file.err;
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
}

TEST_F(PeerSaves, EachDaemonSavesItsPartOfOneStepWhileTrainingGoesOn) {
  Processes ranks = TrainTo(2);
  std::future<Finished> saved = BeginSave({"--rate=200000"});
  AwaitState(1, "saving step");
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  const Finished save = saved.get();
  ASSERT_EQ(save.code, 0) << save.err;
  const uint64_t step = cluster_[0].Job("toy").checkpoint_step();
  EXPECT_GE(step, 2u);
  EXPECT_LT(step, static_cast<uint64_t>(kSteps));
  EXPECT_EQ(Names(0), std::vector<std::string>{absl::StrFormat("step-%010d.1-of-2", step)});
  EXPECT_EQ(Names(1), std::vector<std::string>{absl::StrFormat("step-%010d.2-of-2", step)});
  EXPECT_EQ(cluster_[1].Job("toy").own_chunks(), 2u);
  ExpectRestored(step);
}

// Ranks whose shards take turns: two parts with each daemon.
TEST_F(PeerSaves, PartsThatAreNotNeighboursAndAStepThatIsToCome) {
  Processes ranks = TrainTo(2, {0, 1, 0, 1});
  std::future<Finished> saved = BeginSave({"--step=6"});
  ASSERT_TRUE(cluster_[0].AwaitLog("step 6 is to be saved by its 2 daemons"));
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  const Finished save = saved.get();
  ASSERT_EQ(save.code, 0) << save.err;
  EXPECT_EQ(Names(0),
            (std::vector<std::string>{"step-0000000006.1-of-4", "step-0000000006.3-of-4"}));
  EXPECT_EQ(Names(1),
            (std::vector<std::string>{"step-0000000006.2-of-4", "step-0000000006.4-of-4"}));
  ExpectRestored(6);
}

TEST_F(PeerSaves, OldStepsGoAtAllDaemons) {
  Processes ranks = TrainTo(2);
  for (int i = 0; i < 3; ++i) {
    if (i > 0) Advance(&ranks, 1);
    const Finished save = Save({"--keep=2"});
    ASSERT_EQ(save.code, 0) << save.err;
  }
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  EXPECT_EQ(Names(0).size(), 2u);
  while (Names(1).size() > 2) ASSERT_TRUE(cluster_[1].Alive());
  ExpectRestored(cluster_[0].Job("toy").checkpoint_step());
}

TEST_F(PeerSaves, ADaemonThatDiesAmidItsPartFailsTheSaveAndNothingElse) {
  Processes ranks = TrainTo(2);
  cluster_[1].ArmFailpoint("checkpoint.copy.begun", "kill");
  std::future<Finished> saved = BeginSave();
  cluster_.AwaitDeath(1);
  cluster_.Start(1);
  const Finished save = saved.get();
  EXPECT_NE(save.code, 0);
  EXPECT_NE(save.err.find("daemon b has ended meanwhile"), std::string::npos) << save.err;
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  EXPECT_TRUE(Names(0).empty()) << Names(0)[0];
}

// Between the first name and the last: the set is not whole, and the one before it counts.
TEST_F(PeerSaves, ADaemonThatDiesBeforeItsPartHasItsNameLeavesTheOneBefore) {
  Processes ranks = TrainTo(2);
  const Finished whole = Save();
  ASSERT_EQ(whole.code, 0) << whole.err;
  const uint64_t step = cluster_[0].Job("toy").checkpoint_step();
  Advance(&ranks, 1);
  cluster_[1].ArmFailpoint("checkpoint.before_rename", "kill");
  std::future<Finished> second = BeginSave({"--keep=1"});
  cluster_.AwaitDeath(1);
  cluster_.Start(1);
  const Finished broken = second.get();
  EXPECT_NE(broken.code, 0);
  EXPECT_NE(broken.err.find("daemon b has ended meanwhile"), std::string::npos) << broken.err;
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  EXPECT_EQ(Names(0).size(), 2u);
  ASSERT_EQ(Names(1).size(), 2u);  // and the unfinished one
  EXPECT_EQ(Names(1)[1], absl::StrFormat("step-%010d.2-of-2", step));
  ExpectRestored(step);
}

TEST_F(PeerSaves, ADaemonOutOfReachFailsTheSaveInTime) {
  Processes ranks = TrainTo(2);
  std::future<Finished> saved = BeginSave({"--rate=100"});
  AwaitState(1, "saving step");
  cluster_.Partition(1);
  const Finished save = saved.get();
  EXPECT_NE(save.code, 0);
  EXPECT_NE(save.err.find("daemon b is out of reach"), std::string::npos) << save.err;
  while (!cluster_[1].Job("toy").checkpoint_state().empty()) ASSERT_TRUE(cluster_[1].Alive());
  EXPECT_THAT(cluster_[1].Job("toy").checkpoint_failure(), HasSubstr("daemon a is out of reach"));
  cluster_.Heal(1);
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  EXPECT_TRUE(Names(0).empty()) << Names(0)[0];
  EXPECT_TRUE(Names(1).empty()) << Names(1)[0];
}

TEST_F(PeerSaves, TheCoordinatorThatDiesTakesTheSaveWithIt) {
  Processes ranks = TrainTo(2);
  cluster_[0].ArmFailpoint("checkpoint.before_rename", "kill");
  std::future<Finished> saved = BeginSave();
  cluster_.AwaitDeath(0);
  cluster_.Start(0);
  EXPECT_NE(saved.get().code, 0);
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  while (!cluster_[1].Job("toy").checkpoint_state().empty()) ASSERT_TRUE(cluster_[1].Alive());
  EXPECT_THAT(cluster_[1].Job("toy").checkpoint_failure(), HasSubstr("daemon a has ended"));
  EXPECT_TRUE(Names(1).empty()) << Names(1)[0];
}

TEST_F(PeerSaves, WhatADaemonCannotSaveIsNamedAndNobodysPartCounts) {
  cluster_.Kill(1);
  cluster_.SetFlags(1, {"--checkpoint.directory="});
  cluster_.Start(1);
  cluster_.AwaitLinks();
  Processes ranks = TrainTo(2);
  const Finished nowhere = Save();
  EXPECT_NE(nowhere.code, 0);
  EXPECT_NE(nowhere.err.find("daemon b: this daemon has no place for checkpoints"),
            std::string::npos)
      << nowhere.err;
  cluster_.Kill(1);
  cluster_.SetFlags(1, {"--file_faults=*/checkpoints/*:write:2+:enospc"});
  cluster_.Start(1);
  cluster_.AwaitLinks();
  Advance(&ranks, 1);
  const Finished full = Save();
  EXPECT_NE(full.code, 0);
  EXPECT_NE(full.err.find("daemon b: "), std::string::npos) << full.err;
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  EXPECT_TRUE(Names(0).empty()) << Names(0)[0];
  while (!cluster_[1].Job("toy").checkpoint_state().empty()) ASSERT_TRUE(cluster_[1].Alive());
  EXPECT_TRUE(Names(1).empty()) << Names(1)[0];
}

TEST_F(PeerSaves, ACancelledSaveLeavesNothingAndTheNextOneIsWhole) {
  Processes ranks = TrainTo(2);
  std::future<Finished> saved = BeginSave({"--rate=1000"});
  AwaitState(1, "saving step");
  const Finished cancelled = Ctl(cluster_[0], {"checkpoint", "cancel", "toy"});
  EXPECT_EQ(cancelled.code, 0) << cancelled.err;
  EXPECT_NE(saved.get().code, 0);
  while (!cluster_[1].Job("toy").checkpoint_state().empty()) ASSERT_TRUE(cluster_[1].Alive());
  EXPECT_TRUE(Names(0).empty()) << Names(0)[0];
  EXPECT_TRUE(Names(1).empty()) << Names(1)[0];
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  // With no rank attached the chunks come to the coordinator.
  const Finished again = Save();
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(Names(0), std::vector<std::string>{"step-0000000012"});
  ExpectRestored(kSteps);
}

// The daemons' directory is one and the same.
class SharedPeerSaves : public PeerSaves {
 protected:
  SharedPeerSaves() : PeerSaves(Shared().path()) {}
  ~SharedPeerSaves() override { fs::remove_all(Shared().path() + "/toy"); }
  static const TempDir& Shared() {
    static const TempDir directory{"/tmp"};
    return directory;
  }
};

TEST_F(SharedPeerSaves, ARestoreFindsAllParts) {
  Processes ranks = TrainTo(2);
  for (int i = 0; i < 3; ++i) {
    if (i > 0) Advance(&ranks, 1);
    const Finished save = Save({"--keep=1"});
    ASSERT_EQ(save.code, 0) << save.err;
  }
  const uint64_t step = cluster_[0].Job("toy").checkpoint_step();
  GoOn(&ranks);
  EXPECT_EQ(FinishRanks(&ranks), Whole());
  const Finished restored = Ctl(cluster_[0], {"checkpoint", "restore", "toy", "--replace"});
  EXPECT_EQ(restored.code, 0) << restored.err;
  EXPECT_EQ(cluster_[0].Job("toy").committed_step(), step);
  ranks = StartRanks(&cluster_, {0, 1, 1}, {"--job=toy", "--steps=12"});
  EXPECT_EQ(FinishRanks(&ranks), Whole());
}

}  // namespace
}  // namespace shardd::test

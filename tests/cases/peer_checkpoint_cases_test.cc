// Checkpoints of jobs that span daemons.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/cluster.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace shardd::test {
namespace {

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

TEST_F(PeerCheckpoints, RefusedElsewhereAndWhileRanksAreAttached) {
  Cluster cluster(2, {}, Flags());
  cluster[0].ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, Steps(5));
  cluster[0].AwaitFailpoint("step.decide.before");
  cluster[0].ReleaseFailpoint("step.decide.before");
  const Finished other = Ctl(cluster[1], {"checkpoint", "save", "toy"});
  EXPECT_NE(other.code, 0);
  EXPECT_NE(other.err.find("coordinator, daemon a"), std::string::npos) << other.err;
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());

  cluster[1].ArmFailpoint("peer.prepared", "wait");
  ranks = StartRanks(&cluster, {0, 0, 1, 1}, Steps(6));
  cluster[1].AwaitFailpoint("peer.prepared");
  const Finished amid = Ctl(cluster[0], {"checkpoint", "save", "toy"});
  cluster[1].ReleaseFailpoint("peer.prepared");
  EXPECT_NE(amid.code, 0);
  EXPECT_NE(amid.err.find("its ranks are attached"), std::string::npos) << amid.err;
  FinishRanks(&ranks);
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

}  // namespace
}  // namespace shardd::test

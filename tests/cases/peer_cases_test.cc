// One job of several daemons.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <condition_variable>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/time/clock.h"
#include "server/peer/links.h"
#include "tests/support/cluster.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

// Five steps of the toy job with four slots; the same for any number of ranks and daemons.
const std::string& Undisturbed() {
  static const std::string digest = [] {
    DaemonProcess daemon;
    Processes ranks;
    for (uint32_t r = 0; r < 4; ++r) {
      ranks.push_back(std::make_unique<RankProcess>(daemon.socket(), r, 4,
                                                    std::vector<std::string>{"--job=toy"}));
    }
    return FinishRanks(&ranks);
  }();
  return digest;
}

void ExpectFiveSteps(Cluster* cluster) {
  for (size_t i = 0; i < cluster->size(); ++i) {
    const v1::JobStatus job = (*cluster)[i].Job("toy");
    EXPECT_EQ(job.committed_step(), 5u) << "daemon " << i;
    EXPECT_EQ(job.applied(), 5u) << "daemon " << i;
  }
}

// --- The curve.

TEST(PeerCases, TwoDaemonsOfTwoRanksGiveTheBitsOfOne) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  ExpectFiveSteps(&cluster);
  for (size_t i : {0, 1}) {
    const v1::JobStatus job = cluster[i].Job("toy");
    EXPECT_EQ(job.coordinator(), "a");
    EXPECT_EQ(job.own_chunks(), 2u);
    EXPECT_EQ(job.recomputed_steps(), 0u);
  }
}

TEST(PeerCases, RanksThatAreNotNeighboursAndWorldSizesThatDoNotDivide) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 1, 0});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  ExpectFiveSteps(&cluster);
}

TEST(PeerCases, ThreeDaemons) {
  Cluster cluster(3);
  Processes ranks = StartRanks(&cluster, {2, 0, 1, 2});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  ExpectFiveSteps(&cluster);
  EXPECT_EQ(cluster[0].Job("toy").coordinator(), "c");  // where rank 0 is
}

TEST(PeerCases, JobOfOneDaemonAmongSeveral) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {1, 1});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  EXPECT_EQ(cluster[1].Job("toy").coordinator(), "b");
  EXPECT_FALSE(cluster[0].HasJob("toy"));
}

// --- Daemons that die.

// Kills daemon `victim` at `point` after `skip` passes and starts it again; ranks carry on.
void KillAt(const std::string& point, size_t victim, uint32_t skip) {
  const std::string& expected = Undisturbed();
  Cluster cluster(2);
  cluster[victim].ArmFailpoint(point, "kill", skip);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1});
  cluster.AwaitDeath(victim);
  cluster.Start(victim);
  EXPECT_EQ(FinishRanks(&ranks), expected) << cluster[0].Log() << "\n---\n" << cluster[1].Log();
  ExpectFiveSteps(&cluster);
  EXPECT_LE(cluster[0].Job("toy").recomputed_steps(), 2u);
}

constexpr size_t kCoordinator = 0, kOther = 1;

// Four slots: each daemon takes 8 descriptors, 2 buckets and 2 chunks a step.
TEST(PeerDeath, OtherAtPrepare) { KillAt("peer.prepared", kOther, 2); }
TEST(PeerDeath, OtherAfterTheDecisionCame) { KillAt("peer.decision.received", kOther, 2); }
TEST(PeerDeath, CoordinatorAfterTheDecisionBeforeItIsSent) {
  KillAt("peer.decision.before_send", kCoordinator, 2);
}
TEST(PeerDeath, CoordinatorBeforeTheDecision) { KillAt("step.decide.before", kCoordinator, 2); }
TEST(PeerDeath, CoordinatorAfterTheRecord) { KillAt("step.decide.after_record", kCoordinator, 2); }
TEST(PeerDeath, CoordinatorInTheMiddleOfItsUpdate) {
  KillAt("step.update.after_chunk", kCoordinator, 5);
}
TEST(PeerDeath, OtherInTheMiddleOfItsUpdate) { KillAt("step.update.after_chunk", kOther, 5); }
TEST(PeerDeath, OtherBeforeItsUpdate) { KillAt("step.update.before", kOther, 2); }
TEST(PeerDeath, OtherAfterItsUpdate) { KillAt("step.update.after", kOther, 2); }
TEST(PeerDeath, CoordinatorAfterItsUpdate) { KillAt("step.update.after", kCoordinator, 2); }
TEST(PeerDeath, OtherWhilePublishing) { KillAt("step.publish.after_descriptor", kOther, 19); }
TEST(PeerDeath, CoordinatorWhilePublishing) {
  KillAt("step.publish.after_descriptor", kCoordinator, 19);
}
TEST(PeerDeath, OtherAfterABucketIsSummed) { KillAt("step.reduce.after", kOther, 5); }
TEST(PeerDeath, CoordinatorAfterABucketIsSummed) { KillAt("step.reduce.after", kCoordinator, 5); }

TEST(PeerDeath, BothAtOnceAfterTheDecision) {
  Cluster cluster(2);
  cluster[0].ArmFailpoint("peer.decision.before_send", "kill", 2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1});
  cluster.AwaitDeath(0);
  cluster.Kill(1);
  cluster.Start(1);
  cluster.Start(0);
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  ExpectFiveSteps(&cluster);
}

TEST(PeerDeath, OneAfterTheOtherInEveryStep) {
  Cluster cluster(2);
  Processes ranks;
  for (size_t round = 0; round < 4; ++round) {
    const size_t victim = round % 2;
    cluster[victim].ArmFailpoint(victim == 0 ? "peer.decision.before_send" : "peer.prepared",
                                 "kill");
    if (round == 0) ranks = StartRanks(&cluster, {0, 0, 1, 1});
    cluster.AwaitDeath(victim);
    cluster.Start(victim);
  }
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  ExpectFiveSteps(&cluster);
}

// A rank that dies takes its group along, wherever it is attached; its successor goes on.
TEST(PeerDeath, RankAtTheOtherDaemon) {
  Cluster cluster(2);
  cluster[1].ArmFailpoint("peer.prepared", "wait", 2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1});
  cluster[1].AwaitFailpoint("peer.prepared");
  ranks[3]->Signal(SIGKILL);
  ranks[3]->Wait();
  cluster[1].ReleaseFailpoint("peer.prepared");
  ranks[3] = std::make_unique<RankProcess>(cluster[1].socket(), 3, 4,
                                           std::vector<std::string>{"--job=toy"});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  ExpectFiveSteps(&cluster);
}

// Nothing was committed, and a part of the first weights is gone: all ranks upload again, those of
// the daemon that lived too.
void KillAmidTheUpload(size_t victim) {
  const std::string& expected = Undisturbed();
  Cluster cluster(2);
  Processes ranks;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    ranks.push_back(std::make_unique<RankProcess>(
        cluster[rank / 2].socket(), rank, 4,
        std::vector<std::string>{"--job=toy", rank == 1 ? "--stop=uploading" : "--stop="}));
  }
  ASSERT_NE(ranks[1]->AwaitLine("uploading"), "");
  cluster.Kill(victim);
  cluster.Start(victim);
  ranks[1]->Signal(SIGCONT);
  EXPECT_EQ(FinishRanks(&ranks), expected) << cluster[0].Log() << "\n---\n" << cluster[1].Log();
  ExpectFiveSteps(&cluster);
}
TEST(PeerDeath, CoordinatorInTheMiddleOfAnUpload) { KillAmidTheUpload(kCoordinator); }
TEST(PeerDeath, OtherInTheMiddleOfAnUpload) { KillAmidTheUpload(kOther); }

// --- The network.

void AwaitWaitsFor(DaemonProcess* daemon, const std::string& text) {
  while (daemon->Job("toy").waits_for().find(text) == std::string::npos) {
    ASSERT_TRUE(daemon->Alive());
  }
}

TEST(PeerNetwork, PartitionMakesBothWaitAndNobodyGuess) {
  Cluster cluster(2);
  cluster[0].ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1});
  cluster[0].AwaitFailpoint("step.decide.before");
  cluster.Partition(1);
  cluster[0].ReleaseFailpoint("step.decide.before");
  const absl::Time cut = absl::Now();
  // Until both have noticed, which takes longer than any step, and on until 30 s are over.
  AwaitWaitsFor(&cluster[0], "daemon b (which is not reached");
  AwaitWaitsFor(&cluster[1], "daemon a (which is not reached");
  do {
    const v1::JobStatus a = cluster[0].Job("toy"), b = cluster[1].Job("toy");
    ASSERT_EQ(a.committed_step(), 3u);  // it had all that it needed
    ASSERT_EQ(b.committed_step(), 2u);  // prepared, and waits
    ASSERT_FALSE(b.peers(0).answered());
    ASSERT_NE(a.waits_for().find("daemon b (which is not reached"), std::string::npos);
    ASSERT_NE(b.waits_for().find("daemon a (which is not reached"), std::string::npos);
  } while (absl::Now() - cut < absl::Seconds(30));
  cluster.Heal(1);
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  ExpectFiveSteps(&cluster);
  EXPECT_EQ(cluster[0].Job("toy").recomputed_steps(), 0u);
  EXPECT_EQ(cluster[0].Job("toy").generation(), 2u);  // all ranks have closed
}

TEST(PeerNetwork, ConnectionsThatBreakAgainAndAgain) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=40"});
  for (const auto& rank : ranks) ASSERT_NE(rank->AwaitLine("open"), "");
  for (int i = 0; i < 20; ++i) {
    const uint64_t step = cluster[0].Job("toy").committed_step();
    if (step >= 40) break;
    cluster.network(static_cast<size_t>(i % 2)).BreakConnections();
  }
  const std::string digest = FinishRanks(&ranks);
  EXPECT_EQ(cluster[0].Job("toy").committed_step(), 40u);
  EXPECT_EQ(cluster[0].Job("toy").recomputed_steps(), 0u);
  DaemonProcess alone;
  Processes one;
  one.push_back(std::make_unique<RankProcess>(alone.socket(), 0, 1,
                                              std::vector<std::string>{"--job=toy", "--steps=40"}));
  EXPECT_EQ(FinishRanks(&one), digest);
}

// --- Live resharding.

// Two steps on 2 + 2 ranks, three on 2 + 1.
TEST(PeerReshard, FourRanksBecomeThreeAndTheCurveGoesOn) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  EXPECT_EQ(cluster[0].Job("toy").own_chunks(), 2u);
  ranks = StartRanks(&cluster, {0, 0, 1});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  ExpectFiveSteps(&cluster);
  // Chunks 0, 1, 2..3 lie with ranks 0, 1, 2.
  EXPECT_EQ(cluster[0].Job("toy").own_chunks() + cluster[1].Job("toy").own_chunks(), 4u);
}

TEST(PeerReshard, AllMovesToTheOtherDaemonAndItsMemoryIsFreed) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  const uint64_t before = cluster[1].Info().planned_bytes();
  ranks = StartRanks(&cluster, {0, 0});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  EXPECT_EQ(cluster[0].Job("toy").own_chunks(), 4u);
  // Which hears of it when it comes to that: no rank of this group is with it.
  while (cluster[1].Job("toy").own_chunks() > 0) ASSERT_TRUE(cluster[1].Alive());
  EXPECT_LT(cluster[1].Info().planned_bytes(), before);
}

void KillWhileMoving(const std::string& point, size_t victim) {
  const std::string& expected = Undisturbed();
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  cluster[victim].ArmFailpoint(point, "kill");
  ranks = StartRanks(&cluster, {0, 1, 1});
  cluster.AwaitDeath(victim);
  cluster.Start(victim);
  EXPECT_EQ(FinishRanks(&ranks), expected) << cluster[0].Log() << "\n---\n" << cluster[1].Log();
  ExpectFiveSteps(&cluster);
  EXPECT_EQ(cluster[0].Job("toy").own_chunks(), 1u);
  EXPECT_EQ(cluster[1].Job("toy").own_chunks(), 3u);
}
TEST(PeerReshard, ReceiverKilledWhenItHasStored) { KillWhileMoving("peer.reshard.stored", kOther); }
TEST(PeerReshard, CoordinatorKilledAfterTheCopy) {
  KillWhileMoving("reshard.after_copy", kCoordinator);
}
TEST(PeerReshard, CoordinatorKilledAfterTheRecord) {
  KillWhileMoving("reshard.after_record", kCoordinator);
}

// A job of one parameter of 4096 elements a row, one chunk each. Element values say where they
// were when they were written.
class Rows {
 public:
  Rows(Cluster* cluster, int64_t rows, const std::string& name)
      : cluster_(cluster), job_(SmallJob(name, 4)), rows_(rows) {
    parameter_.name = "w";
    parameter_.shape = {rows, 4096};
  }
  // Opens rank r at daemon where[r], uploads what is missing, and closes. Returns what rank 0
  // reads. `before_read` is called on each rank's thread.
  std::vector<float> Run(
      const std::vector<size_t>& where, const std::vector<float>& initial,
      const std::function<void(uint32_t rank)>& before_read = [](uint32_t) {}) {
    std::vector<float> read;
    ForEachRank(static_cast<uint32_t>(where.size()), [&](uint32_t rank) {
      auto session = Session::Open(
          RankOptions((*cluster_)[where[rank]].socket(), rank, static_cast<uint32_t>(where.size())),
          job_, {parameter_});
      ASSERT_TRUE(session.ok()) << session.status();
      if ((*session)->initialising() && rank == 0) {
        const absl::Status uploaded = (*session)->Upload(0, 0, initial);
        ASSERT_TRUE(uploaded.ok()) << uploaded;
      }
      const absl::Status finished = (*session)->FinishUpload();
      ASSERT_TRUE(finished.ok()) << finished;
      before_read(rank);
      const std::vector<float> all = ReadAll(session->get(), StateKind::kMaster, 0);
      if (rank == 0) read = all;
      EXPECT_EQ(all, initial) << "rank " << rank;
      EXPECT_TRUE((*session)->Close().ok());
    });
    return read;
  }
  // Row i holds the rank of its shard among `world`, or i itself.
  std::vector<float> Values(uint32_t world) const {
    std::vector<float> values(static_cast<size_t>(rows_) * 4096);
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t row = i / 4096;
      uint32_t rank = 0;
      while (world > 0 && (rank + 1) * static_cast<size_t>(rows_) / world <= row) ++rank;
      values[i] = world > 0 ? static_cast<float>(rank) : static_cast<float>(i);
    }
    return values;
  }

 private:
  Cluster* cluster_;
  JobOptions job_;
  ParameterSpec parameter_;
  int64_t rows_;
};

TEST(PeerReshard, ShardValueIsRankAndEveryValueStaysInItsPlace) {
  Cluster cluster(2);
  Rows rows(&cluster, 12, "places");
  const std::vector<float> values = rows.Values(4);
  rows.Run({0, 0, 1, 1}, values);
  EXPECT_EQ(cluster[0].Job("places").own_chunks(), 6u);
  EXPECT_EQ(rows.Run({0, 0, 1}, values), values);
  EXPECT_EQ(cluster[0].Job("places").own_chunks(), 8u);
  EXPECT_EQ(cluster[1].Job("places").own_chunks(), 4u);
  EXPECT_EQ(rows.Run({1, 0, 1}, values), values);  // two ranges at one daemon
  EXPECT_EQ(cluster[0].Job("places").own_chunks(), 4u);
}

TEST(PeerReshard, FiveRowsOverTwoTimesTwoAndNoneIsLost) {
  Cluster cluster(2);
  Rows rows(&cluster, 5, "five");
  const std::vector<float> values = rows.Values(0);
  EXPECT_EQ(rows.Run({0, 0, 1, 1}, values), values);
  EXPECT_EQ(cluster[0].Job("five").own_chunks() + cluster[1].Job("five").own_chunks(), 5u);
  EXPECT_EQ(rows.Run({1, 1, 0, 0}, values), values);
  EXPECT_EQ(rows.Run({0, 1}, values), values);
  EXPECT_EQ(rows.Run({1}, values), values);
  EXPECT_EQ(cluster[1].Job("five").own_chunks(), 5u);
}

TEST(PeerReshard, DaemonThatDiesWhileItIsAskedForStateIsAskedAgain) {
  Cluster cluster(2);
  Rows rows(&cluster, 4, "asked");
  const std::vector<float> values = rows.Values(0);
  std::latch frozen(1), asks(1);
  EXPECT_EQ(rows.Run({0, 1}, values,
                     [&](uint32_t rank) {
                       if (rank == 0) {
                         frozen.wait();
                         asks.count_down();
                         return;
                       }
                       kill(cluster[1].pid(), SIGSTOP);
                       frozen.count_down();
                       asks.wait();
                       // The question is behind these.
                       for (int i = 0; i < 20; ++i) cluster[0].Job("asked");
                       cluster.Kill(1);
                       cluster.Start(1);
                     }),
            values);
}

// --- Hand-over, and those who missed it.

TEST(PeerHandover, TheOtherDaemonGoesOnAsCoordinator) {
  Cluster cluster(2);
  cluster[0].ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1});
  cluster[0].AwaitFailpoint("step.decide.before");
  cluster[0].ReleaseFailpoint("step.decide.before");
  const grpc::Status status = cluster[0].HandOver("toy", "b");
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed()) << cluster[0].Log() << "\n---\n"
                                                << cluster[1].Log();
  ExpectFiveSteps(&cluster);
  for (size_t i : {0, 1}) EXPECT_EQ(cluster[i].Job("toy").coordinator(), "b");
  // And it stays there through a restart of both.
  for (size_t i : {0, 1}) {
    cluster.Kill(i);
    cluster.Start(i);
  }
  for (size_t i : {0, 1}) EXPECT_EQ(cluster[i].Job("toy").coordinator(), "b");
  EXPECT_EQ(cluster[0].HandOver("toy", "b").error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

void KillAtHandover(const std::string& point, const std::string& coordinator) {
  const std::string& expected = Undisturbed();
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  cluster[1].ArmFailpoint(point, "kill");
  std::thread handing([&] { cluster[0].HandOver("toy", "b"); });
  cluster.AwaitDeath(1);
  cluster.Start(1);
  handing.join();
  ranks = StartRanks(&cluster, {0, 0, 1, 1});
  EXPECT_EQ(FinishRanks(&ranks), expected);
  ExpectFiveSteps(&cluster);
  for (size_t i : {0, 1}) EXPECT_EQ(cluster[i].Job("toy").coordinator(), coordinator);
}
TEST(PeerHandover, ReceiverKilledBeforeItAccepts) {
  KillAtHandover("peer.handover.before_accept", "a");
}
TEST(PeerHandover, ReceiverKilledAfterItAccepted) {
  KillAtHandover("peer.handover.after_accept", "b");
}

// A daemon's links without the daemon.
class RawPeer {
 public:
  RawPeer(const Cluster& cluster, const std::string& name, const std::string& to, uint16_t port) {
    peer::Links::Options options;
    options.config.set_name(name);
    options.config.set_listen("127.0.0.1:0");
    auto* peer = options.config.add_peers();
    peer->set_name(to);
    peer->set_address("127.0.0.1:" + std::to_string(port));
    options.config.set_ca(cluster.certificates() + "/ca.pem");
    options.config.set_certificate(cluster.certificates() + "/" + name + ".pem");
    options.config.set_key(cluster.certificates() + "/" + name + ".key");
    options.now = [] { return absl::Now(); };
    options.log = [](const std::string&) {};
    options.on_message = [](const std::string&, peer::Message) {};
    options.on_new_process = [](const std::string&) {};
    links_ = *peer::Links::Listen(std::move(options));
    links_->Start();
  }
  ~RawPeer() { links_->Stop(); }
  void Send(const std::string& to, v1::PeerMessage header, const std::string& bytes = "") {
    links_->Send(to, {std::move(header), bytes});
  }

 private:
  std::unique_ptr<peer::Links> links_;
};

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// The certificate is right, and the name is configured, but the job is not its.
TEST(PeerHostile, MessagesForAJobThatThePeerTakesNoPartIn) {
  Cluster cluster(1, {"z"});
  Processes ranks = StartRanks(&cluster, {0}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  const v1::JobStatus job = cluster[0].Job("toy");
  RawPeer z(cluster, "z", "a", cluster.port(0));
  v1::PeerMessage weights;
  weights.set_job("toy");
  weights.set_job_id(FromHex(job.job_id()));
  weights.set_timeline(job.timeline());
  weights.mutable_weights()->set_count(1024);
  weights.mutable_weights()->set_applied(9);
  z.Send("a", weights, std::string(4096, 'x'));
  while (cluster[0].Info().refused_peer_messages() < 1) ASSERT_TRUE(cluster[0].Alive());
  // Of no job at all.
  weights.set_job("nothing");
  z.Send("a", weights, std::string(4096, 'x'));
  while (cluster[0].Info().refused_peer_messages() < 2) ASSERT_TRUE(cluster[0].Alive());
  // Of another job of that name.
  weights.set_job("toy");
  weights.set_timeline(job.timeline() + 1);
  z.Send("a", weights, std::string(4096, 'x'));
  while (cluster[0].Info().fenced_peer_messages() < 1) ASSERT_TRUE(cluster[0].Alive());
  // Only a coordinator gives orders.
  v1::PeerMessage order;
  order.set_job("toy");
  order.set_job_id(FromHex(job.job_id()));
  order.set_timeline(job.timeline());
  order.set_epoch(1);
  order.set_generation(77);
  order.mutable_new_generation();
  z.Send("a", order);
  while (cluster[0].Info().fenced_peer_messages() < 2) ASSERT_TRUE(cluster[0].Alive());
  EXPECT_LT(cluster[0].Job("toy").generation(), 77u);
  ranks = StartRanks(&cluster, {0});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
}

TEST(PeerHostile, ClientsWithoutACertificateOrWithAWrongOne) {
  Cluster cluster(1, {"z"});
  Cluster other(1);  // of another authority
  auto channel = grpc::CreateChannel("127.0.0.1:" + std::to_string(cluster.port(0)),
                                     grpc::InsecureChannelCredentials());
  channel->GetState(true);
  while (cluster[0].Info().refused_peer_connections() < 1) ASSERT_TRUE(cluster[0].Alive());
  const uint64_t before = cluster[0].Info().refused_peer_connections();
  RawPeer wrong(other, "a", "z", cluster.port(0));
  while (cluster[0].Info().refused_peer_connections() <= before) ASSERT_TRUE(cluster[0].Alive());
  EXPECT_EQ(cluster[0].Info().refused_peer_messages(), 0u);
}

// Daemon b sleeps while the job is deleted and made anew elsewhere; what it says then is of a job
// that is no more.
TEST(PeerHostile, FrozenDaemonThatWakesAfterItsJobMovedIsFenced) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  kill(cluster[1].pid(), SIGSTOP);
  ASSERT_TRUE(cluster[0].DeleteJob("toy", true).ok());
  ranks = StartRanks(&cluster, {0, 0});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  kill(cluster[1].pid(), SIGCONT);
  // The order to delete it was not lost; one whose process had ended would be fenced.
  while (cluster[1].HasJob("toy")) ASSERT_TRUE(cluster[1].Alive());
  EXPECT_EQ(cluster[0].Job("toy").committed_step(), 5u);
}

TEST(PeerHostile, DaemonThatWasDownWhenItsJobWasMadeAnewIsFenced) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  cluster.Kill(1);
  ASSERT_TRUE(cluster[0].DeleteJob("toy", true).ok());
  ranks = StartRanks(&cluster, {0, 0});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  cluster.Start(1);
  ASSERT_TRUE(cluster[1].AwaitLog("went on without this daemon"));
  EXPECT_GE(cluster[0].Info().fenced_peer_messages(), 1u);
  EXPECT_EQ(cluster[1].Job("toy").state(), "failed");
  EXPECT_EQ(cluster[0].Job("toy").committed_step(), 5u);
  EXPECT_TRUE(cluster[1].DeleteJob("toy", false).ok());
}

// A coordinator that has been passed over goes on giving orders of its epoch.
TEST(PeerHostile, OrdersOfAFormerCoordinatorAreFenced) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  ASSERT_TRUE(cluster[0].HandOver("toy", "b").ok());
  const v1::JobStatus job = cluster[1].Job("toy");
  cluster.Kill(0);
  {
    RawPeer former(cluster, "a", "b", cluster.port(1));
    v1::PeerMessage order;
    order.set_job("toy");
    order.set_job_id(FromHex(job.job_id()));
    order.set_timeline(job.timeline());
    order.set_epoch(1);
    order.set_generation(job.generation() + 50);
    order.mutable_new_generation()->set_why("it does not know better");
    former.Send("b", order);
    while (cluster[1].Info().fenced_peer_messages() < 1) ASSERT_TRUE(cluster[1].Alive());
  }
  EXPECT_LT(cluster[1].Job("toy").generation(), job.generation() + 50);
  cluster.Start(0);
  ranks = StartRanks(&cluster, {0, 0, 1, 1});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
}

// --- Looking at it, deleting it.

TEST(PeerCases, StatusOfTheWholeJobFromAnyDaemon) {
  Cluster cluster(2);
  cluster[0].ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1});
  cluster[0].AwaitFailpoint("step.decide.before");
  const v1::JobStatus seen = cluster[1].Job("toy");  // a is held: it does not answer in time
  ASSERT_EQ(seen.peers_size(), 1);
  EXPECT_EQ(seen.peers(0).daemon(), "a");
  EXPECT_FALSE(seen.peers(0).answered());
  cluster[0].ReleaseFailpoint("step.decide.before");
  FinishRanks(&ranks);
  for (size_t i : {0, 1}) {
    const v1::JobStatus job = cluster[i].Job("toy");
    ASSERT_EQ(job.peers_size(), 1);
    EXPECT_TRUE(job.peers(0).answered());
    EXPECT_EQ(job.peers(0).daemon(), Cluster::Name(1 - i));
    EXPECT_EQ(job.peers(0).committed_step(), 5u);
    EXPECT_EQ(job.peers(0).chunks(), 2u);
    EXPECT_GT(job.peers(0).held_bytes(), 0u);
  }
}

TEST(PeerCases, DeletedAtEveryDaemon) {
  Cluster cluster(2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1}, {"--job=toy", "--steps=2"});
  FinishRanks(&ranks);
  EXPECT_EQ(cluster[1].DeleteJob("toy", false).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  const grpc::Status deleted = cluster[0].DeleteJob("toy", false);
  ASSERT_TRUE(deleted.ok()) << deleted.error_message() << cluster[0].Log();
  EXPECT_FALSE(cluster[0].HasJob("toy"));
  while (cluster[1].HasJob("toy")) ASSERT_TRUE(cluster[1].Alive());
  // Its name is free everywhere.
  ranks = StartRanks(&cluster, {1, 1, 0, 0});
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
  EXPECT_EQ(cluster[0].Job("toy").coordinator(), "b");
}

TEST(PeerCases, RankAndWorldSizeConflictsAreRefusedAcrossDaemons) {
  Cluster cluster(2);
  cluster[0].ArmFailpoint("step.decide.before", "wait", 2);
  Processes ranks = StartRanks(&cluster, {0, 0, 1, 1});
  cluster[0].AwaitFailpoint("step.decide.before");
  cluster[0].ReleaseFailpoint("step.decide.before");
  RankProcess twice(cluster[0].socket(), 3, 4, {"--job=toy"});
  EXPECT_NE(twice.AwaitLine("error ALREADY_EXISTS"), "");
  RankProcess another(cluster[1].socket(), 3, 5, {"--job=toy", "--slots=5"});
  EXPECT_NE(another.AwaitLine("error FAILED_PRECONDITION"), "");
  twice.Wait();
  another.Wait();
  EXPECT_EQ(FinishRanks(&ranks), Undisturbed());
}

}  // namespace
}  // namespace shardd::test

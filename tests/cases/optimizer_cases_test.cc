// Every optimizer, and the formats of its state, through what a job goes through: ranks of any
// number, the daemon's death at any point, checkpoints, spilling, reading of its state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "proto/safetensors/reader.h"
#include "tests/support/cluster.h"
#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace shardd::test {
namespace {

using ::testing::HasSubstr;

// Two parameters over five chunks; the second begins in the middle of one.
std::vector<ParameterSpec> Model() {
  std::vector<ParameterSpec> model(2);
  model[0].name = "w";
  model[0].shape = {101, 64};
  model[1].name = "b";
  model[1].shape = {12000};
  return model;
}

JobOptions JobOf(const std::string& optimizer) {
  JobOptions job = SmallJob("opt", 4);
  job.optimizer = optimizer;
  job.groups = {{.name = "all",
                 .lr = 1e-2,
                 .beta1 = 0.9,
                 .beta2 = 0.95,
                 .eps = 1e-8,
                 .weight_decay = 0.01,
                 .momentum = 0.8,
                 .nesterov = optimizer == "sgd"}};
  job.grad_dtype = DType::kBFloat16;
  job.weight_dtype = DType::kBFloat16;
  job.max_norm = 1;
  return job;
}

struct Kind {
  const char* optimizer;
  std::vector<std::string> states;
  MomentFormat moments = MomentFormat::kFloat32;
  bool split = false;
  bool stochastic_moments = false;
  bool stochastic_weights = false;
};

const Kind kKinds[] = {
    {"adagrad", {"sum"}},
    {"adam", {"exp_avg", "exp_avg_sq"}},
    {"adam_amsgrad", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
    {"adamw", {"exp_avg", "exp_avg_sq"}},
    {"adamw_amsgrad", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
    {"lamb", {"exp_avg", "exp_avg_sq"}},
    {"lion", {"exp_avg"}},
    {"rmsprop", {"square_avg", "momentum_buffer"}},
    {"sgd", {"momentum_buffer"}},
};
// In other formats than fp32.
const Kind kFormats[] = {
    {"adamw", {"exp_avg", "exp_avg_sq"}, MomentFormat::kBFloat16, true},
    {"adam_amsgrad", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, MomentFormat::kBFloat16, false},
    {"lamb", {"exp_avg", "exp_avg_sq"}, MomentFormat::kBFloat16, true},
    {"lion", {"exp_avg"}, MomentFormat::kFloat32, true},
    {"adamw", {"exp_avg", "exp_avg_sq"}, MomentFormat::kBFloat16, true, true},
    {"adamw", {"exp_avg", "exp_avg_sq"}, MomentFormat::kBFloat16, false, true, true},
};

std::string NameOf(const testing::TestParamInfo<Kind>& info) {
  const Kind& kind = info.param;
  return std::string(kind.optimizer) +
         (kind.moments == MomentFormat::kBFloat16 ? "_bf16" : "_fp32") +
         (kind.split ? "_split" : "") + (kind.stochastic_moments ? "_rounded" : "") +
         (kind.stochastic_weights ? "_weights" : "");
}

JobOptions JobOf(const Kind& kind) {
  JobOptions job = JobOf(std::string(kind.optimizer));
  job.moments = kind.moments;
  job.split_master = kind.split;
  job.stochastic_moments = kind.stochastic_moments;
  job.stochastic_weights = kind.stochastic_weights;
  if (kind.stochastic_moments || kind.stochastic_weights) job.seed = 7;
  return job;
}

constexpr uint64_t kSteps = 5;

float GradOf(uint64_t step, uint32_t slot, size_t parameter, uint64_t element) {
  return std::sin(static_cast<float>(step * 131 + slot * 17 + parameter * 7 + element % 1009));
}

// All of the state, to the bit.
using State = std::vector<std::vector<float>>;

bool SameBits(const State& a, const State& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size() ||
        std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) != 0) {
      return false;
    }
  }
  return true;
}

State ReadState(Session* session, size_t num_states) {
  State state;
  for (size_t p = 0; p < session->num_parameters(); ++p) {
    for (size_t k = 0; k <= num_states; ++k) {
      state.push_back(ReadAll(session, static_cast<StateKind>(1 + k), p));
    }
  }
  return state;
}

// One step of this rank, again after a regroup.
void OneStep(Session* session) {
  const uint64_t step = session->next_step();
  while (session->next_step() == step) {
    const auto decision =
        TakeStep(session, DType::kBFloat16,
                 [&](uint32_t slot, size_t p, uint64_t i) { return GradOf(step, slot, p, i); });
    ASSERT_TRUE(decision.ok() || GetRegrouped(decision.status())) << decision.status();
  }
}

class OptimizerCases : public testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<DaemonProcess> StartDaemon(std::vector<std::string> flags = {}) {
    DaemonProcess::Options options;
    options.state_directory = state_.path() + "/state";
    options.socket = state_.path() + "/d.sock";
    options.flags = std::move(flags);
    options.flags.push_back("--checkpoint.directory=" + disk_.path() + "/ckpt");
    return std::make_unique<DaemonProcess>(options);
  }
  static std::unique_ptr<Session> Open(const std::string& socket, uint32_t rank, uint32_t world) {
    return OpenRank(socket, rank, world, JobOf(GetParam()), Model(), 0.5f);
  }
  static size_t num_states() { return GetParam().states.size(); }

  // The state after kSteps on one rank of an undisturbed daemon.
  static State Undisturbed() {
    DaemonProcess daemon;
    auto session = Open(daemon.socket(), 0, 1);
    while (session->next_step() <= kSteps) OneStep(session.get());
    State state = ReadState(session.get(), num_states());
    EXPECT_TRUE(session->Close().ok());
    return state;
  }
  int Ctl(const DaemonProcess& daemon, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), Runfile("client/cli/shardctl"));
    arguments.push_back("--address=" + daemon.socket());
    const Finished done = RunProgram(arguments);
    err_ = done.err;
    return done.code;
  }

  TempDir state_{"/dev/shm"};
  TempDir disk_{"/tmp"};
  std::string err_;
};

TEST_P(OptimizerCases, TheSameBitsOn1And3And4Ranks) {
  const State expected = Undisturbed();
  for (const auto& array : expected) {
    for (const float value : array) ASSERT_TRUE(std::isfinite(value));
  }
  EXPECT_NE(expected[0][0], 0.5f);  // it trains
  for (const uint32_t world : {3u, 4u}) {
    DaemonProcess daemon;
    ForEachRank(world, [&](uint32_t rank) {
      auto session = Open(daemon.socket(), rank, world);
      while (session->next_step() <= kSteps) OneStep(session.get());
      if (rank == world - 1) {
        EXPECT_TRUE(SameBits(ReadState(session.get(), num_states()), expected)) << world;
      }
      EXPECT_TRUE(session->Close().ok());
    });
  }
}

TEST_P(OptimizerCases, TheDaemonDiesInTheMiddleOfAnUpdateAndRedoesIt) {
  const State expected = Undisturbed();
  for (const char* point : {"step.decide.after_record", "step.update.after_chunk"}) {
    auto daemon = StartDaemon();
    auto session = Open(daemon->socket(), 0, 1);
    OneStep(session.get());
    OneStep(session.get());
    // At the third chunk that is updated from now on.
    daemon->ArmFailpoint(point, "kill", point == std::string("step.update.after_chunk") ? 2 : 0);
    std::thread successor([&] {
      daemon->AwaitDeath();
      daemon.reset();
      daemon = StartDaemon();
    });
    while (session->next_step() <= kSteps) OneStep(session.get());
    successor.join();
    EXPECT_TRUE(SameBits(ReadState(session.get(), num_states()), expected)) << point;
    EXPECT_TRUE(session->Close().ok());
    EXPECT_TRUE(daemon->DeleteJob("opt", true).ok());
  }
}

TEST_P(OptimizerCases, TheMachineDiesAndTheJournalBringsItBack) {
  const State expected = Undisturbed();
  const std::string flag = "--journal.directory=" + disk_.path() + "/journal";
  auto daemon = StartDaemon({flag});
  auto session = Open(daemon->socket(), 0, 1);
  while (session->next_step() <= 3) OneStep(session.get());
  session.reset();
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  daemon.reset();
  std::filesystem::remove_all(state_.path() + "/state");
  daemon = StartDaemon({flag});
  session = Open(daemon->socket(), 0, 1);
  EXPECT_EQ(session->next_step(), 4u);
  while (session->next_step() <= kSteps) OneStep(session.get());
  EXPECT_TRUE(SameBits(ReadState(session.get(), num_states()), expected));
  EXPECT_TRUE(session->Close().ok());
}

TEST_P(OptimizerCases, SavedByTheNamesOfItsStatesAndRestored) {
  const State expected = Undisturbed();
  auto daemon = StartDaemon();
  auto session = Open(daemon->socket(), 0, 1);
  while (session->next_step() <= 3) OneStep(session.get());
  const State at_three = ReadState(session.get(), num_states());
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "opt"}), 0) << err_;
  ASSERT_TRUE(session->Close().ok());
  for (size_t k = 0; k < num_states(); ++k) {
    const std::string& name = GetParam().states[k];
    const auto file = safetensors::Reader::Open(disk_.path() + "/ckpt/opt/step-0000000003/" + name +
                                                "-00001-of-00001.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    const auto values = (*file)->Values<float>("b." + name, safetensors::DType::kF32);
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_TRUE(SameBits({*values}, {at_three[num_states() + 2 + k]})) << name;
  }
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "restore", "opt", "--replace"}), 0) << err_;
  ForEachRank(2, [&](uint32_t rank) {
    auto restored = Open(daemon->socket(), rank, 2);
    EXPECT_EQ(restored->next_step(), 4u);
    while (restored->next_step() <= kSteps) OneStep(restored.get());
    if (rank == 0) {
      EXPECT_TRUE(SameBits(ReadState(restored.get(), num_states()), expected));
    }
    EXPECT_TRUE(restored->Close().ok());
  });
}

TEST_P(OptimizerCases, SpilledAndTakenBack) {
  const State expected = Undisturbed();
  auto daemon =
      StartDaemon({"--job_ttl_seconds=0.2", "--spill.directory=" + disk_.path() + "/spill"});
  auto session = Open(daemon->socket(), 0, 1);
  while (session->next_step() <= 3) OneStep(session.get());
  ASSERT_TRUE(session->Close().ok());
  session.reset();
  ASSERT_TRUE(daemon->AwaitLog("job opt: unused for job_ttl_seconds"));
  session = Open(daemon->socket(), 0, 1);
  EXPECT_EQ(session->next_step(), 4u);
  while (session->next_step() <= kSteps) OneStep(session.get());
  EXPECT_TRUE(SameBits(ReadState(session.get(), num_states()), expected));
  EXPECT_TRUE(session->Close().ok());
}

TEST_P(OptimizerCases, AStateThatItLacksIsRefused) {
  DaemonProcess daemon;
  auto session = Open(daemon.socket(), 0, 1);
  std::vector<float> values(4);
  for (size_t k = num_states(); k < 3; ++k) {
    const absl::Status status =
        session->ReadState(static_cast<StateKind>(2 + k), 0, 0, std::span<float>(values));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().optimizer));
  }
  EXPECT_TRUE(session->Close().ok());
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerCases, testing::ValuesIn(kKinds),
                         [](const auto& info) { return std::string(info.param.optimizer); });
INSTANTIATE_TEST_SUITE_P(Formats, OptimizerCases, testing::ValuesIn(kFormats), NameOf);

// Masters, moments and working weights of adamw after kSteps, and what the daemon holds.
struct Trained {
  State state;
  std::vector<std::byte> weights;
  uint64_t state_bytes = 0;
};

Trained TrainIn(MomentFormat moments, bool split) {
  DaemonProcess daemon;
  auto session =
      OpenRank(daemon.socket(), 0, 1, JobOf({"adamw", {"exp_avg", "exp_avg_sq"}, moments, split}),
               Model(), 0.5f);
  while (session->next_step() <= kSteps) OneStep(session.get());
  Trained trained;
  trained.state = ReadState(session.get(), 2);
  for (size_t p = 0; p < session->num_parameters(); ++p) {
    const auto there = session->WaitWeights(p);
    EXPECT_TRUE(there.ok()) << there.status();
    const auto* weights = static_cast<const std::byte*>(*there);
    trained.weights.insert(trained.weights.end(), weights,
                           weights + trained.state[3 * p].size() * 2);
  }
  trained.state_bytes = daemon.Job("opt").state_bytes();
  EXPECT_TRUE(session->Close().ok());
  return trained;
}

TEST(StateFormatCases, ASplitMasterGivesTheBitsOfAnFp32OneInLessMemory) {
  for (const MomentFormat moments : {MomentFormat::kFloat32, MomentFormat::kBFloat16}) {
    const Trained whole = TrainIn(moments, false), split = TrainIn(moments, true);
    EXPECT_TRUE(SameBits(split.state, whole.state));
    EXPECT_EQ(split.weights, whole.weights);
    // Five chunks of 4096 elements, the low halves alone.
    EXPECT_EQ(split.state_bytes + 5 * 4096 * 2, whole.state_bytes);
  }
}

TEST(StateFormatCases, MomentsOfBf16AreRoundedAndTakeHalf) {
  const Trained fp32 = TrainIn(MomentFormat::kFloat32, false);
  const Trained bf16 = TrainIn(MomentFormat::kBFloat16, false);
  EXPECT_EQ(bf16.state_bytes + 2 * 5 * 4096 * 2, fp32.state_bytes);
  for (size_t a = 0; a < fp32.state.size(); ++a) {
    if (a % 3 == 0) continue;
    float largest = 0;
    for (const float value : fp32.state[a]) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < fp32.state[a].size(); ++i) {
      const float rounded = bf16.state[a][i], exact = fp32.state[a][i];
      uint32_t bits = 0;
      std::memcpy(&bits, &rounded, sizeof(bits));
      ASSERT_EQ(bits & 0xFFFF, 0u) << "state " << a << " element " << i;
      ASSERT_NEAR(rounded, exact, largest / 64) << "state " << a << " element " << i;
    }
  }
}

TEST(StateFormatCases, ASplitMasterWithWeightsThatAreNotBf16IsRefused) {
  DaemonProcess daemon;
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    JobOptions job = JobOf("adamw");
    job.weight_dtype = dtype;
    job.split_master = true;
    const auto session = Session::Open(RankOptions(daemon.socket(), 0, 1), job, Model());
    EXPECT_EQ(session.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(session.status().message()), HasSubstr("weight_dtype = bf16"));
  }
}

// Weights too: after a restart they are cast anew, the same way.
TEST(StateFormatCases, WeightsRoundedStochasticallyAreTheSameAfterTheDaemonsDeath) {
  JobOptions job = JobOf("adamw");
  job.stochastic_weights = true;
  job.seed = 3;
  TempDir state{"/dev/shm"};
  DaemonProcess::Options options;
  options.state_directory = state.path() + "/state";
  options.socket = state.path() + "/d.sock";
  auto daemon = std::make_unique<DaemonProcess>(options);
  const auto weights_of = [](Session* session) {
    std::vector<uint16_t> weights;
    for (size_t p = 0; p < session->num_parameters(); ++p) {
      const auto there = session->WaitWeights(p);
      EXPECT_TRUE(there.ok()) << there.status();
      const auto* of_parameter = static_cast<const uint16_t*>(*there);
      weights.insert(weights.end(), of_parameter, of_parameter + (p == 0 ? 101 * 64 : 12000));
    }
    return weights;
  };
  auto session = OpenRank(daemon->socket(), 0, 1, job, Model(), 0.5f);
  while (session->next_step() <= kSteps) OneStep(session.get());
  const std::vector<uint16_t> before = weights_of(session.get());
  // A neighbour of the master each, some rounded up and some down.
  size_t up = 0, down = 0, at = 0;
  for (size_t p = 0; p < session->num_parameters(); ++p) {
    for (const float master : ReadAll(session.get(), StateKind::kMaster, p)) {
      uint32_t bits = 0;
      std::memcpy(&bits, &master, sizeof(bits));
      const uint32_t below = bits >> 16, weight = before[at++];
      ASSERT_TRUE(weight == below || weight == below + 1) << at;
      if ((bits & 0xFFFF) == 0) continue;
      ++(weight == below ? down : up);
    }
  }
  EXPECT_GT(up, before.size() / 4);
  EXPECT_GT(down, before.size() / 4);
  session.reset();
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  daemon.reset();
  daemon = std::make_unique<DaemonProcess>(options);
  session = OpenRank(daemon->socket(), 0, 1, job, Model(), 0.5f);
  EXPECT_EQ(session->next_step(), kSteps + 1);
  EXPECT_EQ(weights_of(session.get()), before);
  EXPECT_TRUE(session->Close().ok());
}

TEST(StateFormatCases, StochasticRoundingOfWhatIsNotRoundedIsRefused) {
  DaemonProcess daemon;
  const auto refusal = [&](const std::function<void(JobOptions*)>& change) {
    JobOptions job = JobOf("adamw");
    change(&job);
    const auto session = Session::Open(RankOptions(daemon.socket(), 0, 1), job, Model());
    EXPECT_EQ(session.status().code(), absl::StatusCode::kInvalidArgument) << session.status();
    return std::string(session.status().message());
  };
  EXPECT_THAT(refusal([](JobOptions* job) { job->stochastic_moments = true; }),
              HasSubstr("give moments = bf16"));
  EXPECT_THAT(refusal([](JobOptions* job) {
                job->stochastic_weights = true;
                job->weight_dtype = DType::kFloat16;
              }),
              HasSubstr("give weight_dtype = bf16"));
  EXPECT_THAT(refusal([](JobOptions* job) { job->stochastic_weights = job->split_master = true; }),
              HasSubstr("give split_master = false"));
  EXPECT_THAT(refusal([](JobOptions* job) { job->seed = 5; }), HasSubstr("leave seed out"));
}

TEST(StateFormatCases, AnotherFormatIsAnotherJob) {
  DaemonProcess daemon;
  auto session = OpenRank(daemon.socket(), 0, 1, JobOf("adamw"), Model(), 0.5f);
  EXPECT_TRUE(session->Close().ok());
  JobOptions job = JobOf("adamw");
  job.moments = MomentFormat::kBFloat16;
  job.split_master = true;
  const auto other = Session::Open(RankOptions(daemon.socket(), 0, 1), job, Model());
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition) << other.status();
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("moments: "));
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("split_master: "));
}

TEST(OptimizerNames, AnUnknownOneIsRefusedWithThoseThatThereAre) {
  DaemonProcess daemon;
  JobOptions job = JobOf("adamv");
  const auto session = Session::Open(RankOptions(daemon.socket(), 0, 1), job, Model());
  EXPECT_EQ(session.status().code(), absl::StatusCode::kInvalidArgument);
  for (const Kind& kind : kKinds) {
    EXPECT_THAT(std::string(session.status().message()), HasSubstr(kind.optimizer));
  }
}

TEST(OptimizerNames, ZeroEpsIsRefusedOnlyWhereItDivides) {
  DaemonProcess daemon;
  for (const Kind& kind : kKinds) {
    JobOptions job = JobOf(kind.optimizer);
    job.name = kind.optimizer;
    job.groups[0].eps = 0;
    const auto session = Session::Open(RankOptions(daemon.socket(), 0, 1), job, Model());
    const bool divides = job.optimizer != "sgd" && job.optimizer != "lion";
    EXPECT_EQ(!session.ok(), divides) << job.optimizer << ": " << session.status();
    if (divides) {
      EXPECT_THAT(std::string(session.status().message()), HasSubstr("groups[0].hyper.eps is 0"));
    }
  }
}

// --- Daemons that share a job.

TEST(SharedOptimizerCases, ThreeStatesOverTwoDaemonsAndLambRefused) {
  State expected;
  {
    DaemonProcess daemon;
    auto session = OpenRank(daemon.socket(), 0, 1, JobOf("adam_amsgrad"), Model(), 0.5f);
    while (session->next_step() <= kSteps) OneStep(session.get());
    expected = ReadState(session.get(), 3);
    EXPECT_TRUE(session->Close().ok());
  }
  Cluster cluster(2);
  cluster.AwaitLinks();
  ForEachRank(4, [&](uint32_t rank) {
    auto session =
        OpenRank(cluster[rank / 2].socket(), rank, 4, JobOf("adam_amsgrad"), Model(), 0.5f);
    while (session->next_step() <= kSteps) OneStep(session.get());
    if (rank == 3) {
      EXPECT_TRUE(SameBits(ReadState(session.get(), 3), expected));
    }
    EXPECT_TRUE(session->Close().ok());
  });
  JobOptions lamb = JobOf("lamb");
  lamb.name = "lamb";
  const auto session = Session::Open(RankOptions(cluster[0].socket(), 0, 1), lamb, Model());
  EXPECT_EQ(session.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(session.status().message()), HasSubstr("optimizer lamb"));
}

// Chunks go to the daemon with more ranks and are dealt out again: with their working weights,
// which are a part of the state.
TEST(SharedStateFormatCases, ASplitMasterMovesWithItsChunks) {
  const Kind kind{"adamw", {"exp_avg", "exp_avg_sq"}, MomentFormat::kBFloat16, true};
  State expected;
  {
    DaemonProcess daemon;
    auto session = OpenRank(daemon.socket(), 0, 1, JobOf(kind), Model(), 0.5f);
    while (session->next_step() <= 6) OneStep(session.get());
    expected = ReadState(session.get(), 2);
    EXPECT_TRUE(session->Close().ok());
  }
  Cluster cluster(2);
  cluster.AwaitLinks();
  const auto train = [&](uint32_t world, auto daemon_of, uint64_t last) {
    ForEachRank(world, [&](uint32_t rank) {
      auto session =
          OpenRank(cluster[daemon_of(rank)].socket(), rank, world, JobOf(kind), Model(), 0.5f);
      while (session->next_step() <= last && !testing::Test::HasFatalFailure()) {
        OneStep(session.get());
      }
      if (rank == world - 1 && last == 6) {
        EXPECT_TRUE(SameBits(ReadState(session.get(), 2), expected));
      }
      EXPECT_TRUE(session->Close().ok());
    });
  };
  const auto over_both = [](uint32_t rank) { return rank / 2; };
  train(4, over_both, 2);
  EXPECT_EQ(cluster[0].Job("opt").own_chunks(), 2u);
  const auto three_and_one = [](uint32_t rank) { return rank / 3; };
  train(4, three_and_one, 4);
  EXPECT_EQ(cluster[0].Job("opt").own_chunks(), 3u);
  train(4, over_both, 6);
  EXPECT_EQ(cluster[0].Job("opt").own_chunks(), 2u);
}

// --- A user's own.

class OwnOptimizerCases : public testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> StartDaemon(const std::string& libraries) {
    DaemonProcess::Options options;
    options.state_directory = state_.path() + "/state";
    options.socket = state_.path() + "/d.sock";
    options.flags = {"--optimizer_libraries=" + libraries,
                     "--checkpoint.directory=" + state_.path() + "/ckpt"};
    return std::make_unique<DaemonProcess>(options);
  }
  // shardctl optimizer check.
  Finished Check(const std::string& path) {
    return RunProgram({Runfile("client/cli/shardctl"), "optimizer", "check", path});
  }
  TempDir state_{"/dev/shm"};
  const std::string example_ = Runfile("deploy/examples/adabelief.so");
};

TEST_F(OwnOptimizerCases, TheExampleTrainsThroughTheDaemonsDeath) {
  State undisturbed, state;
  for (const bool dies : {false, true}) {
    auto daemon = StartDaemon(example_);
    EXPECT_THAT(daemon->Log(), HasSubstr("optimizer adabelief is loaded"));
    auto session = OpenRank(daemon->socket(), 0, 1, JobOf("adabelief"), Model(), 0.5f);
    OneStep(session.get());
    std::thread successor;
    if (dies) {
      daemon->ArmFailpoint("step.update.after_chunk", "kill", 2);
      successor = std::thread([&] {
        daemon->AwaitDeath();
        daemon.reset();
        daemon = StartDaemon(example_);
      });
    }
    while (session->next_step() <= kSteps) OneStep(session.get());
    if (dies) successor.join();
    (dies ? state : undisturbed) = ReadState(session.get(), 2);
    EXPECT_TRUE(session->Close().ok());
    EXPECT_TRUE(daemon->DeleteJob("opt", true).ok());
  }
  EXPECT_TRUE(SameBits(state, undisturbed));
  EXPECT_NE(state[0][0], 0.5f);
}

TEST_F(OwnOptimizerCases, ASoundOneIsSaidToBeSo) {
  const Finished done = Check(example_);
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr("adabelief"));
  EXPECT_THAT(done.out, HasSubstr("exp_avg_var"));
}

// Each is refused by the command and by the daemon, which lives and knows the good one.
TEST_F(OwnOptimizerCases, WhatIsNotSoundIsRefusedAndTheDaemonLives) {
  const std::pair<const char*, const char*> bad[] = {
      {"wrong_abi", "ABI version 99"},
      {"no_symbol", "no symbol shardd_optimizer"},
      {"not_elementwise", "not element-wise"},
      {"crashes", "it crashes: Segmentation fault"},
      {"taken_name", "adamw"},
  };
  std::string libraries = example_ + ":/nowhere/absent.so";
  for (const auto& [name, problem] : bad) {
    const std::string path = Runfile(std::string("tests/cases/bad_optimizer_") + name + ".so");
    libraries += ":" + path;
    const Finished done = Check(path);
    EXPECT_EQ(done.code, 1) << name;
    EXPECT_THAT(done.err, HasSubstr(problem)) << name;
  }
  auto daemon = StartDaemon(libraries);
  EXPECT_TRUE(daemon->Alive());
  for (const auto& [name, problem] : bad) {
    EXPECT_THAT(daemon->Log(), HasSubstr(std::string("bad_optimizer_") + name + ".so is refused"));
    EXPECT_THAT(daemon->Log(), HasSubstr(problem));
  }
  EXPECT_THAT(daemon->Log(), HasSubstr("/nowhere/absent.so is refused"));
  auto session = OpenRank(daemon->socket(), 0, 1, JobOf("adabelief"), Model(), 0.5f);
  OneStep(session.get());
  EXPECT_TRUE(session->Close().ok());
  const auto crashing =
      Session::Open(RankOptions(daemon->socket(), 0, 1), JobOf("crashes"), Model());
  EXPECT_THAT(std::string(crashing.status().message()), HasSubstr("'crashes' is unknown"));
}

// The daemon comes back without the object: the job is neither lost nor trained otherwise.
TEST_F(OwnOptimizerCases, ADaemonWithoutTheObjectLeavesTheJobAlone) {
  auto daemon = StartDaemon(example_);
  auto session = OpenRank(daemon->socket(), 0, 1, JobOf("adabelief"), Model(), 0.5f);
  OneStep(session.get());
  EXPECT_TRUE(session->Close().ok());
  session.reset();
  daemon.reset();
  daemon = StartDaemon("");
  EXPECT_THAT(daemon->Log(), HasSubstr("adabelief"));
  daemon.reset();
  daemon = StartDaemon(example_);
  session = OpenRank(daemon->socket(), 0, 1, JobOf("adabelief"), Model(), 0.5f);
  EXPECT_EQ(session->next_step(), 2u);
  EXPECT_TRUE(session->Close().ok());
}

}  // namespace
}  // namespace shardd::test

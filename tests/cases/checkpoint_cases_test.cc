// Saves, restores, exports and imports, through a real daemon, the public client and shardctl.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "proto/checkpoint/reader.h"
#include "proto/safetensors/reader.h"
#include "proto/safetensors/writer.h"
#include "server/env/faulty_file_system.h"
#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace shardd::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

ParameterSpec Named(const std::string& name, std::vector<int64_t> shape, uint32_t group = 0) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  spec.group = group;
  return spec;
}

// Three parameters in four chunks; the second is small, the third is tied.
std::vector<ParameterSpec> Model() {
  std::vector<ParameterSpec> model(3);
  model[0] = Named("wte", {100, 64});
  model[1] = Named("ln", {10});
  model[2] = Named("head", {64, 100});
  model[2].aliases = {"head.tied"};
  return model;
}

float Grad(uint64_t step, uint32_t slot, size_t parameter, uint64_t element) {
  return std::sin(static_cast<float>(step * 131 + slot * 17 + parameter * 7 + element % 97));
}

JobOptions TestJob(const std::string& name, uint32_t slots = 1) {
  JobOptions job = SmallJob(name, slots);
  job.groups = {ParameterGroup{"all", 1e-2, 0.9, 0.999, 1e-8, 0.01}};
  return job;
}

// What is compared after a restore: all of the state, to the bit.
struct State {
  std::vector<std::vector<float>> arrays;
  std::vector<uint64_t> applied;
  bool operator==(const State&) const = default;
};

State ReadState(Session* session) {
  State state;
  for (size_t p = 0; p < session->num_parameters(); ++p) {
    for (StateKind kind : {StateKind::kMaster, StateKind::kMoment0, StateKind::kMoment1}) {
      state.arrays.push_back(ReadAll(session, kind, p));
    }
    state.applied.push_back(*session->ParameterApplied(p));
  }
  return state;
}

class CheckpointCases : public testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> StartDaemon(std::vector<std::string> flags = {}) {
    DaemonProcess::Options options;
    options.flags = {"--checkpoint.directory=" + root()};
    options.flags.insert(options.flags.end(), flags.begin(), flags.end());
    return std::make_unique<DaemonProcess>(options);
  }
  std::string root() const { return dir_.path() + "/ckpt"; }
  std::string StepPath(const std::string& job, uint64_t step) const {
    char name[32];
    std::snprintf(name, sizeof(name), "/step-%010lu", static_cast<unsigned long>(step));
    return root() + "/" + job + name;
  }
  // shardctl with these arguments at the daemon: exit code; out_ and err_ are what it wrote.
  int Ctl(const DaemonProcess& daemon, std::vector<std::string> arguments) {
    arguments.push_back("--address=" + daemon.socket());
    return CtlOffline(std::move(arguments));
  }
  int CtlOffline(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), Runfile("client/cli/shardctl"));
    const Finished done = RunProgram(arguments);
    out_ = done.out;
    err_ = done.err;
    return done.code;
  }

  // Opens rank 0 of 1 of `job` with the model, uploads values that differ everywhere.
  static std::unique_ptr<Session> Open(const DaemonProcess& daemon, const JobOptions& job,
                                       const std::vector<ParameterSpec>& model = Model()) {
    auto session = Session::Open(RankOptions(daemon.socket(), 0, 1), job, model);
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return nullptr;
    if ((*session)->initialising()) {
      for (size_t p = 0; p < model.size(); ++p) {
        std::vector<float> values((*session)->parameter_elements(p));
        for (size_t i = 0; i < values.size(); ++i) values[i] = Grad(0, 9, p, i * 31);
        EXPECT_TRUE((*session)->Upload(p, 0, values).ok());
      }
    }
    EXPECT_TRUE((*session)->FinishUpload().ok());
    return *std::move(session);
  }
  static void Step(Session* session, const JobOptions& job, const std::string& blob = "") {
    StepReport report;
    report.slots.resize(session->slots().hi - session->slots().lo);
    report.blob = blob;
    const uint64_t step = session->next_step();
    const auto decision = TakeStep(
        session, job.grad_dtype,
        [&](uint32_t slot, size_t p, uint64_t i) { return Grad(step, slot, p, i); }, report);
    ASSERT_TRUE(decision.ok()) << decision.status();
  }

  TempDir dir_{"/tmp"};
  std::string out_, err_;
};

TEST_F(CheckpointCases, ThreeStepsSavedAndLoadedTheFourthIsTheUninterruptedFourth) {
  for (const DType weights : {DType::kFloat32, DType::kBFloat16}) {
    JobOptions job = TestJob("gpt");
    job.weight_dtype = weights;
    job.grad_dtype = weights;
    auto daemon = StartDaemon();
    auto session = Open(*daemon, job);
    for (int i = 0; i < 3; ++i) Step(session.get(), job, "blob " + std::to_string(i + 1));
    ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "gpt"}), 0) << err_;
    EXPECT_THAT(out_, HasSubstr("saved gpt at step 3: " + StepPath("gpt", 3)));
    const State at_three = ReadState(session.get());
    Step(session.get(), job, "blob 4");
    const State at_four = ReadState(session.get());
    ASSERT_TRUE(session->Close().ok());

    // Another daemon knows nothing but the files.
    daemon = StartDaemon();
    ASSERT_EQ(Ctl(*daemon, {"checkpoint", "restore", "gpt"}), 0) << err_;
    EXPECT_EQ(daemon->Job("gpt").committed_step(), 3u);
    EXPECT_EQ(daemon->Job("gpt").last().step(), 3u);
    job.stage = 3;
    session = Open(*daemon, job);
    EXPECT_EQ(session->next_step(), 4u);
    EXPECT_EQ(session->blob(), "blob 3");
    EXPECT_TRUE(ReadState(session.get()) == at_three);
    Step(session.get(), job, "blob 4");
    EXPECT_TRUE(ReadState(session.get()) == at_four);
    ASSERT_TRUE(session->Close().ok());
    fs::remove_all(root());
  }
}

TEST_F(CheckpointCases, MasterOnePlusTwoToTheMinus12IsExact) {
  JobOptions job = TestJob("exact");
  job.weight_dtype = DType::kBFloat16;  // which has no such value
  const ParameterSpec w = Named("w", {3});
  auto daemon = StartDaemon();
  auto session = Session::Open(RankOptions(daemon->socket(), 0, 1), job, {w});
  ASSERT_TRUE(session.ok()) << session.status();
  const std::vector<float> values = {1.0f + 0x1p-12f, -0.0f, 1e-42f};
  ASSERT_TRUE((*session)->Upload(0, 0, values).ok());
  ASSERT_TRUE((*session)->FinishUpload().ok());
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "exact"}), 0) << err_;
  ASSERT_TRUE((*session)->Close().ok());
  daemon = StartDaemon();
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "restore", "exact"}), 0) << err_;
  auto restored = Open(*daemon, job, {w});
  const std::vector<float> back = ReadAll(restored.get(), StateKind::kMaster, 0);
  EXPECT_EQ(std::memcmp(back.data(), values.data(), sizeof(float) * values.size()), 0);
  EXPECT_EQ(back[0], 1.0f + 0x1p-12f);
  // And in the file, for any other reader.
  const auto file =
      safetensors::Reader::Open(StepPath("exact", 0) + "/model-00001-of-00001.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*(*file)->Values<float>("w", safetensors::DType::kF32))[0], 1.0f + 0x1p-12f);
  EXPECT_TRUE(restored->Close().ok());
}

TEST_F(CheckpointCases, TenElementsSavedFrom4RanksLoadedOn2And3And6) {
  const JobOptions job = TestJob("ten", 12);
  const ParameterSpec w = Named("w", {10});
  const auto run = [&](const DaemonProcess& daemon, uint32_t world, uint64_t until) {
    State state;
    ForEachRank(world, [&](uint32_t rank) {
      auto session = OpenRank(daemon.socket(), rank, world, job, {w}, 0.5f);
      while (session->next_step() <= until) Step(session.get(), job);
      if (rank == 0) state = ReadState(session.get());
      EXPECT_TRUE(session->Close().ok());
    });
    return state;
  };
  auto daemon = StartDaemon();
  run(*daemon, 4, 2);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "ten"}), 0) << err_;
  const State expected = run(*daemon, 4, 4);
  for (const uint32_t world : {2u, 3u, 6u}) {
    ASSERT_EQ(Ctl(*daemon, {"checkpoint", "restore", "ten", "--replace"}), 0) << err_;
    EXPECT_EQ(daemon->Job("ten").committed_step(), 2u);
    EXPECT_TRUE(run(*daemon, world, 4) == expected) << world;
  }
}

TEST_F(CheckpointCases, SlowSaveOfStep100While101To110CommitHolds100) {
  const JobOptions job = TestJob("slow");
  // Room for one chunk: the updater copies, waits and goes on as the writer makes room.
  auto daemon = StartDaemon({"--checkpoint.pool_bytes=50000"});
  auto session = Open(*daemon, job);
  while (session->next_step() <= 100) Step(session.get(), job);
  const State at_100 = ReadState(session.get());
  daemon->ArmFailpoint("checkpoint.copy.begun", "wait");
  std::thread saver([&] {
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "slow", "--rate=400000"}), 0) << err_;
  });
  daemon->AwaitFailpoint("checkpoint.copy.begun");
  daemon->ReleaseFailpoint("checkpoint.copy.begun");
  while (session->next_step() <= 110) Step(session.get(), job);
  saver.join();
  EXPECT_THAT(out_, HasSubstr("saved slow at step 100"));
  const v1::JobStatus status = daemon->Job("slow");
  EXPECT_EQ(status.checkpoint_step(), 100u);
  EXPECT_GT(status.checkpoint_stall_seconds(), 0);
  EXPECT_EQ(status.committed_step(), 110u);
  EXPECT_FALSE(ReadState(session.get()) == at_100);
  ASSERT_TRUE(session->Close().ok());
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "restore", "slow", "--replace"}), 0) << err_;
  session = Open(*daemon, job);
  EXPECT_EQ(session->next_step(), 101u);
  EXPECT_TRUE(ReadState(session.get()) == at_100);
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, SaveOfAStepThatIsToCome) {
  const JobOptions job = TestJob("later");
  auto daemon = StartDaemon();
  auto session = Open(*daemon, job);
  std::thread saver([&] {
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "later", "--step=3"}), 0) << err_;
  });
  while (session->next_step() <= 3) Step(session.get(), job);
  saver.join();
  EXPECT_TRUE(fs::exists(StepPath("later", 3)));
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "later", "--step=2"}), 1);
  EXPECT_THAT(err_, HasSubstr("past step 2"));
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, SaveAskedForByRank0Alone) {
  const JobOptions job = TestJob("alone", 2);
  auto daemon = StartDaemon();
  ForEachRank(2, [&](uint32_t rank) {
    auto session = OpenRank(daemon->socket(), rank, 2, job, Model(), 0.25f);
    while (session->next_step() <= 4) {
      Step(session.get(), job, "position 7");
      if (rank == 0 && session->next_step() == 3) {
        const auto saved = session->SaveCheckpoint({});
        ASSERT_TRUE(saved.ok()) << saved.status();
        EXPECT_EQ(saved->step, 2u);
        EXPECT_EQ(saved->path, StepPath("alone", 2));
      }
    }
    EXPECT_TRUE(session->Close().ok());
  });
  EXPECT_EQ(CtlOffline({"checkpoint", "verify", StepPath("alone", 2)}), 0) << err_;
}

// Every file of a checkpoint, and in each of them several places.
TEST_F(CheckpointCases, ABitFlippedInAnyFileIsFoundNamedAndNeverLoaded) {
  const JobOptions job = TestJob("flip");
  auto daemon = StartDaemon();
  auto session = Open(*daemon, job);
  Step(session.get(), job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "flip"}), 0) << err_;
  ASSERT_TRUE(session->Close().ok());
  const std::string path = StepPath("flip", 1);
  int files = 0;
  for (const auto& entry : fs::directory_iterator(path)) {
    ++files;
    const std::string file = entry.path().filename();
    const uint64_t size = fs::file_size(entry.path());
    for (const uint64_t at : {uint64_t{0}, uint64_t{9}, size / 3, size / 2, size - 1}) {
      const auto flip = [&] {
        std::fstream f(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        f.seekg(static_cast<std::streamoff>(at));
        const char byte = static_cast<char>(f.get() ^ (1 << (at % 8)));
        f.seekp(static_cast<std::streamoff>(at));
        f.put(byte);
      };
      flip();
      EXPECT_EQ(CtlOffline({"checkpoint", "verify", path}), 1) << file << " " << at;
      EXPECT_THAT(err_, HasSubstr(file));
      EXPECT_EQ(Ctl(*daemon, {"checkpoint", "verify", "flip"}), 1) << file << " " << at;
      EXPECT_THAT(err_, HasSubstr(file));
      EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "copy", "--from=flip"}), 1);
      EXPECT_THAT(err_, HasSubstr(file));
      EXPECT_FALSE(daemon->HasJob("copy"));
      // Nor is anything given up for it.
      EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "flip", "--replace"}), 1);
      EXPECT_TRUE(daemon->HasJob("flip"));
      flip();
    }
  }
  EXPECT_EQ(files, 4);
  EXPECT_EQ(CtlOffline({"checkpoint", "verify", path}), 0) << err_;
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "copy", "--from=flip"}), 0) << err_;
  EXPECT_EQ(daemon->Job("copy").committed_step(), 1u);
}

TEST_F(CheckpointCases, ResumeThatFindsNothing) {
  auto daemon = StartDaemon();
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "nothing"}), 1);
  EXPECT_THAT(err_, HasSubstr("there is no complete checkpoint of job 'nothing'"));
  SessionOptions options = RankOptions(daemon->socket(), 0, 1);
  options.resume = Resume::kMust;
  const auto must = Session::Open(options, TestJob("nothing"), Model());
  EXPECT_TRUE(absl::IsNotFound(must.status())) << must.status();
  EXPECT_THAT(must.status().message(), HasSubstr("allow a fresh start"));
  auto fresh = Open(*daemon, TestJob("nothing"));
  EXPECT_EQ(fresh->next_step(), 1u);
  EXPECT_TRUE(fresh->Close().ok());
}

TEST_F(CheckpointCases, RestoreAsksBeforeItReplaces) {
  const JobOptions job = TestJob("there");
  auto daemon = StartDaemon();
  auto session = Open(*daemon, job);
  Step(session.get(), job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "there"}), 0) << err_;
  Step(session.get(), job);
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "there"}), 1);
  EXPECT_THAT(err_, HasSubstr("exists at step 2; --replace"));
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "there", "--replace"}), 1);
  EXPECT_THAT(err_, HasSubstr("sessions attached"));
  EXPECT_EQ(daemon->Job("there").committed_step(), 2u);
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "there", "--replace", "--force"}), 0) << err_;
  EXPECT_EQ(daemon->Job("there").committed_step(), 1u);
  // The session was of the other timeline, and is told.
  EXPECT_FALSE(session->WaitWeights(0).ok());
}

TEST_F(CheckpointCases, OneSaveAtATimeAndOneThatIsCancelledLeavesNothing) {
  const JobOptions job = TestJob("busy");
  auto daemon = StartDaemon();
  auto session = Open(*daemon, job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "busy"}), 0) << err_;
  Step(session.get(), job);
  // So slow that it would never end.
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "busy", "--rate=1", "--detach"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("saving busy at step 1"));
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "busy"}), 1);
  EXPECT_THAT(err_, HasSubstr("being saved or exported"));
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "cancel", "busy"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("cancelled the save"));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(root() + "/busy")) {
    names.push_back(entry.path().filename());
  }
  EXPECT_THAT(names, testing::ElementsAre("step-0000000000"));
  EXPECT_THAT(daemon->Job("busy").checkpoint_failure(), HasSubstr("cancelled"));
  Step(session.get(), job);
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "busy"}), 0) << err_;
  EXPECT_EQ(daemon->Job("busy").checkpoint_failure(), "");
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, KeepRemovesOlderOnes) {
  const JobOptions job = TestJob("keep");
  auto daemon = StartDaemon();
  auto session = Open(*daemon, job);
  for (int i = 0; i < 4; ++i) {
    Step(session.get(), job);
    ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "keep", "--keep=2"}), 0) << err_;
  }
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "list", "keep", "--output=json"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("\"step\":3"));
  EXPECT_THAT(out_, HasSubstr("\"step\":4"));
  EXPECT_THAT(out_, testing::Not(HasSubstr("\"step\":2")));
  ASSERT_EQ(CtlOffline({"checkpoint", "list", root() + "/keep"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("step-0000000003"));
  EXPECT_TRUE(session->Close().ok());
}

// What a daemon that is killed leaves, and, with `machine`, what the machine's death takes of it:
// all that was not synced.
class CheckpointKills : public CheckpointCases {
 protected:
  // Kills the daemon before the n-th call of `operation` in a save of step 2, for every n; step
  // 1 was saved before. Returns how often it was killed.
  int KillAtEach(const std::string& operation, bool machine) {
    int killed = 0;
    while (KillAt(operation, killed + 1, machine)) {
      ++killed;
      if (HasFatalFailure()) return killed;
    }
    return killed;
  }

  void SetUp() override {
    auto daemon = StartDaemon();
    auto session = Open(*daemon, job_);
    Step(session.get(), job_);
    at_[1] = ReadState(session.get());
    ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "kill"}), 0) << err_;
    Step(session.get(), job_);
    at_[2] = ReadState(session.get());
    EXPECT_TRUE(session->Close().ok());
    fs::copy(root(), root() + ".first", fs::copy_options::recursive);
  }

 private:
  // False: the save calls it fewer than n times.
  bool KillAt(const std::string& operation, int n, bool machine) {
    fs::remove_all(root());
    fs::copy(root() + ".first", root(), fs::copy_options::recursive);
    auto daemon = StartDaemon({"--file_faults=" + root() + "/*:" + operation + ":" +
                               std::to_string(n) + ":kill" + (machine ? ",unsynced" : "")});
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "kill"}), 0) << err_;
    auto session = Open(*daemon, job_);
    Step(session.get(), job_);
    if (Ctl(*daemon, {"checkpoint", "save", "kill"}) == 0) {
      EXPECT_TRUE(session->Close().ok());
      return false;
    }
    EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
    session.reset();
    if (machine) {
      EXPECT_TRUE(env::DropUnsynced(root()).ok());
    }
    daemon = StartDaemon();
    const std::string where = operation + " " + std::to_string(n);
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "verify", "kill"}), 0) << where << " " << err_;
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "kill"}), 0) << where << " " << err_;
    session = Open(*daemon, job_);
    const uint64_t step = session->next_step() - 1;
    EXPECT_TRUE(step == 1 || step == 2) << where << " " << step;
    EXPECT_TRUE(ReadState(session.get()) == at_[step % 3]) << where;
    // What was left is cleared away by the next save.
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "kill"}), 0) << err_;
    for (const auto& entry : fs::directory_iterator(root() + "/kill")) {
      EXPECT_EQ(entry.path().filename().string().find("step-"), 0u) << entry.path();
    }
    EXPECT_TRUE(session->Close().ok());
    return true;
  }

  const JobOptions job_ = TestJob("kill");
  State at_[3];
};

// Three arrays and the manifest.
TEST_F(CheckpointKills, AtEachWrite) {
  EXPECT_EQ(KillAtEach("write", false), 4);
  EXPECT_EQ(KillAtEach("preallocate", false), 3);
}
TEST_F(CheckpointKills, AtEachSync) {
  EXPECT_EQ(KillAtEach("sync", false), 4);
  EXPECT_GE(KillAtEach("syncdir", false), 2);
}
TEST_F(CheckpointKills, AtEachCreateAndRename) {
  EXPECT_EQ(KillAtEach("create", false), 4);
  EXPECT_GE(KillAtEach("rename", false), 1);
}
TEST_F(CheckpointKills, OfTheMachineAtEachSyncAndRename) {
  EXPECT_EQ(KillAtEach("sync", true), 4);
  EXPECT_GE(KillAtEach("syncdir", true), 2);
  EXPECT_GE(KillAtEach("rename", true), 1);
}

TEST_F(CheckpointCases, FailingWritesLeaveTheOldOneAndNothingElse) {
  const JobOptions job = TestJob("eio");
  auto daemon = StartDaemon({"--file_faults=*/.step-0000000002.new/exp_avg-*:write:1:eio"});
  auto session = Open(*daemon, job);
  Step(session.get(), job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "eio"}), 0) << err_;
  Step(session.get(), job);
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "eio"}), 1);
  EXPECT_THAT(err_, HasSubstr("exp_avg-00001"));
  EXPECT_THAT(daemon->Job("eio").checkpoint_failure(), HasSubstr("exp_avg-00001"));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(root() + "/eio")) {
    names.push_back(entry.path().filename());
  }
  EXPECT_THAT(names, testing::ElementsAre("step-0000000001"));
  Step(session.get(), job);  // training goes on
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "eio"}), 0) << err_;
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, FileSystemOf1MiBAndASaveOf2MiB) {
  if (geteuid() != 0) FAIL() << "mounting a tmpfs needs root";
  fs::create_directories(root());
  ASSERT_EQ(mount("tmpfs", root().c_str(), "tmpfs", 0, "size=1m"), 0);
  {
    auto daemon = StartDaemon();
    JobOptions small = TestJob("small");
    const ParameterSpec s = Named("w", {100});
    auto session = Open(*daemon, small, {s});
    ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "small"}), 0) << err_;
    // 3 x 4 x 180000 bytes.
    JobOptions job = TestJob("big");
    const ParameterSpec w = Named("w", {180000});
    auto big = Open(*daemon, job, {w});
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "big"}), 1);
    EXPECT_THAT(err_, HasSubstr("2160000 bytes are to be written, but its file system has "));
    EXPECT_TRUE(fs::is_empty(root() + "/big"));
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "verify", "small"}), 0) << err_;
    Step(big.get(), job);
    EXPECT_TRUE(big->Close().ok());
    EXPECT_TRUE(session->Close().ok());
  }
  EXPECT_EQ(umount(root().c_str()), 0);
}

// The disk that fills up in the middle, which nobody could know before.
TEST_F(CheckpointCases, DiskFullInTheMiddleOfASave) {
  const JobOptions job = TestJob("full");
  auto daemon = StartDaemon({"--file_faults=*/.step-0000000002.new/*:write:3+:enospc"});
  auto session = Open(*daemon, job);
  Step(session.get(), job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "full"}), 0) << err_;
  Step(session.get(), job);
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "full", "--output=json"}), 1);
  EXPECT_THAT(err_, HasSubstr("RESOURCE_EXHAUSTED"));
  EXPECT_FALSE(fs::exists(StepPath("full", 2)));
  EXPECT_FALSE(fs::exists(root() + "/full/.step-0000000002.new"));
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "verify", "full"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("step 1"));
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, FiftySavesMemoryAndDescriptorsFlat) {
  const JobOptions job = TestJob("fifty");
  auto daemon = StartDaemon();
  auto session = Open(*daemon, job);
  const auto descriptors = [&] {
    const std::string path = "/proc/" + std::to_string(daemon->pid()) + "/fd";
    return std::distance(fs::directory_iterator(path), fs::directory_iterator());
  };
  const auto resident_kb = [&] {
    std::ifstream file("/proc/" + std::to_string(daemon->pid()) + "/status");
    std::string line;
    while (std::getline(file, line)) {
      if (line.rfind("RssAnon:", 0) == 0) return std::atol(line.c_str() + 8);
    }
    return 0L;
  };
  long before_kb = 0;
  long before_descriptors = 0;
  for (int i = 0; i < 60; ++i) {
    Step(session.get(), job);
    const auto saved = session->SaveCheckpoint({.keep = 2});
    ASSERT_TRUE(saved.ok()) << saved.status();
    if (i == 9) {
      before_kb = resident_kb();
      before_descriptors = descriptors();
    }
  }
  EXPECT_LE(descriptors(), before_descriptors);
  EXPECT_LE(resident_kb(), before_kb + 2048);
  EXPECT_EQ(daemon->Info().planned_bytes(),
            daemon->Job("fifty").state_bytes() + daemon->Job("fifty").weights_bytes() +
                daemon->Job("fifty").reduced_bytes() + daemon->Job("fifty").ring_bytes());
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, RegisterRandomWeightsLoadRealOnesStepWithLr0) {
  // The real ones come from a file; lr 0 and no decay leave them as they are.
  const std::string path = root() + "/real.safetensors";
  fs::create_directories(root());
  std::vector<std::vector<float>> real;
  {
    auto writer = safetensors::Writer::Create(path, {});
    ASSERT_TRUE(writer.ok());
    for (const ParameterSpec& spec : Model()) {
      ASSERT_TRUE((*writer)
                      ->Declare("transformer." + spec.name, safetensors::DType::kF32, spec.shape)
                      .ok());
    }
    for (size_t p = 0; p < 3; ++p) {
      real.emplace_back(p == 1 ? 10 : 6400);
      for (size_t i = 0; i < real[p].size(); ++i) real[p][i] = Grad(77, 1, p, i);
      ASSERT_TRUE((*writer)->Append(std::as_bytes(std::span(real[p]))).ok());
    }
    ASSERT_TRUE((*writer)->Finish().ok());
  }
  auto daemon = StartDaemon();
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "import", "real", "real.safetensors"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("3 tensors"));
  JobOptions job = TestJob("real");
  job.groups[0].lr = 0;
  auto session = Session::Open(RankOptions(daemon->socket(), 0, 1), job, Model());
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_FALSE((*session)->initialising());  // nothing is to be uploaded
  EXPECT_EQ((*session)->next_step(), 1u);
  Step(session->get(), job);
  for (size_t p = 0; p < 3; ++p) {
    EXPECT_EQ(ReadAll(session->get(), StateKind::kMaster, p), real[p]) << p;
    EXPECT_EQ(*(*session)->ParameterApplied(p), 1u);
  }
  EXPECT_TRUE((*session)->Close().ok());
  // It was for one job.
  auto other = Session::Open(RankOptions(daemon->socket(), 0, 1), TestJob("other"), Model());
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE((*other)->initialising());
}

TEST_F(CheckpointCases, ImportThatDoesNotFitIsRefusedByName) {
  fs::create_directories(root());
  const auto write = [&](const std::string& file,
                         const std::vector<std::pair<std::string, int64_t>>& tensors) {
    auto writer = safetensors::Writer::Create(root() + "/" + file, {});
    ASSERT_TRUE(writer.ok());
    for (const auto& [name, size] : tensors) {
      ASSERT_TRUE((*writer)->Declare(name, safetensors::DType::kF32, {size}).ok());
    }
    for (const auto& [name, size] : tensors) {
      const std::vector<float> zeros(static_cast<size_t>(size));
      ASSERT_TRUE((*writer)->Append(std::as_bytes(std::span(zeros))).ok());
    }
    ASSERT_TRUE((*writer)->Finish().ok());
  };
  auto daemon = StartDaemon();
  const ParameterSpec w = Named("w", {8});
  const auto open = [&] {
    return Session::Open(RankOptions(daemon->socket(), 0, 1), TestJob("j"), {w}).status();
  };
  write("half.safetensors", {{"w", 8}, {"w.exp_avg", 8}});
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "import", "j", "half.safetensors"}), 1);
  EXPECT_THAT(err_, HasSubstr("'w.exp_avg' without its exp_avg_sq"));
  write("shape.safetensors", {{"w", 9}});
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "import", "j", "shape.safetensors"}), 0) << err_;
  EXPECT_THAT(open().message(), HasSubstr("'w' has shape (9), parameter 'w' has (8)"));
  write("name.safetensors", {{"v", 8}});
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "import", "j", "name.safetensors"}), 0) << err_;
  EXPECT_THAT(open().message(), HasSubstr("no tensor for parameter 'w'"));
  fs::remove(root() + "/name.safetensors");
  EXPECT_THAT(open().message(), HasSubstr("is gone or has changed"));
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "import", "j", "--cancel"}), 0) << err_;
  EXPECT_TRUE(open().ok());
  // Nothing that lies elsewhere is opened.
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "import", "k", "/etc/passwd"}), 1);
  EXPECT_THAT(err_, HasSubstr("does not lie below"));
  fs::create_symlink("/etc/passwd", root() + "/link");
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "import", "k", "link"}), 1);
  EXPECT_THAT(err_, HasSubstr("does not lie below"));
}

TEST_F(CheckpointCases, TiedZeroSizeAndNoTensorsExported) {
  auto daemon = StartDaemon();
  std::vector<ParameterSpec> model = Model();
  model.push_back(Named("empty", {0, 8}));
  model.push_back(Named("scalar", {}));
  const JobOptions job = TestJob("tied");
  auto session = Open(*daemon, job, model);
  Step(session.get(), job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "export", "tied"}), 0) << err_;
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "tied"}), 0) << err_;
  const std::string offline = dir_.path() + "/offline.safetensors";
  ASSERT_EQ(CtlOffline({"checkpoint", "export", StepPath("tied", 1), "--to=" + offline}), 0)
      << err_;
  const std::string live = root() + "/tied/export-step-1-fp32.safetensors";
  const auto bytes = [](const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_EQ(bytes(live), bytes(offline));
  const auto file = safetensors::Reader::Open(offline);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), 6u);
  const auto head = (*file)->Values<float>("head", safetensors::DType::kF32);
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(*head, ReadAll(session.get(), StateKind::kMaster, 2));
  EXPECT_EQ(*(*file)->Values<float>("head.tied", safetensors::DType::kF32), *head);
  EXPECT_EQ((*file)->Find("empty")->shape, (std::vector<int64_t>{0, 8}));
  EXPECT_EQ((*file)->Find("scalar")->shape, std::vector<int64_t>());
  EXPECT_TRUE(session->Close().ok());

  const ParameterSpec nothing = Named("nothing", {0});
  auto none = Open(*daemon, TestJob("none"), {nothing});
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "none"}), 0) << err_;
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "export", "none", "--dtype=bf16"}), 0) << err_;
  EXPECT_TRUE(none->Close().ok());
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "restore", "none", "--replace"}), 0) << err_;
}

TEST_F(CheckpointCases, GroupsOfFiveAndSixElementsOverFourRanksExported) {
  JobOptions job = TestJob("groups", 4);
  job.groups = {ParameterGroup{"a", 1e-2, 0.9, 0.999, 1e-8, 0.1},
                ParameterGroup{"b", 1e-3, 0.8, 0.99, 1e-8, 0.0}};
  std::vector<ParameterSpec> model(2);
  model[0] = Named("a", {5}, 0);
  model[1] = Named("b", {6}, 1);
  auto daemon = StartDaemon();
  std::vector<float> a, b;
  ForEachRank(4, [&](uint32_t rank) {
    auto session = OpenRank(daemon->socket(), rank, 4, job, model, 0.75f);
    for (int i = 0; i < 3; ++i) Step(session.get(), job);
    if (rank == 0) {
      a = ReadAll(session.get(), StateKind::kMaster, 0);
      b = ReadAll(session.get(), StateKind::kMaster, 1);
    }
    EXPECT_TRUE(session->Close().ok());
  });
  for (const char* dtype : {"fp32", "bf16"}) {
    ASSERT_EQ(Ctl(*daemon, {"checkpoint", "export", "groups", std::string("--dtype=") + dtype,
                            "--name=out.safetensors"}),
              0)
        << err_;
    const auto file = safetensors::Reader::Open(root() + "/groups/out.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    if (std::string(dtype) == "fp32") {
      EXPECT_EQ(*(*file)->Values<float>("a", safetensors::DType::kF32), a);
      EXPECT_EQ(*(*file)->Values<float>("b", safetensors::DType::kF32), b);
    } else {
      const auto narrow = *(*file)->Values<uint16_t>("b", safetensors::DType::kBF16);
      ASSERT_EQ(narrow.size(), 6u);
      for (size_t i = 0; i < 6; ++i) {
        EXPECT_NEAR(LoadAs(DType::kBFloat16, &narrow[i]), b[i], std::abs(b[i]) / 256);
      }
    }
  }
}

TEST_F(CheckpointCases, FourTrainableAndFourFrozenParametersIntoAFreshDaemon) {
  JobOptions job = TestJob("frozen");
  std::vector<ParameterSpec> model;
  std::vector<std::vector<std::byte>> values;
  for (int i = 0; i < 4; ++i) {
    model.push_back(Named("t" + std::to_string(i), {50 + i}));
    FrozenSpec frozen;
    frozen.name = "f" + std::to_string(i);
    // One of them large, one empty, in each dtype.
    frozen.shape = {i == 1 ? 100'000 : i == 2 ? 0 : 33, 3};
    frozen.dtype = i == 3 ? DType::kBFloat16 : i == 1 ? DType::kFloat16 : DType::kFloat32;
    if (i == 0) frozen.aliases = {"f0.tied"};
    values.emplace_back(static_cast<size_t>(frozen.shape[0] * 3) * DTypeBytes(frozen.dtype));
    for (size_t b = 0; b < values.back().size(); ++b) {
      values.back()[b] = static_cast<std::byte>(b % 2 == 0 ? b * 7 + 1 : 0x3f);
    }
    job.frozen.push_back(frozen);
  }
  const auto read_frozen = [&](Session* session) {
    std::vector<std::vector<std::byte>> back;
    for (size_t f = 0; f < values.size(); ++f) {
      back.emplace_back(values[f].size());
      EXPECT_TRUE(session->ReadFrozen(f, 0, std::span(back.back())).ok());
    }
    return back;
  };
  auto daemon = StartDaemon();
  auto opened = Session::Open(RankOptions(daemon->socket(), 0, 1), job, model);
  ASSERT_TRUE(opened.ok()) << opened.status();
  auto session = *std::move(opened);
  for (size_t p = 0; p < 4; ++p) {
    ASSERT_TRUE(session->Upload(p, 0, std::vector<float>(50 + p, 0.5f)).ok());
  }
  EXPECT_TRUE(session->initialising());
  EXPECT_FALSE(session->UploadFrozen(0, 4, std::span(values[0]).subspan(4)).ok());
  for (size_t f = 0; f < 4; ++f) {
    ASSERT_TRUE(session->UploadFrozen(f, 0, std::span<const std::byte>(values[f])).ok());
  }
  ASSERT_TRUE(session->FinishUpload().ok());
  Step(session.get(), job);
  const State state = ReadState(session.get());
  EXPECT_EQ(read_frozen(session.get()), values);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "frozen"}), 0) << err_;
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "export", "frozen"}), 0) << err_;
  ASSERT_TRUE(session->Close().ok());
  // Others attach only with the same frozen ones.
  JobOptions without = job;
  without.frozen.pop_back();
  EXPECT_THAT(Session::Open(RankOptions(daemon->socket(), 0, 1), without, model).status().message(),
              HasSubstr("frozen parameters: 4 there, 3 here"));

  daemon = StartDaemon();
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "restore", "frozen"}), 0) << err_;
  session = Open(*daemon, job, model);
  EXPECT_TRUE(ReadState(session.get()) == state);
  EXPECT_EQ(read_frozen(session.get()), values);
  EXPECT_TRUE(session->Close().ok());

  // Exported from the files as from the job, in one dtype, under all names.
  const std::string live = root() + "/frozen/export-step-1-fp32.safetensors";
  const std::string offline = dir_.path() + "/offline.safetensors";
  ASSERT_EQ(CtlOffline({"checkpoint", "export", StepPath("frozen", 1), "--to=" + offline}), 0)
      << err_;
  for (const std::string& path : {live, offline}) {
    const auto file = safetensors::Reader::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ((*file)->tensors().size(), 9u);
    EXPECT_EQ((*file)->Find("f2")->bytes(), 0u);
    EXPECT_EQ(*(*file)->Values<float>("t1", safetensors::DType::kF32), state.arrays[3]);
    const auto f0 = *(*file)->Values<float>("f0.tied", safetensors::DType::kF32);
    EXPECT_EQ(std::memcmp(f0.data(), values[0].data(), values[0].size()), 0);
    const auto f3 = *(*file)->Values<float>("f3", safetensors::DType::kF32);
    EXPECT_EQ(f3[5], LoadAs(DType::kBFloat16, &values[3][10]));
  }
  // And from there into a new job.
  fs::copy(offline, root() + "/weights.safetensors");
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "import", "again", "weights.safetensors"}), 0) << err_;
  job.name = "again";
  session = Open(*daemon, job, model);
  EXPECT_EQ(session->next_step(), 1u);
  EXPECT_EQ(read_frozen(session.get()), values);
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 2), state.arrays[6]);
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, ARestoredJobWithAJournalOutlivesTheMachine) {
  JobOptions job = TestJob("both");
  job.durability = Durability::kNode;
  FrozenSpec frozen;
  frozen.name = "f";
  frozen.shape = {20};
  job.frozen.push_back(frozen);
  const std::vector<std::byte> value(80, std::byte{0x3f});
  const std::string journals = dir_.path() + "/journals";
  auto daemon = StartDaemon({"--journal.directory=" + journals});
  auto opened = Session::Open(RankOptions(daemon->socket(), 0, 1), job, Model());
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (size_t p = 0; p < 3; ++p) {
    const std::vector<float> values((*opened)->parameter_elements(p), 0.5f);
    ASSERT_TRUE((*opened)->Upload(p, 0, values).ok());
  }
  ASSERT_TRUE((*opened)->UploadFrozen(0, 0, value).ok());
  ASSERT_TRUE((*opened)->FinishUpload().ok());
  Step(opened->get(), job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "both"}), 0) << err_;
  Step(opened->get(), job);
  ASSERT_TRUE((*opened)->Close().ok());
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "restore", "both", "--replace"}), 0) << err_;
  auto session = Open(*daemon, job);
  EXPECT_EQ(session->next_step(), 2u);
  Step(session.get(), job);
  Step(session.get(), job);
  const State state = ReadState(session.get());
  session.reset();
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  // The next daemon has another state directory, as after the loss of the machine.
  daemon = StartDaemon({"--journal.directory=" + journals});
  session = Open(*daemon, job);
  EXPECT_EQ(session->next_step(), 4u);
  EXPECT_TRUE(ReadState(session.get()) == state);
  std::vector<std::byte> back(80);
  ASSERT_TRUE(session->ReadFrozen(0, 0, std::span(back)).ok());
  EXPECT_EQ(back, value);
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, OthersThanTheOwnerSeeNothing) {
  auto daemon = StartDaemon();
  auto session = Open(*daemon, TestJob("mine"));
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "mine"}), 0) << err_;
  // Names that would leave the directory.
  for (const char* name : {"..", ".imports", "a b"}) {
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", name}), 1) << name;
    EXPECT_EQ(Ctl(*daemon, {"checkpoint", "list", name}), 1) << name;
  }
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "export", "mine", "--name=../x"}), 1);
  EXPECT_THAT(err_, HasSubstr("cannot be the name"));
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, WithoutAPlaceForThem) {
  DaemonProcess daemon;
  auto session = Open(daemon, TestJob("x"));
  for (const char* verb : {"save", "export", "list", "verify", "restore"}) {
    EXPECT_EQ(Ctl(daemon, {"checkpoint", verb, "x"}), 1) << verb;
    EXPECT_THAT(err_, HasSubstr("checkpoint.directory")) << verb;
  }
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(CheckpointCases, AJobThatIsDeletedWhileItIsSaved) {
  auto daemon = StartDaemon();
  const JobOptions job = TestJob("gone");
  auto session = Open(*daemon, job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "gone", "--rate=1", "--detach"}), 0) << err_;
  EXPECT_TRUE(daemon->DeleteJob("gone", true).ok());
  ASSERT_TRUE(daemon->AwaitLog("job gone: not saved"));
  EXPECT_FALSE(fs::exists(StepPath("gone", 0)));
}

TEST_F(CheckpointCases, KilledBeforeTheRenameAndWhileLoading) {
  auto daemon = StartDaemon();
  const JobOptions job = TestJob("points");
  auto session = Open(*daemon, job);
  Step(session.get(), job);
  ASSERT_EQ(Ctl(*daemon, {"checkpoint", "save", "points"}), 0) << err_;
  Step(session.get(), job);
  daemon->ArmFailpoint("checkpoint.before_rename", "kill");
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "save", "points"}), 1);
  EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
  DaemonProcess::Options options;
  options.flags = {"--checkpoint.directory=" + root()};
  TempDir state("/dev/shm");
  options.state_directory = state.path() + "/state";
  daemon = std::make_unique<DaemonProcess>(options);
  daemon->ArmFailpoint("checkpoint.restore.loaded", "kill");
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "points"}), 1);
  EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
  daemon = std::make_unique<DaemonProcess>(options);  // half a job is none
  EXPECT_FALSE(daemon->HasJob("points"));
  EXPECT_EQ(Ctl(*daemon, {"checkpoint", "restore", "points"}), 0) << err_;
  EXPECT_EQ(daemon->Job("points").committed_step(), 1u);
}

}  // namespace
}  // namespace shardd::test

// A job that nobody uses goes to disk, and comes back with the same bits.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>

#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"

namespace shardd::test {
namespace {

using Processes = std::vector<std::unique_ptr<RankProcess>>;

constexpr uint32_t kWorld = 2;

Processes StartRanks(const DaemonProcess& daemon, const std::string& steps) {
  Processes ranks;
  for (uint32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(std::make_unique<RankProcess>(
        daemon.socket(), r, kWorld, std::vector<std::string>{"--job=toy", "--steps=" + steps}));
  }
  return ranks;
}

std::string Finish(Processes* ranks) {
  std::string digest;
  for (auto& rank : *ranks) {
    digest = rank->AwaitLine("done");
    EXPECT_NE(digest, "");
    EXPECT_EQ(rank->Wait(), 0);
  }
  return digest;
}

class SpillCases : public testing::Test {
 protected:
  // `ttl` of 0.2 spills as soon as nobody is there.
  std::unique_ptr<DaemonProcess> StartDaemon(const std::string& ttl,
                                             std::vector<std::string> flags = {}) {
    DaemonProcess::Options options;
    options.state_directory = state_.path() + "/state";
    options.flags = {"--job_ttl_seconds=" + ttl, "--spill.directory=" + spill_};
    options.flags.insert(options.flags.end(), flags.begin(), flags.end());
    return std::make_unique<DaemonProcess>(options);
  }
  std::string Undisturbed() {
    DaemonProcess daemon;
    Processes ranks = StartRanks(daemon, "6");
    return Finish(&ranks);
  }
  // Three steps, then the job is spilled.
  std::unique_ptr<DaemonProcess> Spilled() {
    auto daemon = StartDaemon("0.2");
    Processes ranks = StartRanks(*daemon, "3");
    Finish(&ranks);
    EXPECT_TRUE(daemon->AwaitLog("job toy: unused for job_ttl_seconds")) << daemon->Log();
    return daemon;
  }
  void Kill(std::unique_ptr<DaemonProcess>* daemon) {
    kill((*daemon)->pid(), SIGKILL);
    (*daemon)->AwaitDeath();
    daemon->reset();
  }

  TempDir state_{"/dev/shm"};
  TempDir disk_{"/tmp"};
  const std::string spill_ = disk_.path() + "/spill";
};

TEST_F(SpillCases, MemoryIsFreedAndTheJobComesBack) {
  const std::string expected = Undisturbed();
  auto daemon = Spilled();
  EXPECT_EQ(daemon->Info().planned_bytes(), 0u);
  EXPECT_FALSE(std::filesystem::exists(state_.path() + "/state/jobs/toy"));
  v1::JobStatus status = daemon->Job("toy");
  EXPECT_EQ(status.state(), "spilled");
  EXPECT_EQ(status.committed_step(), 3u);
  EXPECT_EQ(status.state_bytes(), 0u);
  EXPECT_GT(status.spilled_bytes(), 0u);

  Processes ranks = StartRanks(*daemon, "6");
  EXPECT_EQ(Finish(&ranks), expected);
  EXPECT_EQ(daemon->Job("toy").committed_step(), 6u);
}

TEST_F(SpillCases, ItComesBackAfterTheMachineWasSwitchedOff) {
  const std::string expected = Undisturbed();
  auto daemon = Spilled();
  Kill(&daemon);
  std::filesystem::remove_all(state_.path() + "/state");
  daemon = StartDaemon("-1");
  // Told to spill nothing, it does not look: what was spilled stays there for another one.
  EXPECT_FALSE(daemon->HasJob("toy"));
  daemon = nullptr;
  daemon = StartDaemon("100");
  EXPECT_EQ(daemon->Job("toy").state(), "spilled");
  Processes ranks = StartRanks(*daemon, "6");
  EXPECT_EQ(Finish(&ranks), expected);
  EXPECT_TRUE(std::filesystem::exists(state_.path() + "/state/jobs/toy"));
  EXPECT_FALSE(std::filesystem::exists(spill_ + "/toy"));
}

TEST_F(SpillCases, KilledWhileSpilling) {
  const std::string expected = Undisturbed();
  for (const char* point : {"spill.before_rename", "spill.before_free"}) {
    std::filesystem::remove_all(state_.path() + "/state");
    std::filesystem::remove_all(spill_);
    auto daemon = StartDaemon("0.2");
    daemon->ArmFailpoint(point, "kill");
    Processes ranks = StartRanks(*daemon, "3");
    Finish(&ranks);
    EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
    daemon = StartDaemon("100");
    EXPECT_EQ(daemon->Job("toy").state(), "idle") << point;
    EXPECT_FALSE(std::filesystem::exists(spill_ + "/toy")) << point;
    EXPECT_FALSE(std::filesystem::exists(spill_ + "/.toy.new")) << point;
    ranks = StartRanks(*daemon, "6");
    EXPECT_EQ(Finish(&ranks), expected) << point;
  }
}

TEST_F(SpillCases, KilledWhileItComesBack) {
  const std::string expected = Undisturbed();
  for (const char* point : {"unspill.before_initialised", "unspill.before_remove"}) {
    std::filesystem::remove_all(state_.path() + "/state");
    std::filesystem::remove_all(spill_);
    auto daemon = Spilled();
    Kill(&daemon);
    daemon = StartDaemon("100", {std::string("--arm_failpoint=") + point + ":kill"});
    Processes ranks = StartRanks(*daemon, "6");
    EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
    ranks.clear();
    daemon = StartDaemon("100");
    EXPECT_EQ(daemon->Job("toy").committed_step(), 3u) << point;
    ranks = StartRanks(*daemon, "6");
    EXPECT_EQ(Finish(&ranks), expected) << point;
  }
}

TEST_F(SpillCases, ABitFlippedIsFoundAndNamed) {
  auto daemon = Spilled();
  for (const char* name : {"job", "state", "manifest.json"}) {
    const std::string path = spill_ + "/toy/" + name;
    const auto size = static_cast<std::streamoff>(std::filesystem::file_size(path));
    const std::streamoff at = std::string(name) == "manifest.json" ? size - 6 : size / 2;
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char good = static_cast<char>(file.get());
    file.seekp(at);
    file.put(static_cast<char>(good ^ 1));
    file.close();
    RankProcess rank(daemon->socket(), 0, kWorld, {"--job=toy"});
    const std::string error = rank.AwaitLine("error DATA_LOSS");
    EXPECT_NE(error.find("spill/toy"), std::string::npos) << name << ": " << error;
    EXPECT_NE(error.find("job delete toy"), std::string::npos) << error;
    std::fstream mend(path, std::ios::in | std::ios::out | std::ios::binary);
    mend.seekp(at);
    mend.put(good);
  }
  EXPECT_FALSE(std::filesystem::exists(state_.path() + "/state/jobs/toy"));
  Processes ranks = StartRanks(*daemon, "6");
  EXPECT_NE(Finish(&ranks), "");
}

TEST_F(SpillCases, DeletedOnDisk) {
  auto daemon = Spilled();
  EXPECT_TRUE(daemon->DeleteJob("toy", false).ok());
  EXPECT_FALSE(daemon->HasJob("toy"));
  EXPECT_FALSE(std::filesystem::exists(spill_ + "/toy"));
  Processes ranks = StartRanks(*daemon, "3");
  EXPECT_NE(Finish(&ranks), "");
}

TEST_F(SpillCases, AJobInUseIsNotSpilled) {
  auto daemon = StartDaemon("0.2");
  Processes ranks = StartRanks(*daemon, "2");
  RankProcess other(daemon->socket(), 0, 1, {"--job=other", "--steps=100000"});
  Finish(&ranks);
  EXPECT_TRUE(daemon->AwaitLog("job toy: unused for job_ttl_seconds"));
  EXPECT_EQ(daemon->Job("other").state(), "running");
}

TEST_F(SpillCases, ADirectoryThatOthersMayWriteToIsNotUsed) {
  std::filesystem::create_directories(spill_);
  std::filesystem::permissions(spill_, std::filesystem::perms::all);
  auto daemon = StartDaemon("0.2");
  EXPECT_NE(daemon->Log().find("choose another spill.directory"), std::string::npos);
  Processes ranks = StartRanks(*daemon, "2");
  Finish(&ranks);
  EXPECT_EQ(daemon->Job("toy").state(), "idle");
}

// An editor's or a network file system's file is no reason to forget what lies beside it.
TEST_F(SpillCases, OtherFilesInTheDirectoryDoNotMatter) {
  const std::string expected = Undisturbed();
  auto daemon = Spilled();
  Kill(&daemon);
  std::filesystem::remove_all(state_.path() + "/state");
  for (const char* name : {".nfs0001", ".toy.new", "notes.txt"}) {
    std::ofstream(spill_ + "/" + name) << "x";
  }
  daemon = StartDaemon("100");
  ASSERT_EQ(daemon->Job("toy").state(), "spilled") << daemon->Log();
  Processes ranks = StartRanks(*daemon, "6");
  EXPECT_EQ(Finish(&ranks), expected);
  EXPECT_TRUE(std::filesystem::exists(spill_ + "/.nfs0001"));
}

}  // namespace
}  // namespace shardd::test

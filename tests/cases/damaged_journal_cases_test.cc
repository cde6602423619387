// Journals as a failing disk, a mistaken operator or somebody hostile leaves them: nothing is lost
// that is still there, and what is refused is refused by name.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>

#include "client/client.h"
#include "server/journal/format.h"
#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

namespace fs = std::filesystem;

constexpr int kSteps = 20;

class DamagedJournalCases : public testing::Test {
 protected:
  std::string state() const { return state_.path() + "/state"; }
  std::string journal() const { return disk_.path() + "/journal"; }
  std::string spill() const { return disk_.path() + "/spill"; }
  std::string InJournal(const std::string& name) const { return journal() + "/toy/" + name; }

  std::unique_ptr<DaemonProcess> StartDaemon(std::vector<std::string> more = {}) const {
    DaemonProcess::Options options;
    options.state_directory = state();
    options.flags = {"--journal.directory=" + journal(), "--journal.segment_bytes=262144",
                     "--journal.log_bytes_max=400000"};
    options.flags.insert(options.flags.end(), more.begin(), more.end());
    return std::make_unique<DaemonProcess>(options);
  }
  static std::string Run(const DaemonProcess& daemon, int steps = kSteps) {
    RankProcess rank(daemon.socket(), 0, 1, {"--job=toy", "--steps=" + std::to_string(steps)});
    const std::string done = rank.AwaitLine("done");
    EXPECT_EQ(rank.Wait(), 0);
    return done;
  }
  static void Kill(std::unique_ptr<DaemonProcess>* daemon) {
    kill((*daemon)->pid(), SIGKILL);
    (*daemon)->AwaitDeath();
    daemon->reset();
  }
  // A finished run whose machine is gone, with its journal; the digest of its state.
  std::string LeaveAJournal(const std::vector<std::string>& flags = {}) {
    auto daemon = StartDaemon(flags);
    const std::string digest = Run(*daemon);
    EXPECT_NE(digest, "");
    Kill(&daemon);
    fs::remove_all(state());
    return digest;
  }
  journal::ManifestPage ReadManifest() const {
    journal::ManifestPage page;
    std::ifstream file(InJournal("MANIFEST"), std::ios::binary);
    file.read(reinterpret_cast<char*>(&page), sizeof(page));
    EXPECT_TRUE(file.good());
    return page;
  }
  // The daemon serves, does not have the job, says why by `name`, and leaves the journal alone.
  void ExpectRefused(const std::string& name) const {
    SCOPED_TRACE(name);
    {
      auto daemon = StartDaemon();
      EXPECT_FALSE(daemon->HasJob("toy"));
      EXPECT_TRUE(
          daemon->AwaitLog("job toy cannot be recovered from its journal, which is left "
                           "untouched in " +
                           journal() + "/toy: "));
      EXPECT_NE(daemon->Log().find(name), std::string::npos) << daemon->Log();
    }
    EXPECT_TRUE(fs::exists(journal() + "/toy"));
  }
  void ExpectRecovered(const std::string& digest, std::vector<std::string> flags = {}) const {
    auto daemon = StartDaemon(std::move(flags));
    ASSERT_TRUE(daemon->HasJob("toy")) << daemon->Log();
    EXPECT_EQ(daemon->Job("toy").committed_step(), static_cast<uint64_t>(kSteps)) << daemon->Log();
    EXPECT_EQ(Run(*daemon), digest);
  }
  static void Flip(const std::string& path, uint64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int old = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(old ^ 4));
  }

  TempDir state_{"/dev/shm"};
  TempDir disk_{"/tmp"};
};

TEST_F(DamagedJournalCases, AFileThatIsMissingIsRefusedAndTheRestIsKept) {
  const std::string digest = LeaveAJournal();
  const auto snapshot = journal::SnapshotName(ReadManifest().snapshot[0].slot);
  for (const std::string& name : {std::string("MANIFEST"), snapshot}) {
    fs::rename(InJournal(name), disk_.path() + "/kept");
    ExpectRefused(InJournal(name));
    fs::rename(disk_.path() + "/kept", InJournal(name));
  }
  ExpectRecovered(digest);
}

// As it was before the first snapshot: nothing would be committed, but the log knows better.
TEST_F(DamagedJournalCases, AnOlderManifestThatNamesNoSnapshotIsRefused) {
  LeaveAJournal();
  journal::ManifestPage page = ReadManifest();
  page.snapshots = 0;
  page.durable_lsn = 0;
  page.crc = journal::PageCrc(&page, &page.crc);
  std::ofstream(InJournal("MANIFEST"), std::ios::binary)
      .write(reinterpret_cast<const char*>(&page), sizeof(page));
  ExpectRefused(journal() + "/toy");
}

TEST_F(DamagedJournalCases, AChunkThatIsDamagedIsTakenFromTheSnapshotBefore) {
  const std::vector<std::string> keep = {"--journal.snapshots_kept=3"};
  const std::string digest = LeaveAJournal(keep);
  const journal::ManifestPage page = ReadManifest();
  ASSERT_GE(page.snapshots, 2u);
  const journal::ManifestSnapshot& newest = page.snapshot[page.snapshots - 1];
  const std::string path = InJournal(journal::SnapshotName(newest.slot));
  Flip(path, newest.bytes - 4 * journal::kPageBytes);  // before END: in the last chunk
  auto daemon = StartDaemon(keep);
  EXPECT_NE(daemon->Log().find(path), std::string::npos) << daemon->Log();
  EXPECT_NE(daemon->Log().find("the snapshot before it is taken"), std::string::npos);
  EXPECT_EQ(daemon->Job("toy").committed_step(), static_cast<uint64_t>(kSteps));
  EXPECT_EQ(Run(*daemon), digest);
}

TEST_F(DamagedJournalCases, ALogThatLostItsEndIsRefusedByName) {
  LeaveAJournal();
  std::string newest;
  uint64_t epoch = 0;
  for (const auto& entry : fs::directory_iterator(journal() + "/toy")) {
    if (!entry.path().filename().string().starts_with("log-")) continue;
    journal::SegmentHeader header{};
    std::ifstream file(entry.path(), std::ios::binary);
    file.read(reinterpret_cast<char*>(&header), sizeof(header));
    if (header.epoch <= epoch) continue;
    epoch = header.epoch;
    newest = entry.path();
  }
  ASSERT_NE(newest, "");
  fs::resize_file(newest, 2 * journal::kPageBytes);
  ExpectRefused(newest);
  fs::resize_file(newest, 0);
  ExpectRefused(newest);
}

TEST_F(DamagedJournalCases, WhatIsNoFileIsRefusedAndNotWaitedFor) {
  LeaveAJournal();
  for (const char* name : {"MANIFEST", "log-0"}) {
    fs::rename(InJournal(name), disk_.path() + "/kept");
    ASSERT_EQ(mkfifo(InJournal(name).c_str(), 0600), 0);
    ExpectRefused(InJournal(name));
    fs::remove(InJournal(name));
    fs::create_directory(InJournal(name));
    ExpectRefused(InJournal(name));
    fs::remove(InJournal(name));
    fs::rename(disk_.path() + "/kept", InJournal(name));
  }
}

// The daemon dies alone, and then finds that the loss of the machine would cost all.
TEST_F(DamagedJournalCases, ALivingJobWhoseSnapshotIsDamagedBeginsAnew) {
  auto daemon = StartDaemon();
  const std::string digest = Run(*daemon);
  Kill(&daemon);
  Flip(InJournal(journal::SnapshotName(ReadManifest().snapshot[0].slot)),
       journal::kPageBytes + 500);
  daemon = StartDaemon();
  EXPECT_TRUE(daemon->AwaitLog("its journal is begun anew from the living state"));
  EXPECT_EQ(Run(*daemon, kSteps + 1).substr(0, 4), "done");
  Kill(&daemon);
  fs::remove_all(state());
  daemon = StartDaemon();
  EXPECT_EQ(daemon->Job("toy").committed_step(), kSteps + 1u) << daemon->Log();
}

// Spilled at one step, then taken up from its journal by a daemon that does not look at spills.
TEST_F(DamagedJournalCases, ASpillThatIsOlderThanItsJournalDoesNotCount) {
  const std::string at = "--spill.directory=" + spill();
  auto daemon = StartDaemon({at, "--job_ttl_seconds=0.2"});
  EXPECT_NE(Run(*daemon, 5), "");
  ASSERT_TRUE(daemon->AwaitLog("job toy: unused for job_ttl_seconds")) << daemon->Log();
  Kill(&daemon);
  fs::remove_all(state());
  daemon = StartDaemon({at, "--job_ttl_seconds=-1"});
  const std::string digest = Run(*daemon);
  Kill(&daemon);
  fs::remove_all(state());
  daemon = StartDaemon({at, "--job_ttl_seconds=1000"});
  EXPECT_EQ(daemon->Job("toy").committed_step(), static_cast<uint64_t>(kSteps)) << daemon->Log();
  EXPECT_TRUE(daemon->AwaitLog("its journal leads to step 20 and counts, not its spill of step 5"));
  EXPECT_EQ(Run(*daemon), digest);
  EXPECT_FALSE(fs::exists(spill() + "/toy"));
}

// What is said to be a terabyte is looked for before memory is taken.
TEST_F(DamagedJournalCases, ASpillWhoseManifestLiesIsRefusedByName) {
  const std::string at = "--spill.directory=" + spill();
  auto daemon = StartDaemon({at, "--job_ttl_seconds=0.2"});
  EXPECT_NE(Run(*daemon, 5), "");
  ASSERT_TRUE(daemon->AwaitLog("job toy: unused for job_ttl_seconds")) << daemon->Log();
  const std::string path = spill() + "/toy/manifest.json";
  std::ifstream in(path);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  const size_t bytes = text.find("\"bytes\": ", text.find("\"job\": {")) + 9;
  text.replace(bytes, text.find_first_not_of("0123456789", bytes) - bytes, "1099511627776");
  std::ofstream(path) << text;
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  const auto refused = Session::Open(RankOptions(daemon->socket(), 0, 1), SmallJob("toy", 1), {w});
  EXPECT_TRUE(absl::IsDataLoss(refused.status())) << refused.status();
  EXPECT_NE(refused.status().message().find(spill() + "/toy/job"), std::string::npos)
      << refused.status();
  EXPECT_TRUE(daemon->Alive());
}

TEST_F(DamagedJournalCases, AJobMayHaveTheNameOfAnyFileOfTheDirectory) {
  auto daemon = StartDaemon();
  for (const char* name : {"lock", "MANIFEST", "log-0", "toy.new"}) {
    ParameterSpec w;
    w.name = "w";
    w.shape = {4};
    auto session = Session::Open(RankOptions(daemon->socket(), 0, 1), SmallJob(name, 1), {w});
    ASSERT_TRUE(session.ok()) << name << session.status();
    EXPECT_TRUE(fs::is_directory(journal() + "/" + name));
  }
}

TEST_F(DamagedJournalCases, ADirectoryThatOthersCanWriteIsRefused) {
  fs::create_directory(journal());
  ASSERT_EQ(chmod(journal().c_str(), 0777), 0);
  const std::string log = disk_.path() + "/log";
  const std::string command = Runfile("server/shardd") + " --listen.socket=" + disk_.path() +
                              "/d.sock --store.directory=" + state() +
                              " --journal.directory=" + journal() + " 2>" + log;
  EXPECT_NE(std::system(command.c_str()), 0);
  std::ifstream file(log);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(text.find("can be written by others"), std::string::npos) << text;
}

}  // namespace
}  // namespace shardd::test

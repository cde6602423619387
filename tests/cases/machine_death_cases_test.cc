// A machine that dies: its segments are gone, and what its disk had not been told to keep. What a
// job with durability = node has then is its journal.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>

#include "server/env/faulty_file_system.h"
#include "server/journal/format.h"
#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

namespace fs = std::filesystem;
using Processes = std::vector<std::unique_ptr<RankProcess>>;

constexpr uint32_t kWorld = 3;
constexpr int kSteps = 12;

Processes StartRanks(const DaemonProcess& daemon, int steps = kSteps) {
  Processes ranks;
  for (uint32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(std::make_unique<RankProcess>(
        daemon.socket(), r, kWorld,
        std::vector<std::string>{"--job=toy", "--steps=" + std::to_string(steps)}));
  }
  return ranks;
}

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

// Kills the ranks; the last step that one of them had seen committed.
uint64_t KillRanks(Processes* ranks) {
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

// The digest of the run that nothing disturbs, without a journal.
std::string Undisturbed(int steps = kSteps) {
  static std::map<int, std::string>* digests = new std::map<int, std::string>;
  std::string& digest = (*digests)[steps];
  if (digest.empty()) {
    DaemonProcess daemon;
    Processes ranks = StartRanks(daemon, steps);
    digest = Finish(&ranks);
  }
  return digest;
}

class MachineDeathCases : public testing::Test {
 protected:
  std::string state() const { return state_.path() + "/state"; }
  std::string journal() const { return journal_.path() + "/journal"; }

  std::vector<std::string> Flags(const std::string& faults = "") const {
    return {"--journal.directory=" + journal(), "--journal.segment_bytes=262144",
            "--journal.log_bytes_max=400000",
            "--file_faults=unsynced" + (faults.empty() ? "" : "," + faults)};
  }
  std::unique_ptr<DaemonProcess> StartDaemon(const std::string& faults = "",
                                             std::vector<std::string> more = {}) {
    DaemonProcess::Options options;
    options.state_directory = state();
    options.flags = Flags(faults);
    options.flags.insert(options.flags.end(), more.begin(), more.end());
    return std::make_unique<DaemonProcess>(options);
  }
  // After the daemon's death.
  void MachineDies(uint64_t seed = 0) {
    fs::remove_all(state());
    ASSERT_TRUE(env::DropUnsynced(journal(), seed).ok());
  }
  // What the daemon that comes up after the machine has of the job, and the rest of the run.
  void ExpectNothingLost(uint64_t seen, const std::string& expected, int steps = kSteps) {
    auto daemon = StartDaemon();
    if (seen > 0) {
      ASSERT_TRUE(daemon->HasJob("toy")) << daemon->Log();
      EXPECT_GE(daemon->Job("toy").committed_step(), seen) << daemon->Log();
    }
    Processes ranks = StartRanks(*daemon, steps);
    EXPECT_EQ(Finish(&ranks), expected) << daemon->Log();
    EXPECT_EQ(daemon->Job("toy").committed_step(), static_cast<uint64_t>(steps));
    EXPECT_EQ(daemon->Job("toy").applied(), static_cast<uint64_t>(steps));
  }
  // Kills the daemon at `point` after `skip` passes. With `machine` its machine too.
  void KillAt(const std::string& point, uint32_t skip, bool machine = true) {
    const std::string expected = Undisturbed();
    for (const uint64_t seed : {0u, 1u, 2u}) {
      SCOPED_TRACE(testing::Message() << point << " " << seed);
      fs::remove_all(state());
      fs::remove_all(journal());
      auto daemon = StartDaemon();
      daemon->ArmFailpoint(point, "kill", skip);
      Processes ranks = StartRanks(*daemon);
      EXPECT_TRUE(WIFSIGNALED(daemon->AwaitDeath()));
      const uint64_t seen = KillRanks(&ranks);
      if (machine) MachineDies(seed);
      ExpectNothingLost(seen, expected);
      if (!machine) break;
    }
  }
  // A whole run with a daemon whose files fail; then its machine dies, and nothing is lost.
  void RunWithFaults(const std::string& faults, const std::string& on_failure) {
    SCOPED_TRACE(faults + " " + on_failure);
    const std::string expected = Undisturbed();
    fs::remove_all(state());
    fs::remove_all(journal());
    auto daemon = StartDaemon(faults, {"--journal.on_failure=" + on_failure});
    Processes ranks = StartRanks(*daemon);
    EXPECT_EQ(Finish(&ranks), expected) << daemon->Log();
    EXPECT_NE(daemon->Log().find("its journal failed"), std::string::npos) << daemon->Log();
    kill(daemon->pid(), SIGKILL);
    daemon->AwaitDeath();
    MachineDies();
  }
  // A finished run whose machine is gone, with its journal.
  void LeaveAJournal() {
    auto daemon = StartDaemon();
    Processes ranks = StartRanks(*daemon);
    Finish(&ranks);
    kill(daemon->pid(), SIGKILL);
    daemon->AwaitDeath();
    MachineDies();
  }
  void Flip(const std::string& path, uint64_t offset) const {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int old = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(old ^ 4));
  }

  TempDir state_{"/dev/shm"};
  TempDir journal_{"/tmp"};
};

// Three ranks with four slots: 12 descriptors, 4 buckets and 4 chunks a step.
TEST_F(MachineDeathCases, WhilePublishing) { KillAt("step.publish.after_descriptor", 41); }
TEST_F(MachineDeathCases, AfterABucketIsSummed) { KillAt("step.reduce.after", 14); }
TEST_F(MachineDeathCases, BeforeTheDecision) { KillAt("step.decide.before", 4); }
TEST_F(MachineDeathCases, AfterTheDecisionIsRecorded) { KillAt("step.decide.after_record", 4); }
TEST_F(MachineDeathCases, AfterARecordIsWritten) { KillAt("journal.append.after", 23); }
TEST_F(MachineDeathCases, BeforeTheStepIsSynced) { KillAt("journal.sync.before", 6); }
TEST_F(MachineDeathCases, AfterTheStepIsSynced) { KillAt("journal.sync.after", 6); }
TEST_F(MachineDeathCases, BeforeTheUpdate) { KillAt("step.update.before", 4); }
TEST_F(MachineDeathCases, InTheMiddleOfTheUpdate) { KillAt("step.update.after_chunk", 17); }
TEST_F(MachineDeathCases, AfterTheUpdate) { KillAt("step.update.after", 4); }
TEST_F(MachineDeathCases, InTheFirstSnapshot) { KillAt("journal.snapshot.after_chunk", 1); }
TEST_F(MachineDeathCases, InALaterSnapshot) { KillAt("journal.snapshot.after_chunk", 6); }
TEST_F(MachineDeathCases, BeforeTheManifestIsRenamed) {
  KillAt("journal.manifest.before_rename", 0);
  KillAt("journal.manifest.before_rename", 1);
}
TEST_F(MachineDeathCases, AfterTheManifestIsRenamed) {
  KillAt("journal.manifest.after_rename", 0);
  KillAt("journal.manifest.after_rename", 1);
}

// The daemon alone dies: what its journal lacks is written again from the segments.
TEST_F(MachineDeathCases, DaemonAloneBetweenDecisionAndJournal) {
  KillAt("step.decide.after_record", 4, false);
  KillAt("journal.append.after", 23, false);
  KillAt("journal.sync.before", 6, false);
  KillAt("journal.sync.after", 6, false);
  KillAt("journal.snapshot.after_chunk", 1, false);
  KillAt("journal.manifest.before_rename", 0, false);
}

// First the daemon between decision and journal, then the machine of the one that took it up.
TEST_F(MachineDeathCases, AfterAnAdoptionThatWroteTheStepAgain) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.decide.after_record", "kill", 5);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitDeath();
  KillRanks(&ranks);
  daemon = StartDaemon();
  while (daemon->Job("toy").committed_step() < 6) {
  }
  EXPECT_EQ(daemon->Job("toy").durable_step(), 6u);
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  MachineDies();
  ExpectNothingLost(6, expected);
}

TEST_F(MachineDeathCases, DuringRecoveryItselfTwice) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.update.after_chunk", "kill", 25);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitDeath();
  const uint64_t seen = KillRanks(&ranks);
  MachineDies();
  for (const char* point : {"recover.journal.after_chunk", "recover.journal.after_step",
                            "recover.journal.before_rename", "recover.journal.after_chunk"}) {
    const TempDir dir;
    std::string command = Runfile("server/shardd") + " --listen.socket=" + dir.path() +
                          "/d.sock --store.directory=" + state() +
                          " --failpoints=true --arm_failpoint=" + point + ":kill";
    for (const std::string& flag : Flags()) command += " '" + flag + "'";
    const int status = std::system((command + " 2>/dev/null").c_str());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGKILL) << point << status;
    ASSERT_TRUE(env::DropUnsynced(journal()).ok());
  }
  ExpectNothingLost(seen, expected);
}

TEST_F(MachineDeathCases, AtRandomMomentsOneAfterTheOther) {
  constexpr int kMany = 60;
  const std::string expected = Undisturbed(kMany);
  std::mt19937 random(4711);
  uint64_t seen = 0;
  for (int round = 0; round < 12; ++round) {
    auto daemon = StartDaemon();
    if (seen > 0) {
      ASSERT_TRUE(daemon->HasJob("toy")) << daemon->Log();
      EXPECT_GE(daemon->Job("toy").committed_step(), seen) << daemon->Log();
    }
    Processes ranks = StartRanks(*daemon, kMany);
    ASSERT_NE(ranks[0]->AwaitLine("open"), "");
    // Some work of this process measures the time to the kill: any moment will do.
    volatile unsigned sink = 0;
    for (unsigned spin = 0, end = random() % 30'000'000; spin < end; ++spin) sink = sink + spin;
    kill(daemon->pid(), SIGKILL);
    daemon->AwaitDeath();
    seen = std::max(seen, KillRanks(&ranks));
    MachineDies(round % 3 == 0 ? 0 : random() | 1);
  }
  ExpectNothingLost(seen, expected, kMany);
}

TEST_F(MachineDeathCases, AnOrderlyEndAndAMachineThatIsGone) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  Processes ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks), expected);
  const v1::JobStatus before = daemon->Job("toy");
  EXPECT_EQ(before.journal_state(), "whole");
  EXPECT_EQ(before.durable_step(), static_cast<uint64_t>(kSteps));
  EXPECT_NE(before.crash_cost().find("machine: at most one step"), std::string::npos)
      << before.crash_cost();
  EXPECT_GT(before.journal_bytes(), 0u);
  EXPECT_EQ(daemon->Stop(), 0);
  MachineDies();
  daemon = StartDaemon();
  EXPECT_TRUE(daemon->AwaitLog("recovered from its journal: the snapshot of step"));
  const v1::JobStatus after = daemon->Job("toy");
  EXPECT_EQ(after.committed_step(), static_cast<uint64_t>(kSteps));
  EXPECT_EQ(after.last().loss(), before.last().loss());
  EXPECT_EQ(after.last().unix_nanos(), before.last().unix_nanos());
  EXPECT_GT(after.generation(), before.generation());
  EXPECT_EQ(after.job_id(), before.job_id());
  ranks = StartRanks(*daemon);  // nothing is left to do
  EXPECT_EQ(Finish(&ranks), expected);
}

TEST_F(MachineDeathCases, AJobThatWasDeletedDoesNotComeBack) {
  LeaveAJournal();
  auto daemon = StartDaemon();
  ASSERT_TRUE(daemon->HasJob("toy"));
  EXPECT_TRUE(daemon->DeleteJob("toy", false).ok());
  EXPECT_FALSE(fs::exists(journal() + "/toy"));
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  MachineDies();
  daemon = StartDaemon();
  EXPECT_FALSE(daemon->HasJob("toy"));
}

// --- the disk ---

TEST_F(MachineDeathCases, TheNthWriteOrSyncFails) {
  for (const char* faults :
       {"*/log-*:write:2:eio", "*/log-*:write:9:eio", "*/log-*:write:17:short=4096",
        "*/log-*:write:30:short=8192", "*/log-*:write:41:enospc", "*/log-*:sync:7:eio",
        "*/log-*:sync:13:eio", "*/snapshot-*:write:4:eio", "*/snapshot-*:sync:3:eio",
        "*/MANIFEST.new:write:2:enospc", "*/MANIFEST:rename:2:eio", "*/toy:syncdir:3:eio"}) {
    const std::string log_fails = faults;
    const bool snapshot = log_fails.find("log-") == std::string::npos;
    SCOPED_TRACE(faults);
    const std::string expected = Undisturbed();
    fs::remove_all(state());
    fs::remove_all(journal());
    auto daemon = StartDaemon(faults);
    Processes ranks = StartRanks(*daemon);
    EXPECT_EQ(Finish(&ranks), expected) << daemon->Log();
    if (!snapshot) {
      EXPECT_TRUE(daemon->AwaitLog("its journal failed"));
    }
    kill(daemon->pid(), SIGKILL);
    daemon->AwaitDeath();
    MachineDies();
    ExpectNothingLost(kSteps, expected);
  }
}

TEST_F(MachineDeathCases, FullDiskStopsUntilThereIsRoom) {
  RunWithFaults("*/log-*:write:30-33:enospc", "stop");
  ExpectNothingLost(kSteps, Undisturbed());
}

TEST_F(MachineDeathCases, FullDiskThatStaysStopsWithAClearState) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon("*/log-*:write:30+:enospc");
  Processes ranks = StartRanks(*daemon);
  ASSERT_TRUE(daemon->AwaitLog("waits for its journal (journal.on_failure = stop)"));
  const v1::JobStatus status = daemon->Job("toy");
  EXPECT_EQ(status.journal_state(), "stalled");
  EXPECT_NE(status.journal_failure().find(journal() + "/toy/log-"), std::string::npos)
      << status.journal_failure();
  EXPECT_NE(status.journal_failure().find("No space left"), std::string::npos);
  EXPECT_EQ(status.durable_step(), status.committed_step());
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  const uint64_t seen = KillRanks(&ranks);
  EXPECT_LE(seen, status.committed_step());
  MachineDies();
  ExpectNothingLost(seen, expected);
}

TEST_F(MachineDeathCases, FullDiskDegradesVisiblyAndIsWholeAgain) {
  const std::string expected = Undisturbed(400);
  auto daemon = StartDaemon("*/log-*:write:30-33:enospc", {"--journal.on_failure=degrade"});
  Processes ranks = StartRanks(*daemon, 400);
  ASSERT_TRUE(daemon->AwaitLog("goes on without its journal (journal.on_failure = degrade)"));
  EXPECT_EQ(Finish(&ranks), expected);
  v1::JobStatus status = daemon->Job("toy");
  EXPECT_EQ(status.committed_step(), 400u);
  if (status.journal_state() == "degraded") {
    EXPECT_LT(status.durable_step(), 400u);
    EXPECT_NE(status.crash_cost().find("since the journal fails"), std::string::npos)
        << status.crash_cost();
  }
  // The next group begins with a new snapshot.
  const std::string more = Undisturbed(500);
  while (daemon->Job("toy").journal_state() != "whole") {
    ranks = StartRanks(*daemon, 500);
    EXPECT_EQ(Finish(&ranks), more);
  }
  ranks = StartRanks(*daemon, 500);
  EXPECT_EQ(Finish(&ranks), more);
  status = daemon->Job("toy");
  EXPECT_EQ(status.durable_step(), 500u);
  EXPECT_EQ(status.journal_failure(), "");
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  MachineDies();
  ExpectNothingLost(500, more, 500);
}

TEST_F(MachineDeathCases, ADiskWithoutRoomForTheJournalIsSaidBeforeTheJobIsMade) {
  // A disk of one MiB.
  fs::create_directory(journal());
  ASSERT_EQ(mount("tmpfs", journal().c_str(), "tmpfs", 0, "size=1m,mode=700"), 0);
  {
    auto daemon = StartDaemon();
    ParameterSpec w;
    w.name = "w";
    w.shape = {100000};
    JobOptions job = SmallJob("toy", 1);
    const auto refused = Session::Open(RankOptions(daemon->socket(), 0, 1), job, {w});
    EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
    EXPECT_NE(refused.status().message().find("the journal of job 'toy' needs"), std::string::npos)
        << refused.status();
    EXPECT_FALSE(daemon->HasJob("toy"));
    EXPECT_TRUE(fs::is_empty(state() + "/jobs"));
    // As it says, without.
    job.durability = Durability::kProcess;
    auto session = Session::Open(RankOptions(daemon->socket(), 0, 1), job, {w});
    EXPECT_TRUE(session.ok()) << session.status();
  }
  umount2(journal().c_str(), MNT_DETACH);
}

// --- damage ---

TEST_F(MachineDeathCases, ABadRecordThatWasDurableIsRefusedByNameAndNotLoaded) {
  LeaveAJournal();
  // The first record after the segment's header, in the newest segment with a second one.
  std::string damaged;
  for (const auto& entry : fs::directory_iterator(journal() + "/toy")) {
    if (entry.path().filename().string().rfind("log-", 0) != 0) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    file.seekg(4096);
    uint64_t magic = 0;
    file.read(reinterpret_cast<char*>(&magic), sizeof(magic));
    if (magic == journal::kRecordMagic) damaged = entry.path();
  }
  ASSERT_NE(damaged, "");
  for (const auto& entry : fs::directory_iterator(journal() + "/toy")) {
    const std::string path = entry.path();
    if (entry.path().filename().string().rfind("log-", 0) == 0) Flip(path, 4096 + 100);
  }
  {
    auto daemon = StartDaemon();
    EXPECT_FALSE(daemon->HasJob("toy"));
    EXPECT_TRUE(
        daemon->AwaitLog("job toy cannot be recovered from its journal, which is left "
                         "untouched in " +
                         journal() + "/toy"));
    EXPECT_NE(daemon->Log().find("log-"), std::string::npos);
    EXPECT_NE(daemon->Log().find(" at "), std::string::npos);
    // Its name is not free, and says why; other jobs are served.
    ParameterSpec w;
    w.name = "w";
    w.shape = {4};
    const auto refused =
        Session::Open(RankOptions(daemon->socket(), 0, 1), SmallJob("toy", 1), {w});
    EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
    auto other = OpenRank(daemon->socket(), 0, 1, SmallJob("other", 1), {w});
    EXPECT_TRUE(other->Close().ok());
  }
  for (const auto& entry : fs::directory_iterator(journal() + "/toy")) {
    const std::string path = entry.path();
    if (entry.path().filename().string().rfind("log-", 0) == 0) Flip(path, 4096 + 100);
  }
  ExpectNothingLost(kSteps, Undisturbed());
}

TEST_F(MachineDeathCases, ABitFlippedInAnyFileIsNamedOrDoesNotCount) {
  LeaveAJournal();
  const std::string expected = Undisturbed();
  const std::string kept = journal_.path() + "/kept";
  fs::copy(journal(), kept, fs::copy_options::recursive);
  std::mt19937 random(3);
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(kept + "/toy")) {
    files.push_back(entry.path().filename());
  }
  std::sort(files.begin(), files.end());
  int refused = 0;
  for (int i = 0; i < 24; ++i) {
    const std::string name = files[static_cast<size_t>(i) % files.size()];
    fs::remove_all(state());
    fs::remove_all(journal());
    fs::copy(kept, journal(), fs::copy_options::recursive);
    const std::string path = journal() + "/toy/" + name;
    Flip(path, random() % fs::file_size(path));
    auto daemon = StartDaemon();
    if (!daemon->HasJob("toy")) {
      ++refused;
      EXPECT_NE(daemon->Log().find(path), std::string::npos) << path << daemon->Log();
      continue;
    }
    Processes ranks = StartRanks(*daemon);
    EXPECT_EQ(Finish(&ranks), expected) << path;
  }
  EXPECT_GT(refused, 5);
}

TEST_F(MachineDeathCases, ADamagedSnapshotIsReplacedByTheOneBefore) {
  const std::string expected = Undisturbed(40);
  const std::vector<std::string> keep = {"--journal.snapshots_kept=3"};
  auto daemon = StartDaemon("", keep);
  Processes ranks = StartRanks(*daemon, 40);
  Finish(&ranks);
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  MachineDies();
  journal::ManifestPage manifest;
  std::ifstream file(journal() + "/toy/MANIFEST", std::ios::binary);
  file.read(reinterpret_cast<char*>(&manifest), sizeof(manifest));
  ASSERT_GE(manifest.snapshots, 2u);
  const std::string newest =
      journal() + "/toy/" + journal::SnapshotName(manifest.snapshot[manifest.snapshots - 1].slot);
  Flip(newest, 4096 + 500);  // in its image
  daemon = StartDaemon("", keep);
  EXPECT_NE(daemon->Log().find(newest), std::string::npos) << daemon->Log();
  EXPECT_NE(daemon->Log().find("the snapshot before it is taken"), std::string::npos);
  EXPECT_EQ(daemon->Job("toy").committed_step(), 40u);
  ranks = StartRanks(*daemon, 40);
  EXPECT_EQ(Finish(&ranks), expected);
}

TEST_F(MachineDeathCases, AJournalOfANewerVersionIsRefusedByName) {
  LeaveAJournal();
  const std::string path = journal() + "/toy/MANIFEST";
  journal::ManifestPage page;
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.read(reinterpret_cast<char*>(&page), sizeof(page));
  page.version = journal::kJournalVersion + 1;
  page.crc = journal::PageCrc(&page, &page.crc);
  file.seekp(0);
  file.write(reinterpret_cast<const char*>(&page), sizeof(page)).flush();
  auto daemon = StartDaemon();
  EXPECT_TRUE(daemon->AwaitLog(path + " has format version 2; this daemon reads 1"));
  EXPECT_FALSE(daemon->HasJob("toy"));
  EXPECT_TRUE(fs::exists(path));
}

TEST_F(MachineDeathCases, ADamagedJournalOfALivingJobIsBegunAnew) {
  const std::string expected = Undisturbed();
  auto daemon = StartDaemon();
  daemon->ArmFailpoint("step.update.after", "kill", 6);
  Processes ranks = StartRanks(*daemon);
  daemon->AwaitDeath();
  KillRanks(&ranks);
  Flip(journal() + "/toy/MANIFEST", 50);
  daemon = StartDaemon();
  EXPECT_TRUE(daemon->AwaitLog("its journal is begun anew from the living state"));
  EXPECT_TRUE(fs::exists(journal() + "/.toy.damaged"));
  ranks = StartRanks(*daemon);
  EXPECT_EQ(Finish(&ranks), expected);
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  MachineDies();
  ExpectNothingLost(kSteps, expected);
}

// --- choice ---

TEST_F(MachineDeathCases, DurabilityIsRefusedWhereItIsNotOffered) {
  ParameterSpec w;
  w.name = "w";
  w.shape = {4};
  DaemonProcess without;
  JobOptions job = SmallJob("toy", 1);
  job.durability = Durability::kNode;
  const auto refused = Session::Open(RankOptions(without.socket(), 0, 1), job, {w});
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
  EXPECT_NE(refused.status().message().find("journal.directory"), std::string::npos);
  auto with = StartDaemon();
  job.durability = static_cast<Durability>(3);
  const auto peer = Session::Open(RankOptions(with->socket(), 0, 1), job, {w});
  EXPECT_TRUE(absl::IsInvalidArgument(peer.status())) << peer.status();
  EXPECT_NE(peer.status().message().find("is peer, which this daemon does not offer"),
            std::string::npos);
  // A job without durability costs nothing there.
  job.durability = Durability::kProcess;
  auto session = OpenRank(with->socket(), 0, 1, job, {w});
  EXPECT_FALSE(fs::exists(journal() + "/toy"));
  EXPECT_NE(with->Job("toy").crash_cost().find("machine: the whole job"), std::string::npos);
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(MachineDeathCases, AJournalDirectoryThatAnotherDaemonHoldsIsRefused) {
  auto daemon = StartDaemon();
  const TempDir dir;
  const TempDir other("/dev/shm");
  const std::string log = dir.path() + "/log";
  const std::string command = Runfile("server/shardd") + " --listen.socket=" + dir.path() +
                              "/d.sock --store.directory=" + other.path() +
                              "/state --journal.directory=" + journal() + " 2>" + log;
  EXPECT_NE(std::system(command.c_str()), 0);
  std::ifstream file(log);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(text.find("another daemon holds the journal directory"), std::string::npos) << text;
}

TEST_F(MachineDeathCases, MemoryAndDescriptorsStayFlatOverManySnapshots) {
  auto daemon = StartDaemon();
  const auto resident = [&] {
    std::ifstream status("/proc/" + std::to_string(daemon->pid()) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("RssAnon:", 0) == 0) return std::stol(line.substr(8));
    }
    return 0L;
  };
  const auto descriptors = [&] {
    return std::distance(fs::directory_iterator("/proc/" + std::to_string(daemon->pid()) + "/fd"),
                         {});
  };
  Processes ranks = StartRanks(*daemon, 100);
  Finish(&ranks);
  const long before = resident();
  const auto open = descriptors();
  const uint64_t snapshot = daemon->Job("toy").journal_snapshot_step();
  ranks = StartRanks(*daemon, 500);
  Finish(&ranks);
  EXPECT_GT(daemon->Job("toy").journal_snapshot_step(), snapshot + 100);  // they take their time
  EXPECT_LT(resident(), before + 8192) << "KiB";
  EXPECT_LE(descriptors(), open + 4);
}

}  // namespace
}  // namespace shardd::test

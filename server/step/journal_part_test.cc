#include "server/step/journal_part.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <span>

#include "server/env/faulty_file_system.h"
#include "server/journal/format.h"

namespace shardd::step {
namespace {

namespace fs = std::filesystem;

class JournalPartTest : public testing::Test {
 protected:
  JournalPartTest() {
    char path[] = "/tmp/journal_part_XXXXXX";
    parent_ = mkdtemp(path);
  }
  ~JournalPartTest() override { fs::remove_all(parent_); }

  // A directory whose file says what it is.
  void Make(const std::string& name) {
    fs::create_directory(parent_ + "/" + name);
    std::ofstream(parent_ + "/" + name + "/MANIFEST") << name;
  }
  std::string Contents(const std::string& name) {
    std::ifstream file(parent_ + "/" + name + "/MANIFEST");
    std::string text;
    file >> text;
    return text;
  }
  std::string parent_;
};

v1::JobPeers SomePeers() {
  v1::JobPeers peers;
  peers.set_coordinator("a");
  peers.set_daemon("b");
  peers.set_owners_version(7);
  uint64_t next = 0;
  for (const auto& [daemon, chunks] : {std::pair("b", 2), {"a", 3}, {"b", 1}}) {
    auto* range = peers.add_owners();
    range->set_first_chunk(next);
    range->set_chunks(static_cast<uint64_t>(chunks));
    range->set_daemon(daemon);
    next += range->chunks();
  }
  return peers;
}

TEST_F(JournalPartTest, PeersComeBackAndAFlippedBitIsFound) {
  env::FileSystem* files = env::PosixFileSystem();
  EXPECT_TRUE(absl::IsNotFound(ReadJournalPeers(files, parent_).status()));
  const std::string text = EncodeJournalPeers(SomePeers());
  const std::string path = parent_ + "/" + journal::kPeersName;
  ASSERT_TRUE(env::ReplaceFile(files, path, std::as_bytes(std::span(text))).ok());
  const absl::StatusOr<v1::JobPeers> read = ReadJournalPeers(files, parent_);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->SerializeAsString(), SomePeers().SerializeAsString());
  EXPECT_EQ(OwnChunks(*read), (std::vector<contract::Range>{{0, 2}, {5, 6}}));
  for (size_t at = 0; at < text.size(); ++at) {
    std::string flipped = text;
    flipped[at] = static_cast<char>(flipped[at] ^ 4);
    ASSERT_TRUE(env::ReplaceFile(files, path, std::as_bytes(std::span(flipped))).ok());
    EXPECT_TRUE(absl::IsDataLoss(ReadJournalPeers(files, parent_).status())) << at;
  }
}

TEST_F(JournalPartTest, ASwitchPutsTheNextOneInPlace) {
  Make("job");
  Make(".job.next");
  ASSERT_TRUE(SwitchJournal(env::PosixFileSystem(), parent_ + "/job").ok());
  EXPECT_EQ(Contents("job"), ".job.next");
  EXPECT_FALSE(fs::exists(parent_ + "/.job.next"));
  EXPECT_FALSE(fs::exists(parent_ + "/.job.last"));
}

TEST_F(JournalPartTest, ASwitchThatFailsLeavesTheOneThatWas) {
  for (const char* fault : {"*:rename:1:eio", "*:rename:2:eio"}) {
    fs::remove_all(parent_);
    fs::create_directory(parent_);
    Make("job");
    Make(".job.next");
    absl::StatusOr<env::FaultPlan> plan = env::ParseFaultPlan(fault);
    ASSERT_TRUE(plan.ok()) << plan.status();
    env::FaultyFileSystem files(env::PosixFileSystem(), *plan);
    EXPECT_FALSE(SwitchJournal(&files, parent_ + "/job").ok()) << fault;
    EXPECT_EQ(Contents("job"), "job") << fault;
    EXPECT_EQ(Contents(".job.next"), ".job.next") << fault;
  }
}

TEST_F(JournalPartTest, ACrashInASwitchIsCompletedAtTheNextStart) {
  Make(".between.last");
  Make(".between.next");
  Make("begun");
  Make(".begun.next");
  Make("done");
  Make(".done.last");
  Make(".back.last");
  Make(".deleted.next");
  ASSERT_TRUE(FinishJournalSwitches(env::PosixFileSystem(), parent_).ok());
  EXPECT_EQ(Contents("between"), ".between.next");
  EXPECT_EQ(Contents("begun"), "begun");
  EXPECT_EQ(Contents(".begun.next"), ".begun.next");  // who coordinates says whether it counts
  EXPECT_EQ(Contents("done"), "done");
  EXPECT_EQ(Contents("back"), ".back.last");
  for (const char* gone :
       {".between.last", ".between.next", ".done.last", ".back.last", ".deleted.next", "deleted"}) {
    EXPECT_FALSE(fs::exists(parent_ + "/" + gone)) << gone;
  }
}

}  // namespace
}  // namespace shardd::step

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "server/env/faulty_file_system.h"
#include "server/journal/log_reader.h"
#include "server/journal/log_writer.h"

namespace shardd::journal {
namespace {

constexpr uint64_t kSegment = 64 << 10;

class LogTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "/tmp/shardd-log-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  LogWriter Writer(env::FileSystem* files, LogEnd end = {}) const {
    return LogWriter(files, root_, job_, kSegment, std::move(end));
  }
  // A record whose payload is `bytes` bytes that say `step`.
  absl::Status Append(LogWriter* log, uint64_t step, uint64_t bytes) const {
    env::AlignedBuffer payload(bytes);
    std::memset(payload.data(), static_cast<int>(step * 37 + 1), bytes);
    Record record;
    record.fields = {.kind = RecordKind::kGradient, .generation = 3, .step = step, .bucket = 1};
    record.payload = payload.data();
    record.payload_bytes = bytes;
    return log->Append(record);
  }
  absl::StatusOr<LogIndex> Read(LogRange range = {}) const {
    return ReadLog(env::PosixFileSystem(), root_, job_, range);
  }
  std::vector<uint64_t> Steps(const LogIndex& log) const {
    std::vector<uint64_t> steps;
    for (const RecordPlace& place : log.records) {
      absl::StatusOr<env::AlignedBuffer> whole = ReadRecord(log, place, job_);
      EXPECT_TRUE(whole.ok()) << whole.status();
      if (!whole.ok()) break;
      EXPECT_EQ(whole->data()[kPageBytes], static_cast<std::byte>(place.fields.step * 37 + 1));
      steps.push_back(place.fields.step);
    }
    return steps;
  }
  // Flips one bit of a file, and back when called again.
  void Flip(const std::string& name, uint64_t offset) const {
    std::fstream file(root_ + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int old = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(old ^ 0x10));
  }

  const JobIdentity job_{"toy", 11, 22};
  std::string root_;
  using Numbers = std::vector<uint64_t>;
};

TEST_F(LogTest, WhatIsAppendedIsFoundAcrossSegments) {
  LogWriter log = Writer(env::PosixFileSystem());
  ASSERT_TRUE(log.Preallocate(2).ok());
  Numbers steps;
  for (uint64_t step = 1; step <= 20; ++step) {
    ASSERT_TRUE(Append(&log, step, step * 1000).ok());
    steps.push_back(step);
  }
  ASSERT_TRUE(log.Sync().ok());
  EXPECT_EQ(log.durable_lsn(), 20u);
  EXPECT_GT(log.live_segments(), 2u);
  absl::StatusOr<LogIndex> read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Steps(*read), steps);
  EXPECT_EQ(read->end.next_lsn, 21u);
  EXPECT_EQ(read->end.live.size(), log.live_segments());
  EXPECT_EQ(read->cut, "");
  EXPECT_EQ(read->records[3].payload_bytes, 4000u);
  EXPECT_EQ(read->records[3].fields.generation, 3u);
  // From a later record on.
  read = Read({.keep_lsn = 15, .redo_lsn = 17, .durable_lsn = 20});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Steps(*read), (Numbers{17, 18, 19, 20}));
  EXPECT_LT(read->end.live.size(), log.live_segments());
}

TEST_F(LogTest, AnEmptyDirectoryIsAnEmptyLog) {
  absl::StatusOr<LogIndex> read = Read();
  ASSERT_TRUE(read.ok());
  EXPECT_TRUE(read->records.empty());
  EXPECT_EQ(read->end.next_lsn, 1u);
  // Unless something was durable in it.
  EXPECT_TRUE(absl::IsDataLoss(Read({.durable_lsn = 5}).status()));
}

TEST_F(LogTest, SegmentsAreUsedAgainAndTheirOldContentIsNotTaken) {
  LogWriter log = Writer(env::PosixFileSystem());
  for (uint64_t step = 1; step <= 200; ++step) {
    ASSERT_TRUE(Append(&log, step, 9000).ok());
    ASSERT_TRUE(log.Sync().ok());
    log.Free(log.next_lsn() - 4);
  }
  const size_t files = std::distance(std::filesystem::directory_iterator(root_), {});
  EXPECT_LE(files, 4u);
  absl::StatusOr<LogIndex> read = Read({.keep_lsn = 197, .redo_lsn = 197, .durable_lsn = 190});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Steps(*read), (Numbers{197, 198, 199, 200}));
}

TEST_F(LogTest, ATornTailIsCutThoughLaterRecordsLookWhole) {
  LogWriter log = Writer(env::PosixFileSystem());
  ASSERT_TRUE(Append(&log, 1, 5000).ok());
  ASSERT_TRUE(log.Sync().ok());
  ASSERT_TRUE(Append(&log, 2, 5000).ok());
  ASSERT_TRUE(Append(&log, 3, 5000).ok());  // knows of the first as durable
  // The payload of the second, then its header: page 0 header, then 12 KiB a record.
  for (const uint64_t offset : {4096u + 12288u + 4096u + 100u, 4096u + 12288u + 40u}) {
    Flip("log-0", offset);
    absl::StatusOr<LogIndex> read = Read();
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(Steps(*read), Numbers{1});
    EXPECT_EQ(read->end.next_lsn, 2u);
    EXPECT_NE(read->cut.find("log-0 at 16384"), std::string::npos) << read->cut;
    Flip("log-0", offset);
  }
  // The log goes on after the cut, in a segment of its own.
  Flip("log-0", 4096 + 12288 + 100);
  LogWriter next = Writer(env::PosixFileSystem(), Read()->end);
  ASSERT_TRUE(Append(&next, 7, 5000).ok());
  ASSERT_TRUE(next.Sync().ok());
  absl::StatusOr<LogIndex> read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Steps(*read), (Numbers{1, 7}));
}

TEST_F(LogTest, ADamagedRecordThatWasDurableIsRefusedByFileAndOffset) {
  LogWriter log = Writer(env::PosixFileSystem());
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(Append(&log, step, 5000).ok());
    ASSERT_TRUE(log.Sync().ok());
  }
  // The header of the second: the third knows that it was durable.
  Flip("log-0", 4096 + 12288 + 40);
  absl::StatusOr<LogIndex> read = Read();
  EXPECT_TRUE(absl::IsDataLoss(read.status())) << read.status();
  EXPECT_NE(read.status().message().find(root_ + "/log-0 at 16384"), std::string::npos)
      << read.status();
  Flip("log-0", 4096 + 12288 + 40);
  // Its payload is found when it is read.
  Flip("log-0", 4096 + 12288 + 4096 + 100);
  read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  const absl::Status status = ReadRecord(*read, read->records[1], job_).status();
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_NE(status.message().find("log-0 at 16384"), std::string::npos) << status;
  Flip("log-0", 4096 + 12288 + 4096 + 100);
  // The third is the last; only the manifest may know that it was durable.
  Flip("log-0", 4096 + 2 * 12288 + 40);
  EXPECT_EQ(Read()->end.next_lsn, 3u);
  EXPECT_TRUE(absl::IsDataLoss(Read({.durable_lsn = 3}).status()));
}

TEST_F(LogTest, AnyFlippedBitIsFoundOrDoesNotCount) {
  LogWriter log = Writer(env::PosixFileSystem());
  ASSERT_TRUE(log.Preallocate(3).ok());
  for (uint64_t step = 1; step <= 8; ++step) {
    ASSERT_TRUE(Append(&log, step, 9000).ok());
    ASSERT_TRUE(log.Sync().ok());
  }
  const LogRange range{.durable_lsn = 8};
  std::mt19937 random(7);
  int found = 0;
  for (int i = 0; i < 300; ++i) {
    const std::string name = "log-" + std::to_string(random() % 3);
    const uint64_t offset = random() % kSegment;
    Flip(name, offset);
    absl::StatusOr<LogIndex> read = Read(range);
    bool whole = read.ok();
    for (size_t r = 0; whole && r < read->records.size(); ++r) {
      whole = ReadRecord(*read, read->records[r], job_).ok();
    }
    if (whole) {
      EXPECT_EQ(Steps(*read), (Numbers{1, 2, 3, 4, 5, 6, 7, 8}));
    }
    found += whole ? 0 : 1;
    Flip(name, offset);
  }
  EXPECT_GT(found, 100);
}

TEST_F(LogTest, AfterAFailedSyncTheSegmentIsGivenUp) {
  env::FaultyFileSystem files(env::PosixFileSystem(), *env::ParseFaultPlan("*/log-*:sync:3:eio"));
  LogWriter log = Writer(&files);  // the first sync is the new file's
  ASSERT_TRUE(Append(&log, 1, 5000).ok());
  ASSERT_TRUE(log.Sync().ok());
  ASSERT_TRUE(Append(&log, 2, 5000).ok());
  EXPECT_TRUE(absl::IsDataLoss(log.Sync()));
  log.StartOver(false);
  ASSERT_TRUE(Append(&log, 20, 5000).ok());
  ASSERT_TRUE(log.Sync().ok());
  absl::StatusOr<LogIndex> read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Steps(*read), (Numbers{1, 20}));
  // What was given up may be damaged.
  Flip("log-0", 4096 + 12288 + 40);
  read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Steps(*read), (Numbers{1, 20}));
}

TEST_F(LogTest, SegmentsThatFailOneAfterTheOtherLeaveNothingBehind) {
  env::FaultyFileSystem files(env::PosixFileSystem(),
                              *env::ParseFaultPlan("*/log-*:write:3-40:enospc"));
  LogWriter log = Writer(&files);
  ASSERT_TRUE(log.Preallocate(3).ok());
  ASSERT_TRUE(Append(&log, 1, 5000).ok());
  ASSERT_TRUE(log.Sync().ok());
  int failures = 0;
  while (!Append(&log, 2, 5000).ok()) {
    log.StartOver(false);
    ASSERT_LT(++failures, 100);
  }
  ASSERT_TRUE(log.Sync().ok());
  EXPECT_GT(failures, 20);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(root_), {}), 3);
  absl::StatusOr<LogIndex> read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Steps(*read), (Numbers{1, 2}));
}

TEST_F(LogTest, WhatComesAfterAGapCountsOnlyFromThereOn) {
  uint64_t after = 0;
  {
    LogWriter log = Writer(env::PosixFileSystem());
    for (uint64_t step = 1; step <= 3; ++step) ASSERT_TRUE(Append(&log, step, 5000).ok());
    ASSERT_TRUE(log.Sync().ok());
    log.StartOver(true);
    after = log.next_lsn();
    ASSERT_TRUE(Append(&log, 9, 5000).ok());
    ASSERT_TRUE(log.Sync().ok());
  }
  EXPECT_GT(after, 4u);
  EXPECT_EQ(Steps(*Read({.redo_lsn = 2})), (Numbers{2, 3}));
  EXPECT_EQ(Steps(*Read({.redo_lsn = 4})), Numbers{});
  EXPECT_EQ(Steps(*Read({.keep_lsn = after, .redo_lsn = after})), Numbers{9});
  // Recovered from before the gap, the log goes on there, and what came after it is gone.
  LogWriter next = Writer(env::PosixFileSystem(), Read({.redo_lsn = 2})->end);
  ASSERT_TRUE(next.Discard().ok());
  ASSERT_TRUE(Append(&next, 4, 5000).ok());
  ASSERT_TRUE(next.Sync().ok());
  EXPECT_EQ(Steps(*Read({.redo_lsn = 2})), (Numbers{2, 3, 4}));
}

TEST_F(LogTest, AMissingSegmentIsFound) {
  LogWriter log = Writer(env::PosixFileSystem());
  for (uint64_t step = 1; step <= 20; ++step) ASSERT_TRUE(Append(&log, step, 9000).ok());
  ASSERT_TRUE(log.Sync().ok());
  std::filesystem::rename(root_ + "/log-1", root_ + "/kept");
  EXPECT_TRUE(absl::IsDataLoss(Read().status())) << Read().status();
  std::filesystem::rename(root_ + "/kept", root_ + "/log-1");
  EXPECT_TRUE(Read().ok());
}

TEST_F(LogTest, OfAnotherJobOrVersionIsRefused) {
  LogWriter log = Writer(env::PosixFileSystem());
  ASSERT_TRUE(Append(&log, 1, 5000).ok());
  const JobIdentity other{"other", 12, 22};
  EXPECT_TRUE(absl::IsDataLoss(ReadLog(env::PosixFileSystem(), root_, other, {}).status()));
  // A newer version says so, if its checksum fits.
  std::fstream file(root_ + "/log-0", std::ios::in | std::ios::out | std::ios::binary);
  env::AlignedBuffer page(kPageBytes);
  file.read(reinterpret_cast<char*>(page.data()), kPageBytes);
  auto* header = page.as<SegmentHeader>();
  header->version = kJournalVersion + 1;
  header->crc = PageCrc(header, &header->crc);
  file.seekp(0);
  file.write(reinterpret_cast<const char*>(page.data()), kPageBytes);
  file.close();
  const absl::Status newer = Read().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(newer)) << newer;
  EXPECT_NE(newer.message().find("format version 2"), std::string::npos) << newer;
}

// Machines that die at any write, with any half of what was not synced on the disk.
TEST_F(LogTest, NothingDurableIsLostWhateverReachesTheDisk) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directory(root_);
    std::mt19937 random(static_cast<unsigned>(seed));
    uint64_t durable = 0;
    {
      env::FaultyFileSystem files(env::PosixFileSystem(), *env::ParseFaultPlan("unsynced"));
      LogWriter log = Writer(&files);
      for (uint64_t step = 1; step <= 5 + random() % 20; ++step) {
        ASSERT_TRUE(Append(&log, step, 1 + random() % 20000).ok());
        if (random() % 3 == 0) {
          ASSERT_TRUE(log.Sync().ok());
        }
        durable = log.durable_lsn();
      }
    }
    ASSERT_TRUE(env::DropUnsynced(root_, seed % 4 == 0 ? 0 : seed).ok());
    absl::StatusOr<LogIndex> read = Read();
    ASSERT_TRUE(read.ok()) << read.status() << " seed " << seed;
    EXPECT_GE(read->end.next_lsn, durable + 1) << "seed " << seed;
    const Numbers steps = Steps(*read);
    for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i], i + 1);
  }
}

// A segment has its length from its beginning on: a shorter one is no torn tail.
TEST_F(LogTest, SegmentThatLostItsEndIsRefused) {
  LogWriter log = Writer(env::PosixFileSystem());
  ASSERT_TRUE(log.Preallocate(2).ok());
  for (uint64_t step = 1; step <= 3; ++step) ASSERT_TRUE(Append(&log, step, 5000).ok());
  ASSERT_TRUE(log.Sync().ok());
  const std::string path = root_ + "/log-0";
  for (const uint64_t bytes : {kSegment - 1, kSegment / 2, kPageBytes, kPageBytes - 1, size_t{0}}) {
    std::filesystem::resize_file(path, bytes);
    const absl::Status refused = Read().status();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << bytes << " " << refused;
    EXPECT_NE(refused.message().find(path), std::string::npos) << refused;
  }
}

TEST_F(LogTest, FileThatWasNotFinishedIsNoSegment) {
  env::FaultyFileSystem files(env::PosixFileSystem(), *env::ParseFaultPlan("*/log-1*:sync:1:eio"));
  LogWriter log = Writer(&files);
  EXPECT_FALSE(log.Preallocate(2).ok());
  EXPECT_FALSE(std::filesystem::exists(root_ + "/log-1"));
  std::ofstream(root_ + "/log-2.new") << "left by a crash";
  EXPECT_TRUE(Read().ok()) << Read().status();
  ASSERT_TRUE(log.Preallocate(3).ok());
  EXPECT_EQ(std::filesystem::file_size(root_ + "/log-2"), kSegment);
  EXPECT_FALSE(std::filesystem::exists(root_ + "/log-2.new"));
}

}  // namespace
}  // namespace shardd::journal

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <vector>

#include "server/env/faulty_file_system.h"
#include "server/journal/manifest.h"
#include "server/journal/snapshot_file.h"

namespace shardd::journal {
namespace {

class SnapshotTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "/tmp/shardd-snapshot-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // Chunk c has c * 100 + 1 elements of value c in each of its arrays.
  absl::StatusOr<ManifestSnapshot> Write(uint64_t chunks, uint64_t slot = 0) const {
    auto writer = SnapshotWriter::Create(env::PosixFileSystem(), root_, slot, 1 << 20, job_, 5);
    if (!writer.ok()) return writer.status();
    env::AlignedBuffer image(10000);
    std::memset(image.data(), 7, 10000);
    Record record;
    record.fields.kind = RecordKind::kImage;
    record.payload = image.data();
    record.payload_bytes = 10000;
    if (absl::Status s = (*writer)->Add(record); !s.ok()) return s;
    for (uint64_t c = 0; c < chunks; ++c) {
      const uint64_t count = c * 100 + 1;
      env::AlignedBuffer values(count * 12);
      for (uint64_t i = 0; i < count * 3; ++i) values.as<float>()[i] = static_cast<float>(c);
      Record chunk;
      chunk.fields = {
          .kind = RecordKind::kChunk, .step = c, .bucket = c, .arrays = 3, .count = count};
      chunk.payload = values.data();
      chunk.payload_bytes = count * 12;
      if (absl::Status s = (*writer)->Add(chunk); !s.ok()) return s;
    }
    return (*writer)->Finish();
  }
  absl::Status Check(const ManifestSnapshot& snapshot, uint64_t chunks) const {
    auto reader = SnapshotReader::Open(env::PosixFileSystem(), root_, job_, snapshot);
    if (!reader.ok()) return reader.status();
    EXPECT_EQ((*reader)->image_bytes(), 10000u);
    EXPECT_EQ((*reader)->image()[9999], std::byte{7});
    EXPECT_EQ((*reader)->chunks(), chunks);
    uint64_t index = 0;
    while (true) {
      auto batch = (*reader)->NextBatch();
      if (!batch.ok()) return batch.status();
      if (batch->empty()) break;
      for (const ChunkBytes& chunk : *batch) {
        if (absl::Status s = (*reader)->Check(chunk, index, index); !s.ok()) return s;
        EXPECT_EQ(chunk.header->step, index);
        EXPECT_EQ(chunk.header->count, index * 100 + 1);
        EXPECT_EQ(*reinterpret_cast<const float*>(chunk.payload.data()), static_cast<float>(index));
        ++index;
      }
    }
    EXPECT_EQ(index, chunks);
    return absl::OkStatus();
  }

  const JobIdentity job_{"toy", 11, 22};
  std::string root_;
};

TEST_F(SnapshotTest, WhatIsWrittenIsRead) {
  for (const uint64_t chunks : {1u, 2u, 300u}) {
    absl::StatusOr<ManifestSnapshot> snapshot = Write(chunks);
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    EXPECT_EQ(snapshot->records, chunks + 2);
    const absl::Status status = Check(*snapshot, chunks);
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_F(SnapshotTest, AFlippedBitAnywhereIsNamed) {
  const ManifestSnapshot snapshot = *Write(20);
  const std::string path = root_ + "/snapshot-0";
  for (uint64_t offset = 17; offset < snapshot.bytes; offset += 1009) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int old = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(old ^ 1)).flush();
    const absl::Status status = Check(snapshot, 20);
    EXPECT_TRUE(absl::IsDataLoss(status)) << offset << " " << status;
    EXPECT_NE(status.message().find(path), std::string::npos) << status;
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(old));
  }
  EXPECT_TRUE(Check(snapshot, 20).ok());
}

TEST_F(SnapshotTest, AnEarlierUseOfTheFileIsNotTaken) {
  const ManifestSnapshot old = *Write(5);
  const ManifestSnapshot now = *Write(5);
  EXPECT_TRUE(Check(now, 5).ok());
  EXPECT_TRUE(absl::IsDataLoss(Check(old, 5)));
}

TEST_F(SnapshotTest, ManifestIsTheOldOrTheNewOne) {
  Manifest manifest;
  manifest.job = job_;
  manifest.durable_lsn = 17;
  manifest.snapshots.push_back({.slot = 1,
                                .number = 2,
                                .nonce = 3,
                                .records = 4,
                                .bytes = 5 * kPageBytes,
                                .step = 6,
                                .redo_lsn = 7,
                                .reserved = 0});
  EXPECT_TRUE(absl::IsNotFound(ReadManifest(env::PosixFileSystem(), root_).status()));
  const auto plan = [](const std::string& text) { return *env::ParseFaultPlan(text); };
  {
    env::FaultyFileSystem files(env::PosixFileSystem(), plan("unsynced"));
    ASSERT_TRUE(WriteManifest(&files, root_, manifest, [] {}).ok());
  }
  for (const char* fault :
       {"unsynced,*:write:1:eio", "unsynced,*:write:1:short=9", "unsynced,*:sync:1:eio",
        "unsynced,*:rename:1:eio", "unsynced,*:syncdir:1:eio", "unsynced,*:create:1:enospc"}) {
    env::FaultyFileSystem files(env::PosixFileSystem(), plan(fault));
    Manifest next = manifest;
    next.durable_lsn = 18;
    EXPECT_FALSE(WriteManifest(&files, root_, next, [] {}).ok()) << fault;
    ASSERT_TRUE(env::DropUnsynced(root_).ok());
    absl::StatusOr<Manifest> read = ReadManifest(env::PosixFileSystem(), root_);
    ASSERT_TRUE(read.ok()) << read.status() << " " << fault;
    EXPECT_EQ(read->durable_lsn, 17u) << fault;
    EXPECT_EQ(read->job.name, "toy");
    ASSERT_EQ(read->snapshots.size(), 1u);
    EXPECT_EQ(read->snapshots[0].redo_lsn, 7u);
  }
  std::fstream file(root_ + "/MANIFEST", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(3000);
  file.put('x').flush();
  const absl::Status damaged = ReadManifest(env::PosixFileSystem(), root_).status();
  EXPECT_TRUE(absl::IsDataLoss(damaged));
  EXPECT_NE(damaged.message().find(root_ + "/MANIFEST"), std::string::npos) << damaged;
}

// The checksums fit, and what they protect cannot be.
TEST_F(SnapshotTest, ManifestThatLiesIsRefused) {
  const auto read = [&](const std::function<void(ManifestPage*)>& lie) {
    Manifest manifest;
    manifest.job = job_;
    manifest.durable_lsn = 17;
    for (uint64_t n = 1; n <= 2; ++n) {
      manifest.snapshots.push_back({.slot = n,
                                    .number = n,
                                    .nonce = 3,
                                    .records = 4,
                                    .bytes = 5 * kPageBytes,
                                    .step = n,
                                    .redo_lsn = n,
                                    .reserved = 0});
    }
    EXPECT_TRUE(WriteManifest(env::PosixFileSystem(), root_, manifest, [] {}).ok());
    std::fstream file(root_ + "/MANIFEST", std::ios::in | std::ios::out | std::ios::binary);
    ManifestPage page;
    file.read(reinterpret_cast<char*>(&page), sizeof(page));
    lie(&page);
    page.crc = PageCrc(&page, &page.crc);
    file.seekp(0);
    file.write(reinterpret_cast<const char*>(&page), sizeof(page)).flush();
    return ReadManifest(env::PosixFileSystem(), root_).status();
  };
  EXPECT_TRUE(read([](ManifestPage*) {}).ok());
  const std::vector<std::function<void(ManifestPage*)>> lies = {
      [](ManifestPage* page) { page->snapshots = ~uint64_t{0}; },
      [](ManifestPage* page) { page->snapshot[1].slot = uint64_t{1} << 61; },
      [](ManifestPage* page) { page->snapshot[1].number = 1; },
      [](ManifestPage* page) { page->snapshot[1].records = (uint64_t{1} << 61) + 2; },
      [](ManifestPage* page) { page->snapshot[1].records = 1; },
      [](ManifestPage* page) { page->snapshot[1].bytes = ~uint64_t{0}; },
      [](ManifestPage* page) { page->snapshot[1].step = 0; },
      [](ManifestPage* page) { page->snapshot[1].redo_lsn = 19; },
      [](ManifestPage* page) { page->snapshot[0].redo_lsn = 0; },
  };
  for (size_t i = 0; i < lies.size(); ++i) {
    const absl::Status refused = read(lies[i]);
    EXPECT_TRUE(absl::IsDataLoss(refused)) << i << " " << refused;
    EXPECT_NE(refused.message().find(root_ + "/MANIFEST"), std::string::npos) << refused;
  }
}

// No memory is taken for what is not there.
TEST_F(SnapshotTest, ManifestOfAbsurdLengthIsRefused) {
  Manifest manifest;
  manifest.job = job_;
  ASSERT_TRUE(WriteManifest(env::PosixFileSystem(), root_, manifest, [] {}).ok());
  std::filesystem::resize_file(root_ + "/MANIFEST", uint64_t{1} << 40);
  EXPECT_TRUE(absl::IsDataLoss(ReadManifest(env::PosixFileSystem(), root_).status()));
}

TEST_F(SnapshotTest, PlacesThatLieAreRefused) {
  const uint64_t absurd[] = {
      0, 4096, 12288 + 1, ~uint64_t{0}, ~uint64_t{0} - 4095, uint64_t{1} << 40};
  for (const uint64_t place : absurd) {
    for (const uint64_t index : {0u, 1u, 2u}) {
      absl::StatusOr<ManifestSnapshot> snapshot = Write(3);
      ASSERT_TRUE(snapshot.ok()) << snapshot.status();
      std::fstream file(root_ + "/snapshot-0", std::ios::in | std::ios::out | std::ios::binary);
      const auto end = static_cast<std::streamoff>(snapshot->bytes - 2 * kPageBytes);
      std::vector<char> bytes(2 * kPageBytes);
      file.seekg(end);
      file.read(bytes.data(), 2 * kPageBytes);
      auto* header = reinterpret_cast<RecordHeader*>(bytes.data());
      ASSERT_EQ(header->kind, static_cast<uint32_t>(RecordKind::kEnd));
      uint64_t was = 0;
      char* at = bytes.data() + kPageBytes + index * sizeof(uint64_t);
      std::memcpy(&was, at, sizeof(was));
      if (was == place) continue;
      std::memcpy(at, &place, sizeof(place));
      header->piece_crc[0] =
          PieceCrc(reinterpret_cast<std::byte*>(bytes.data() + kPageBytes), kPageBytes);
      header->header_crc = PageCrc(header, &header->header_crc);
      file.seekp(end);
      file.write(bytes.data(), 2 * kPageBytes).flush();
      const absl::Status refused = Check(*snapshot, 3);
      EXPECT_TRUE(absl::IsDataLoss(refused)) << place << " " << index << " " << refused;
      EXPECT_NE(refused.message().find(root_ + "/snapshot-0"), std::string::npos) << refused;
    }
  }
}

TEST_F(SnapshotTest, SnapshotThatTheManifestMakesLongerThanItsFileIsRefused) {
  absl::StatusOr<ManifestSnapshot> snapshot = Write(3);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  snapshot->bytes = uint64_t{1} << 60;
  snapshot->records = uint64_t{1} << 40;
  EXPECT_TRUE(absl::IsDataLoss(Check(*snapshot, 3)));
}

}  // namespace
}  // namespace shardd::journal

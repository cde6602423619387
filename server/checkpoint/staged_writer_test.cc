#include "server/checkpoint/staged_writer.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>

#include "server/env/faulty_file_system.h"

namespace shardd::checkpoint {
namespace {

using env::OpenMode;

std::vector<std::byte> Bytes(uint64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// /tmp has a disk under it, /dev/shm has none and does not do direct writes.
class StagedWriterTest : public testing::TestWithParam<const char*> {
 protected:
  StagedWriterTest() : path_(std::string(GetParam()) + "/shardd-staged-XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~StagedWriterTest() override { std::filesystem::remove_all(path_); }
  std::unique_ptr<env::File> Create(env::FileSystem* files, const std::string& name) {
    auto file = files->Open(path_ + "/" + name, {.mode = OpenMode::kCreate, .direct = true});
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  std::string path_;
};

INSTANTIATE_TEST_SUITE_P(All, StagedWriterTest, testing::Values("/tmp", "/dev/shm"),
                         [](const auto& info) {
                           return std::string(info.param) == "/tmp" ? "Tmp" : "DevShm";
                         });

TEST_P(StagedWriterTest, WhatIsAppendedInPiecesIsThere) {
  constexpr uint64_t kBlock = StagedWriter::kBlockBytes;
  const std::vector<uint64_t> sizes = {
      0, 1, 4095, 4096, 4097, kBlock, kBlock - 1, 3 * kBlock + 77, 500000};
  StagedWriter writer(sizes.size());
  std::vector<std::vector<std::byte>> contents;
  for (size_t f = 0; f < sizes.size(); ++f) {
    contents.push_back(Bytes(sizes[f], static_cast<uint32_t>(f)));
    ASSERT_TRUE(writer.AddFile(Create(env::PosixFileSystem(), std::to_string(f)), sizes[f]).ok());
  }
  // Turn by turn, in pieces of odd sizes.
  std::vector<uint64_t> at(sizes.size(), 0);
  for (bool more = true; more;) {
    more = false;
    for (size_t f = 0; f < sizes.size(); ++f) {
      const uint64_t count = std::min<uint64_t>(99991, sizes[f] - at[f]);
      ASSERT_TRUE(writer.Append(f, std::span(contents[f]).subspan(at[f], count)).ok());
      at[f] += count;
      more = more || at[f] < sizes[f];
    }
  }
  const absl::Status finished = writer.Finish();
  ASSERT_TRUE(finished.ok()) << finished;
  for (size_t f = 0; f < sizes.size(); ++f) {
    const auto read =
        env::ReadFile(env::PosixFileSystem(), path_ + "/" + std::to_string(f), sizes[f]);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(*read == contents[f]) << f;
  }
}

TEST_P(StagedWriterTest, TooMuchAndTooLittleAreErrors) {
  StagedWriter writer(1);
  ASSERT_TRUE(writer.AddFile(Create(env::PosixFileSystem(), "x"), 10).ok());
  EXPECT_TRUE(absl::IsInternal(writer.Append(0, Bytes(11, 1))));
  ASSERT_TRUE(writer.Append(0, Bytes(9, 1)).ok());
  EXPECT_TRUE(absl::IsInternal(writer.Finish()));
}

TEST_P(StagedWriterTest, AFailedWriteIsToldAndNobodyWaitsForEver) {
  auto plan = env::ParseFaultPlan("*:write:2:enospc");
  ASSERT_TRUE(plan.ok()) << plan.status();
  env::FaultyFileSystem files(env::PosixFileSystem(), *plan);
  const uint64_t bytes = 20 * uint64_t{StagedWriter::kBlockBytes};
  StagedWriter writer(1);
  ASSERT_TRUE(writer.AddFile(Create(&files, "x"), bytes).ok());
  absl::Status status;
  const std::vector<std::byte> part = Bytes(1 << 20, 1);
  for (uint64_t at = 0; at < bytes && status.ok(); at += part.size()) {
    status = writer.Append(0, part);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_TRUE(absl::IsResourceExhausted(writer.Finish()));
}

TEST_P(StagedWriterTest, SpaceThatIsNotThereIsToldBefore) {
  auto plan = env::ParseFaultPlan("*:preallocate:1:enospc");
  ASSERT_TRUE(plan.ok()) << plan.status();
  env::FaultyFileSystem files(env::PosixFileSystem(), *plan);
  StagedWriter writer(1);
  EXPECT_TRUE(absl::IsResourceExhausted(writer.AddFile(Create(&files, "x"), 1)));
}

}  // namespace
}  // namespace shardd::checkpoint

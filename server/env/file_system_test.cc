// The conformance suite of FileSystem, for each implementation on tmpfs and on the disk.
#include "server/env/file_system.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "server/env/faulty_file_system.h"

namespace shardd::env {
namespace {

std::vector<std::byte> Bytes(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string Text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

struct Implementation {
  std::string name;
  std::string parent;
  bool faulty = false;
  bool unsynced = false;
};

class FileSystemConformance : public testing::TestWithParam<Implementation> {
 protected:
  void SetUp() override {
    std::string pattern = GetParam().parent + "/shardd-files-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    if (GetParam().faulty) {
      faulty_ = std::make_unique<FaultyFileSystem>(
          PosixFileSystem(), FaultPlan{.rules = {}, .unsynced = GetParam().unsynced});
    }
    files_ = faulty_ != nullptr ? faulty_.get() : PosixFileSystem();
  }
  void TearDown() override {
    EXPECT_TRUE(RemoveTree(files_, root_).ok());
    EXPECT_FALSE(std::filesystem::exists(root_));
  }
  std::string Path(const std::string& name) const { return root_ + "/" + name; }
  std::unique_ptr<File> Create(const std::string& name, bool direct = false) {
    auto file = files_->Open(Path(name), {.mode = OpenMode::kCreate, .direct = direct});
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }

  std::string root_;
  std::unique_ptr<FaultyFileSystem> faulty_;
  FileSystem* files_ = nullptr;
};

TEST_P(FileSystemConformance, WhatIsWrittenIsRead) {
  auto file = Create("a");
  const auto hello = Bytes("hello "), world = Bytes("world");
  const std::vector<std::span<const std::byte>> parts = {hello, {}, world};
  ASSERT_TRUE(file->WriteAt(3, parts).ok());
  ASSERT_TRUE(file->Sync().ok());
  EXPECT_EQ(*file->Size(), 14u);
  std::vector<std::byte> out(20, std::byte{1});
  EXPECT_EQ(*file->ReadAt(0, out), 14u);
  EXPECT_EQ(Text(std::span(out).subspan(3, 11)), "hello world");
  EXPECT_EQ(out[0], std::byte{0});  // a hole
  EXPECT_EQ(*file->ReadAt(14, out), 0u);
  EXPECT_EQ(file->path(), Path("a"));
}

TEST_P(FileSystemConformance, DirectFilesTakeAlignedPages) {
  auto file = Create("direct", true);
  constexpr size_t kBytes = 4 * kDirectAlignment;
  std::unique_ptr<std::byte, decltype(&free)> page(
      static_cast<std::byte*>(aligned_alloc(kDirectAlignment, kBytes)), &free);
  for (size_t i = 0; i < kBytes; ++i) page.get()[i] = static_cast<std::byte>(i * 7 + i / 4096);
  ASSERT_TRUE(file->Preallocate(8 * kDirectAlignment).ok());
  ASSERT_TRUE(file->WriteAt(kDirectAlignment, {page.get(), kBytes}).ok());
  ASSERT_TRUE(file->Sync().ok());
  std::unique_ptr<std::byte, decltype(&free)> back(
      static_cast<std::byte*>(aligned_alloc(kDirectAlignment, kBytes)), &free);
  EXPECT_EQ(*file->ReadAt(kDirectAlignment, {back.get(), kBytes}), kBytes);
  EXPECT_EQ(std::memcmp(page.get(), back.get(), kBytes), 0);
  // Up to the end of the file, and no further.
  EXPECT_EQ(*file->ReadAt(6 * kDirectAlignment, {back.get(), kBytes}), 2 * kDirectAlignment);
  if (GetParam().parent == "/tmp") EXPECT_TRUE(file->direct());
}

TEST_P(FileSystemConformance, PreallocateReservesAndKeepsContent) {
  auto file = Create("a");
  ASSERT_TRUE(file->WriteAt(0, Bytes("x")).ok());
  ASSERT_TRUE(file->Preallocate(1 << 20).ok());
  EXPECT_EQ(*file->Size(), 1u << 20);
  EXPECT_GE(files_->Stat(Path("a"))->allocated_bytes, 1u << 20);
  std::vector<std::byte> out(2);
  EXPECT_EQ(*file->ReadAt(0, out), 2u);
  EXPECT_EQ(Text(out), std::string("x\0", 2));
  ASSERT_TRUE(file->Truncate(1).ok());
  EXPECT_EQ(*file->Size(), 1u);
}

TEST_P(FileSystemConformance, OpenModes) {
  const auto open = [&](OpenMode mode) { return files_->Open(Path("a"), {.mode = mode}).status(); };
  EXPECT_TRUE(absl::IsNotFound(open(OpenMode::kRead)));
  EXPECT_TRUE(absl::IsNotFound(open(OpenMode::kReadWrite)));
  EXPECT_TRUE(Create("a")->WriteAt(0, Bytes("content")).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(open(OpenMode::kCreate)));
  EXPECT_TRUE(open(OpenMode::kReadWrite).ok());
  EXPECT_EQ(files_->Stat(Path("a"))->bytes, 7u);
  EXPECT_TRUE(open(OpenMode::kCreateOrEmpty).ok());
  EXPECT_EQ(files_->Stat(Path("a"))->bytes, 0u);
  std::filesystem::create_symlink(Path("a"), Path("link"));
  EXPECT_FALSE(files_->Open(Path("link"), {}).ok());
  std::filesystem::remove(Path("link"));
  const absl::Status missing =
      files_->Open(Path("nowhere/b"), {.mode = OpenMode::kCreate}).status();
  EXPECT_TRUE(absl::IsNotFound(missing));
  EXPECT_NE(missing.message().find(Path("nowhere/b")), std::string::npos) << missing;
}

TEST_P(FileSystemConformance, NamesAreListedRenamedAndRemoved) {
  Create("b");
  Create("a");
  ASSERT_TRUE(files_->MakeDirectory(Path("d")).ok());
  EXPECT_TRUE(files_->MakeDirectory(Path("d")).ok());
  EXPECT_FALSE(files_->MakeDirectory(Path("a")).ok());
  EXPECT_TRUE(files_->Stat(Path("d"))->is_directory);
  EXPECT_FALSE(files_->Stat(Path("a"))->is_directory);
  using Names = std::vector<std::string>;
  EXPECT_EQ(*files_->List(root_), (Names{"a", "b", "d"}));
  ASSERT_TRUE(files_->Rename(Path("a"), Path("b")).ok());
  EXPECT_EQ(*files_->List(root_), (Names{"b", "d"}));
  ASSERT_TRUE(files_->SyncDirectory(root_).ok());
  ASSERT_TRUE(files_->Remove(Path("b")).ok());
  EXPECT_TRUE(absl::IsNotFound(files_->Remove(Path("b"))));
  EXPECT_TRUE(absl::IsNotFound(files_->Rename(Path("b"), Path("c"))));
  EXPECT_TRUE(absl::IsNotFound(files_->Stat(Path("b")).status()));
  ASSERT_TRUE(files_->RemoveDirectory(Path("d")).ok());
  EXPECT_EQ(*files_->List(root_), Names{});
  EXPECT_TRUE(absl::IsNotFound(files_->List(Path("d")).status()));
  EXPECT_TRUE(absl::IsNotFound(files_->SyncDirectory(Path("d"))));
  EXPECT_GT(*files_->FreeBytes(root_), 1u << 20);
}

TEST_P(FileSystemConformance, WholeFilesAndTrees) {
  ASSERT_TRUE(MakeDirectories(files_, Path("x/y/z")).ok());
  ASSERT_TRUE(ReplaceFile(files_, Path("x/y/z/f"), Bytes("one")).ok());
  ASSERT_TRUE(ReplaceFile(files_, Path("x/y/z/f"), Bytes("two")).ok());
  EXPECT_EQ(Text(*ReadFile(files_, Path("x/y/z/f"), 3)), "two");
  EXPECT_EQ(files_->List(Path("x/y/z"))->size(), 1u);
  ASSERT_TRUE(RemoveTree(files_, Path("x")).ok());
  EXPECT_TRUE(absl::IsNotFound(files_->Stat(Path("x")).status()));
  EXPECT_TRUE(RemoveTree(files_, Path("x")).ok());
  EXPECT_EQ(ParentOf("/a/b"), "/a");
  EXPECT_EQ(ParentOf("/a"), "/");
  EXPECT_EQ(ParentOf("a"), ".");
}

TEST_P(FileSystemConformance, WhatIsNoFileIsNotOpenedAndNotWaitedFor) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  ASSERT_TRUE(files_->MakeDirectory(Path("directory")).ok());
  for (const char* name : {"pipe", "directory"}) {
    const absl::Status refused = files_->Open(Path(name), {}).status();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
    EXPECT_NE(refused.message().find(Path(name)), std::string::npos) << refused;
  }
}

TEST_P(FileSystemConformance, ReadFileTakesNoMemoryForAFileOfAbsurdLength) {
  ASSERT_TRUE(ReplaceFile(files_, Path("f"), Bytes("four")).ok());
  EXPECT_TRUE(ReadFile(files_, Path("f"), 4).ok());
  EXPECT_TRUE(absl::IsDataLoss(ReadFile(files_, Path("f"), 3).status()));
  std::filesystem::resize_file(Path("f"), uint64_t{1} << 40);
  EXPECT_TRUE(absl::IsDataLoss(ReadFile(files_, Path("f"), 1 << 20).status()));
}

INSTANTIATE_TEST_SUITE_P(All, FileSystemConformance,
                         testing::Values(Implementation{"PosixOnDisk", "/tmp"},
                                         Implementation{"PosixOnTmpfs", "/dev/shm"},
                                         Implementation{"FaultyOnDisk", "/tmp", true},
                                         Implementation{"FaultyOnTmpfs", "/dev/shm", true},
                                         Implementation{"UnsyncedOnDisk", "/tmp", true, true},
                                         Implementation{"UnsyncedOnTmpfs", "/dev/shm", true, true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardd::env

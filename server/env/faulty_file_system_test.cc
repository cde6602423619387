#include "server/env/faulty_file_system.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <thread>

namespace shardd::env {
namespace {

std::vector<std::byte> Bytes(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

class FaultyFileSystemTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "/dev/shm/shardd-faulty-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::string Path(const std::string& name) const { return root_ + "/" + name; }
  std::string Content(const std::string& name) const {
    absl::StatusOr<std::vector<std::byte>> data = ReadFile(PosixFileSystem(), Path(name), 1 << 20);
    if (!data.ok()) return std::string(data.status().message());
    return {reinterpret_cast<const char*>(data->data()), data->size()};
  }
  static std::unique_ptr<FaultyFileSystem> Make(const std::string& plan) {
    absl::StatusOr<FaultPlan> parsed = ParseFaultPlan(plan);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return std::make_unique<FaultyFileSystem>(PosixFileSystem(), *parsed);
  }

  std::string root_;
};

TEST_F(FaultyFileSystemTest, PlansAreCheckedByName) {
  EXPECT_TRUE(ParseFaultPlan("")->rules.empty());
  EXPECT_TRUE(ParseFaultPlan("unsynced")->unsynced);
  const FaultPlan plan = *ParseFaultPlan("*/a:sync:2:eio,unsynced,*:write:3+:short=512");
  ASSERT_EQ(plan.rules.size(), 2u);
  EXPECT_EQ(plan.rules[0].first, 2u);
  EXPECT_EQ(plan.rules[0].last, 2u);
  EXPECT_EQ(plan.rules[1].last, ~uint64_t{0});
  EXPECT_EQ(plan.rules[1].short_bytes, 512u);
  for (const char* wrong : {"a:sync:2", "*:fsync:1:eio", "*:sync:0:eio", "*:sync:3-2:eio",
                            "*:sync:x:eio", "*:sync:1:explode", "*:write:1:short="}) {
    const absl::Status status = ParseFaultPlan(wrong).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << wrong;
    EXPECT_NE(status.message().find(wrong), std::string::npos) << status;
  }
}

TEST_F(FaultyFileSystemTest, TheNthCallFailsAsPlannedAndNoOther) {
  auto files = Make("*/a:write:2:enospc,*/a:sync:1-2:eio,*/b:create:1:eio,*/a:read:1:short=3");
  auto a = *files->Open(Path("a"), {.mode = OpenMode::kCreate});
  EXPECT_TRUE(a->WriteAt(0, Bytes("12345")).ok());
  const absl::Status full = a->WriteAt(0, Bytes("xxxxx"));
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_EQ(Content("a"), "12345");
  EXPECT_TRUE(a->WriteAt(0, Bytes("6")).ok());
  EXPECT_TRUE(absl::IsDataLoss(a->Sync()));
  EXPECT_TRUE(absl::IsDataLoss(a->Sync()));
  EXPECT_TRUE(a->Sync().ok());
  std::vector<std::byte> out(5);
  EXPECT_EQ(*a->ReadAt(0, out), 3u);
  EXPECT_EQ(out[0], std::byte{'6'});
  EXPECT_EQ(*a->ReadAt(0, out), 5u);
  EXPECT_FALSE(files->Open(Path("b"), {.mode = OpenMode::kCreate}).ok());
  EXPECT_FALSE(std::filesystem::exists(Path("b")));
  EXPECT_TRUE(files->Open(Path("b"), {.mode = OpenMode::kCreate}).ok());
}

TEST_F(FaultyFileSystemTest, AShortWriteLeavesItsBeginning) {
  auto files = Make("*:write:1:short=2");
  auto a = *files->Open(Path("a"), {.mode = OpenMode::kCreate});
  EXPECT_TRUE(absl::IsDataLoss(a->WriteAt(0, Bytes("12345"))));
  EXPECT_EQ(Content("a"), "12");
}

TEST_F(FaultyFileSystemTest, AWaitingCallGoesOnWhenReleased) {
  auto files = Make("*:sync:1:wait");
  auto a = *files->Open(Path("a"), {.mode = OpenMode::kCreate});
  absl::Status status = absl::UnknownError("not yet");
  std::thread waiter([&] { status = a->Sync(); });
  files->AwaitHeld();
  files->Release();
  waiter.join();
  EXPECT_TRUE(status.ok());
}

TEST_F(FaultyFileSystemTest, WhatWasNotSyncedIsDropped) {
  {
    auto files = Make("unsynced");
    auto kept = *files->Open(Path("kept"), {.mode = OpenMode::kCreate});
    ASSERT_TRUE(kept->WriteAt(0, Bytes("durable")).ok());
    ASSERT_TRUE(kept->Sync().ok());
    ASSERT_TRUE(files->SyncDirectory(root_).ok());
    ASSERT_TRUE(kept->WriteAt(0, Bytes("DUR")).ok());
    ASSERT_TRUE(kept->WriteAt(2, Bytes("xxxxxxxxxxxxx")).ok());
    ASSERT_TRUE(kept->Preallocate(100).ok());
    // Its content is synced, its name is not.
    auto nameless = *files->Open(Path("nameless"), {.mode = OpenMode::kCreate});
    ASSERT_TRUE(nameless->WriteAt(0, Bytes("x")).ok());
    ASSERT_TRUE(nameless->Sync().ok());
    ASSERT_TRUE(files->MakeDirectory(Path("d")).ok());
    EXPECT_EQ(files->List(root_)->size(), 3u);  // the logs are not shown
  }
  ASSERT_TRUE(DropUnsynced(root_).ok());
  EXPECT_EQ(Content("kept"), "durable");
  EXPECT_EQ(PosixFileSystem()->List(root_)->size(), 1u);
}

TEST_F(FaultyFileSystemTest, RenamesAndRemovalsAreTakenBack) {
  {
    auto files = Make("unsynced");
    ASSERT_TRUE(ReplaceFile(files.get(), Path("manifest"), Bytes("old")).ok());
    ASSERT_TRUE(ReplaceFile(files.get(), Path("other"), Bytes("other")).ok());
    auto next = *files->Open(Path("manifest.new"), {.mode = OpenMode::kCreate});
    ASSERT_TRUE(next->WriteAt(0, Bytes("new")).ok());
    ASSERT_TRUE(next->Sync().ok());
    next.reset();
    ASSERT_TRUE(files->Rename(Path("manifest.new"), Path("manifest")).ok());
    ASSERT_TRUE(files->Remove(Path("other")).ok());
    EXPECT_EQ(Content("manifest"), "new");
  }
  ASSERT_TRUE(DropUnsynced(root_).ok());
  EXPECT_EQ(Content("manifest"), "old");
  EXPECT_EQ(Content("other"), "other");
  EXPECT_EQ(PosixFileSystem()->List(root_)->size(), 2u);
}

TEST_F(FaultyFileSystemTest, RenamedAndSyncedStays) {
  {
    auto files = Make("unsynced");
    ASSERT_TRUE(ReplaceFile(files.get(), Path("manifest"), Bytes("old")).ok());
    ASSERT_TRUE(ReplaceFile(files.get(), Path("manifest"), Bytes("new")).ok());
  }
  ASSERT_TRUE(DropUnsynced(root_).ok());
  EXPECT_EQ(Content("manifest"), "new");
  EXPECT_EQ(PosixFileSystem()->List(root_)->size(), 1u);
}

TEST_F(FaultyFileSystemTest, ARenamedFileThatWasNotSyncedLosesItsContent) {
  {
    auto files = Make("unsynced");
    auto file = *files->Open(Path("a"), {.mode = OpenMode::kCreate});
    ASSERT_TRUE(file->WriteAt(0, Bytes("content")).ok());
    file.reset();
    ASSERT_TRUE(files->Rename(Path("a"), Path("b")).ok());
    ASSERT_TRUE(files->SyncDirectory(root_).ok());
  }
  ASSERT_TRUE(DropUnsynced(root_).ok());
  EXPECT_EQ(Content("b"), "");
}

TEST_F(FaultyFileSystemTest, WithASeedSomePagesStay) {
  constexpr size_t kPages = 64;
  {
    auto files = Make("unsynced");
    auto file = *files->Open(Path("a"), {.mode = OpenMode::kCreate});
    ASSERT_TRUE(file->WriteAt(0, std::vector<std::byte>(kPages * 4096, std::byte{1})).ok());
    ASSERT_TRUE(file->Sync().ok());
    ASSERT_TRUE(files->SyncDirectory(root_).ok());
    ASSERT_TRUE(file->WriteAt(0, std::vector<std::byte>(kPages * 4096, std::byte{2})).ok());
  }
  ASSERT_TRUE(DropUnsynced(root_, 4711).ok());
  const std::string content = Content("a");
  size_t kept = 0;
  for (size_t p = 0; p < kPages; ++p) {
    const char value = content[p * 4096];
    for (size_t i = 0; i < 4096; ++i) ASSERT_EQ(content[p * 4096 + i], value);
    kept += value == 2 ? 1 : 0;
  }
  EXPECT_GT(kept, kPages / 4);
  EXPECT_LT(kept, kPages * 3 / 4);
}

TEST_F(FaultyFileSystemTest, HoldsForAProcessThatIsKilled) {
  ASSERT_TRUE(ReplaceFile(PosixFileSystem(), Path("a"), Bytes("before")).ok());
  const pid_t child = fork();
  if (child == 0) {
    auto files = Make("unsynced,*/a:write:2:kill");
    auto file = *files->Open(Path("a"), {.mode = OpenMode::kReadWrite});
    (void)file->WriteAt(0, Bytes("AFTER"));
    (void)file->WriteAt(0, Bytes("never"));
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  EXPECT_EQ(Content("a"), "AFTERe");
  ASSERT_TRUE(DropUnsynced(root_).ok());
  EXPECT_EQ(Content("a"), "before");
}

}  // namespace
}  // namespace shardd::env

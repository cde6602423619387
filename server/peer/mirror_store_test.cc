#include "server/peer/mirror_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "server/env/faulty_file_system.h"
#include "server/peer/message.h"

namespace shardd::peer {
namespace {

namespace fs = std::filesystem;
using Mirror = v1::PeerMessage::Mirror;
using testing::HasSubstr;

class MirrorStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "/dev/shm/shardd-mirror-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    files_ = std::make_unique<env::FaultyFileSystem>(env::PosixFileSystem(), env::FaultPlan());
    Reopen();
  }
  void TearDown() override { fs::remove_all(root_); }

  void Reopen() {
    store_ = std::make_unique<MirrorStore>(
        MirrorStore::Options{"b", root_ + "/journal", files_.get(), &failpoints_});
    ASSERT_TRUE(store_->Open().ok());
  }
  void Fail(const std::string& plan) { files_->SetRules(env::ParseFaultPlan(plan)->rules); }

  // The answer's code and text; OK with "silent" when none is due.
  absl::Status Do(Mirror::Operation what, const std::string& file = "", uint64_t offset = 0,
                  const std::string& bytes = "", bool answer = true) {
    Mirror operation;
    operation.set_tag(tag_);
    operation.set_session(session_);
    operation.set_number(++number_);
    operation.set_operation(what);
    operation.set_file(file);
    operation.set_to(to_);
    operation.set_offset(offset);
    operation.set_answer(answer);
    const auto answered = store_->Apply(peer_, job_, operation, std::as_bytes(std::span(bytes)));
    answered_ = answered.has_value();
    if (!answered_) return absl::OkStatus();
    EXPECT_EQ(answered->number(), number_);
    EXPECT_EQ(answered->session(), session_);
    return absl::Status(static_cast<absl::StatusCode>(answered->code()), answered->text());
  }
  void Copy(const std::string& content) {
    ++session_;
    ASSERT_TRUE(Do(Mirror::BEGIN).ok());
    ASSERT_TRUE(Do(Mirror::CREATE, "log-0").ok());
    ASSERT_TRUE(Do(Mirror::WRITE, "log-0", 0, content).ok());
    ASSERT_TRUE(Do(Mirror::COMPLETE).ok());
  }
  std::string ContentOf(const std::string& file = "log-0") const {
    v1::PeerMessage::MirrorRead read;
    read.set_tag(tag_);
    read.set_file(file);
    read.set_bytes(kMaxPieceBytes);
    absl::StatusOr<std::string> bytes = store_->Read(peer_, job_, read);
    return bytes.ok() ? *bytes : std::string(bytes.status().message());
  }
  std::vector<std::string> Lying(const std::string& peer = "a") const {
    std::vector<std::string> names;
    const std::string path = root_ + "/journal/.mirror/" + peer;
    if (!fs::exists(path)) return names;
    for (const auto& entry : fs::directory_iterator(path)) names.push_back(entry.path().filename());
    return names;
  }

  std::string root_, peer_ = "a", job_ = "toy", to_;
  uint64_t tag_ = 7, session_ = 100, number_ = 0;
  bool answered_ = false;
  env::Failpoints failpoints_;
  std::unique_ptr<env::FaultyFileSystem> files_;
  std::unique_ptr<MirrorStore> store_;
};

TEST_F(MirrorStoreTest, ACopyCountsWhenItIsComplete) {
  ASSERT_TRUE(Do(Mirror::BEGIN).ok());
  ASSERT_TRUE(Do(Mirror::CREATE, "log-0").ok());
  ASSERT_TRUE(Do(Mirror::WRITE, "log-0", 3, "abc").ok());
  EXPECT_EQ(store_->List("a").jobs_size(), 0);
  ASSERT_TRUE(Do(Mirror::COMPLETE).ok());
  ASSERT_EQ(store_->List("a").jobs_size(), 1);
  const v1::PeerMessage::MirroredJob job = store_->List("a").jobs(0);
  EXPECT_EQ(job.job(), "toy");
  EXPECT_EQ(job.tag(), 7u);
  ASSERT_EQ(job.files_size(), 1);
  EXPECT_EQ(job.files(0).name(), "log-0");
  EXPECT_EQ(job.files(0).bytes(), 6u);
  EXPECT_EQ(ContentOf(), std::string("\0\0\0abc", 6));
  // Another peer sees nothing of it.
  EXPECT_EQ(store_->List("c").jobs_size(), 0);
  peer_ = "c";
  EXPECT_THAT(ContentOf(), HasSubstr("mirrors no such job"));
}

TEST_F(MirrorStoreTest, OperationsGoOnAfterCompletion) {
  Copy("one");
  EXPECT_TRUE(Do(Mirror::WRITE, "log-0", 0, "two").ok());
  EXPECT_TRUE(Do(Mirror::SYNC_FILE, "log-0").ok());
  EXPECT_TRUE(Do(Mirror::CREATE, "MANIFEST.new").ok());
  EXPECT_TRUE(Do(Mirror::WRITE, "MANIFEST.new", 0, "m").ok());
  to_ = "MANIFEST";
  EXPECT_TRUE(Do(Mirror::RENAME, "MANIFEST.new").ok());
  EXPECT_TRUE(Do(Mirror::SYNC_NAMES).ok());
  EXPECT_EQ(ContentOf(), "two");
  EXPECT_EQ(ContentOf("MANIFEST"), "m");
  EXPECT_TRUE(Do(Mirror::REMOVE, "MANIFEST").ok());
  EXPECT_EQ(store_->List("a").jobs(0).files_size(), 1);
}

TEST_F(MirrorStoreTest, ANewCopyReplacesTheOldOneWhenItIsComplete) {
  Copy("one");
  ++session_;
  ASSERT_TRUE(Do(Mirror::BEGIN).ok());
  ASSERT_TRUE(Do(Mirror::CREATE, "log-0").ok());
  ASSERT_TRUE(Do(Mirror::WRITE, "log-0", 0, "two").ok());
  EXPECT_EQ(ContentOf(), "one");
  // What its sender had sent before it began anew counts no more.
  --session_;
  EXPECT_TRUE(Do(Mirror::WRITE, "log-0", 0, "old").ok());
  EXPECT_FALSE(answered_);
  ++session_;
  ASSERT_TRUE(Do(Mirror::COMPLETE).ok());
  EXPECT_EQ(ContentOf(), "two");
  EXPECT_EQ(Lying().size(), 1u);
}

TEST_F(MirrorStoreTest, AfterACrashTheLastCompleteCopyCounts) {
  Copy("one");
  ++session_;
  ASSERT_TRUE(Do(Mirror::BEGIN).ok());
  ASSERT_TRUE(Do(Mirror::CREATE, "log-0").ok());
  Reopen();
  EXPECT_EQ(ContentOf(), "one");
  EXPECT_EQ(Lying().size(), 1u);
  // Its daemon knows nothing of the session that was: the sender is told where it asks.
  EXPECT_TRUE(Do(Mirror::WRITE, "log-0", 0, "x", false).ok());
  EXPECT_FALSE(answered_);
  EXPECT_TRUE(absl::IsAborted(Do(Mirror::SYNC_FILE, "log-0")));
  EXPECT_EQ(ContentOf(), "one");
}

TEST_F(MirrorStoreTest, NothingOutsideOfThePeersDirectoryIsTouched) {
  fs::create_directories(root_ + "/journal");
  std::ofstream(root_ + "/journal/outside") << "kept";
  Copy("one");
  for (const std::string bad :
       {"../outside", "/etc/passwd", "..", ".", "", ".hidden", "a/b", "a b"}) {
    SCOPED_TRACE(bad);
    ++session_;
    ASSERT_TRUE(Do(Mirror::BEGIN).ok());
    for (const auto what : {Mirror::CREATE, Mirror::WRITE, Mirror::ALLOCATE, Mirror::TRUNCATE,
                            Mirror::REMOVE, Mirror::SYNC_FILE, Mirror::RENAME}) {
      ++session_;
      ASSERT_TRUE(Do(Mirror::BEGIN).ok());
      const absl::Status status = Do(what, bad, 0, "x");
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    }
    ++session_;
    ASSERT_TRUE(Do(Mirror::BEGIN).ok());
    ASSERT_TRUE(Do(Mirror::CREATE, "good").ok());
    to_ = bad;
    EXPECT_TRUE(absl::IsInvalidArgument(Do(Mirror::RENAME, "good")));
    const std::string job = std::exchange(job_, bad);
    ++session_;
    EXPECT_TRUE(absl::IsInvalidArgument(Do(Mirror::BEGIN)));
    EXPECT_TRUE(absl::IsInvalidArgument(Do(Mirror::DELETE)));
    job_ = job;
    EXPECT_THAT(ContentOf(bad), HasSubstr("is not 1 to 80 of"));
  }
  EXPECT_EQ(ContentOf(), "one");
  std::ifstream outside(root_ + "/journal/outside");
  std::string text;
  outside >> text;
  EXPECT_EQ(text, "kept");
}

TEST_F(MirrorStoreTest, WhatFailsIsSaidOnceAndEndsTheSession) {
  Copy("one");
  Fail("*/.mirror/*:write:1:enospc");
  const absl::Status status = Do(Mirror::WRITE, "log-0", 0, "two", false);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_TRUE(Do(Mirror::WRITE, "log-0", 0, "three").ok());
  EXPECT_FALSE(answered_);
  EXPECT_TRUE(Do(Mirror::SYNC_FILE, "log-0").ok());
  EXPECT_FALSE(answered_);
  EXPECT_EQ(ContentOf(), "one");
}

TEST_F(MirrorStoreTest, SizesAreBoundedByTheDisk) {
  const absl::Status begin = Do(Mirror::BEGIN, "", uint64_t{1} << 60);
  EXPECT_TRUE(absl::IsResourceExhausted(begin)) << begin;
  EXPECT_THAT(std::string(begin.message()), HasSubstr("make room there"));
  ASSERT_TRUE(Do(Mirror::BEGIN).ok());
  ASSERT_TRUE(Do(Mirror::CREATE, "log-0").ok());
  const absl::Status allocate = Do(Mirror::ALLOCATE, "log-0", uint64_t{1} << 49);
  EXPECT_TRUE(absl::IsResourceExhausted(allocate)) << allocate;
  ASSERT_TRUE(Do(Mirror::BEGIN).ok());
  ASSERT_TRUE(Do(Mirror::CREATE, "log-0").ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Do(Mirror::ALLOCATE, "log-0", uint64_t{1} << 60)));
}

TEST_F(MirrorStoreTest, TheMirrorOfAnotherJobOfThatNameIsNotReplaced) {
  Copy("one");
  ++tag_;
  ++session_;
  const absl::Status begin = Do(Mirror::BEGIN);
  EXPECT_TRUE(absl::IsFailedPrecondition(begin));
  EXPECT_THAT(std::string(begin.message()), HasSubstr("holds the mirror of another job"));
  // Nor deleted in the other one's name.
  EXPECT_TRUE(Do(Mirror::DELETE).ok());
  --tag_;
  EXPECT_EQ(ContentOf(), "one");
  EXPECT_TRUE(Do(Mirror::DELETE).ok());
  EXPECT_EQ(Lying().size(), 0u);
  ++tag_;
  Copy("two");
  tag_ = 0;  // whichever
  EXPECT_TRUE(Do(Mirror::DELETE).ok());
  EXPECT_EQ(Lying().size(), 0u);
}

TEST_F(MirrorStoreTest, WithoutADirectoryEverythingIsRefusedByName) {
  store_ = std::make_unique<MirrorStore>(MirrorStore::Options{"b", "", files_.get(), &failpoints_});
  ASSERT_TRUE(store_->Open().ok());
  const absl::Status begin = Do(Mirror::BEGIN);
  EXPECT_TRUE(absl::IsFailedPrecondition(begin));
  EXPECT_THAT(std::string(begin.message()), HasSubstr("daemon b keeps no journals"));
  EXPECT_EQ(store_->List("a").jobs_size(), 0);
  EXPECT_TRUE(Do(Mirror::DELETE).ok());  // there is nothing
}

}  // namespace
}  // namespace shardd::peer

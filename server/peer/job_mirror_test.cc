#include "server/peer/job_mirror.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/env/faulty_file_system.h"
#include "server/peer/mirror_store.h"

namespace shardd::peer {
namespace {

namespace fs = std::filesystem;
using Mirror = v1::PeerMessage::Mirror;
using testing::HasSubstr;

// A network whose other end is a store; it can be held, and the peer's process can end.
class FakeLinks final : public Links {
 public:
  explicit FakeLinks(MirrorStore* store) : store_(store), thread_([this] { Work(); }) {}
  ~FakeLinks() override {
    Stop();
    thread_.join();
  }
  void Start() override {}
  void Stop() override {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  const std::string& self() const override { return self_; }
  uint16_t port() const override { return 0; }
  std::vector<std::string> peers() const override { return {"b"}; }
  bool Knows(const std::string&) const override { return true; }
  void Send(const std::string& peer, Message message) override {
    EXPECT_EQ(peer, "b");
    const std::lock_guard lock(mutex_);
    queued_ += message.bytes.size();
    most_ = std::max(most_, queued_);
    queue_.push_back(std::move(message));
    changed_.notify_all();
  }
  LinkState State(const std::string&) const override { return {}; }
  LinkCounters* counters() override { return &counters_; }

  void Hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  // Another process, with the same files.
  void NewProcess(MirrorStore* store) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
    queue_.clear();
    queued_ = 0;
    store_ = store;
  }
  void SetTarget(JobMirror* mirror) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
    mirror_ = mirror;
  }
  uint64_t most() const {
    const std::lock_guard lock(mutex_);
    return most_;
  }
  // What the peer was told, in order.
  std::vector<Mirror> Seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || (!held_ && !queue_.empty()); });
      if (stop_) return;
      const Message message = std::move(queue_.front());
      queue_.pop_front();
      queued_ -= message.bytes.size();
      seen_.push_back(message.header.mirror());
      busy_ = true;
      MirrorStore* store = store_;
      lock.unlock();
      const auto answer = store->Apply("a", message.header.job(), message.header.mirror(),
                                       std::as_bytes(std::span(message.bytes)));
      lock.lock();
      JobMirror* mirror = mirror_;
      if (answer.has_value() && mirror != nullptr) {
        lock.unlock();
        mirror->OnAnswer(*answer);
        lock.lock();
      }
      busy_ = false;
      changed_.notify_all();
    }
  }

  const std::string self_ = "a";
  LinkCounters counters_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> queue_;
  std::vector<Mirror> seen_;
  uint64_t queued_ = 0, most_ = 0;
  bool held_ = false, stop_ = false, busy_ = false;
  MirrorStore* store_;
  JobMirror* mirror_ = nullptr;
  std::thread thread_;
};

class JobMirrorTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "/dev/shm/shardd-mirror-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    fs::create_directories(root_ + "/a/toy");
    fs::create_directories(root_ + "/b");
    there_ = std::make_unique<env::FaultyFileSystem>(env::PosixFileSystem(), env::FaultPlan());
    store_ = NewStore();
    links_ = std::make_unique<FakeLinks>(store_.get());
  }
  void TearDown() override {
    if (mirror_ != nullptr) mirror_->Stop();
    links_->SetTarget(nullptr);
    mirror_.reset();
    links_.reset();
    fs::remove_all(root_);
  }
  std::unique_ptr<MirrorStore> NewStore() {
    auto store = std::make_unique<MirrorStore>(
        MirrorStore::Options{"b", root_ + "/b", there_.get(), &failpoints_});
    EXPECT_TRUE(store->Open().ok());
    return store;
  }
  void Make(bool degrade, absl::Duration patience = absl::Seconds(20)) {
    JobMirror::Options options;
    options.links = links_.get();
    options.files = env::PosixFileSystem();
    options.failpoints = &failpoints_;
    options.peer = "b";
    options.job = "toy";
    options.tag = 5;
    options.directory = root_ + "/a/toy";
    options.degrade = degrade;
    options.patience = patience;
    options.log = [](const std::string&) {};
    options.reached = true;
    links_->SetTarget(nullptr);
    mirror_ = std::make_unique<JobMirror>(std::move(options));
    links_->SetTarget(mirror_.get());
  }
  void AwaitState(MirrorState state) {
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (mirror_->status().state != state) {
      ASSERT_LT(absl::Now(), deadline) << mirror_->status().Text();
      std::this_thread::yield();
    }
  }
  std::unique_ptr<env::File> OpenFile(const std::string& name,
                                      env::OpenMode mode = env::OpenMode::kCreateOrEmpty) {
    auto file = mirror_->files()->Open(root_ + "/a/toy/" + name, {.mode = mode});
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  static std::span<const std::byte> Bytes(const std::string& text) {
    return std::as_bytes(std::span(text));
  }
  static std::string Content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  // Name and content of all files of the one copy that counts.
  std::map<std::string, std::string> There() const {
    std::map<std::string, std::string> files;
    for (const auto& copy : fs::directory_iterator(root_ + "/b/.mirror/a")) {
      if (copy.path().extension() == ".new") continue;
      for (const auto& file : fs::directory_iterator(copy.path())) {
        files[file.path().filename()] = Content(file.path());
      }
    }
    return files;
  }
  std::map<std::string, std::string> Here() const {
    std::map<std::string, std::string> files;
    for (const auto& file : fs::directory_iterator(root_ + "/a/toy")) {
      files[file.path().filename()] = Content(file.path());
    }
    return files;
  }

  std::string root_;
  env::Failpoints failpoints_;
  std::unique_ptr<env::FaultyFileSystem> there_;
  std::unique_ptr<MirrorStore> store_, next_store_;
  std::unique_ptr<FakeLinks> links_;
  std::unique_ptr<JobMirror> mirror_;
};

TEST_F(JobMirrorTest, ASyncReturnsWhenThePeerHasIt) {
  Make(false);
  mirror_->Start();
  auto file = OpenFile("log-0");
  ASSERT_TRUE(file->Preallocate(8192).ok());
  AwaitState(MirrorState::kInStep);
  ASSERT_TRUE(file->WriteAt(4096, Bytes("hello")).ok());
  links_->Hold(true);
  std::atomic<bool> synced{false};
  std::thread syncs([&] {
    EXPECT_TRUE(file->Sync().ok());
    synced = true;
  });
  // It is on the way, behind what is held.
  EXPECT_FALSE(synced);
  links_->Hold(false);
  syncs.join();
  EXPECT_EQ(There().at("log-0").substr(4096, 5), "hello");
  EXPECT_EQ(There(), Here());
}

TEST_F(JobMirrorTest, OperationsArriveInOrder) {
  Make(false);
  mirror_->Start();
  AwaitState(MirrorState::kInStep);
  const std::string path = root_ + "/a/toy/MANIFEST";
  for (int i = 0; i < 20; ++i) {
    const std::string text = absl::StrCat("manifest ", i);
    ASSERT_TRUE(env::ReplaceFile(mirror_->files(), path, Bytes(text)).ok());
    EXPECT_EQ(There().at("MANIFEST"), text);
  }
  uint64_t number = 0;
  for (const Mirror& operation : links_->Seen()) EXPECT_EQ(operation.number(), ++number);
}

TEST_F(JobMirrorTest, WhatIsWrittenWhileTheWholeIsCopiedIsNotLost) {
  Make(false);
  std::string large(5 << 20, 'x');
  {
    std::ofstream file(root_ + "/a/toy/snapshot-0", std::ios::binary);
    file << large;
  }
  auto file = OpenFile("snapshot-0", env::OpenMode::kReadWrite);
  // Held after the second piece; then both a copied and an uncopied piece change.
  ASSERT_TRUE(failpoints_.Arm("mirror.copy.after_piece", env::FailpointAction::kWait, 1).ok());
  mirror_->Start();
  ASSERT_TRUE(failpoints_.AwaitHit("mirror.copy.after_piece", absl::Seconds(30)).ok());
  EXPECT_EQ(mirror_->status().state, MirrorState::kCopying);
  EXPECT_THAT(mirror_->status().Text(), HasSubstr("being copied: 40 %"));
  ASSERT_TRUE(file->WriteAt(100, Bytes("early")).ok());
  ASSERT_TRUE(file->WriteAt((4 << 20) + 100, Bytes("late")).ok());
  ASSERT_TRUE(OpenFile("new")->WriteAt(0, Bytes("born meanwhile")).ok());
  ASSERT_TRUE(failpoints_.Release("mirror.copy.after_piece").ok());
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_EQ(mirror_->status().state, MirrorState::kInStep);
  EXPECT_EQ(There(), Here());
  EXPECT_EQ(There().size(), 2u);
}

TEST_F(JobMirrorTest, AFileThatIsRenamedWhileItIsUsedAndCopiedKeepsItsContent) {
  Make(false);
  {
    std::ofstream file(root_ + "/a/toy/log-0.new", std::ios::binary);
    file << std::string(5 << 20, 'x');
  }
  auto file = OpenFile("log-0.new", env::OpenMode::kReadWrite);
  ASSERT_TRUE(failpoints_.Arm("mirror.copy.after_piece", env::FailpointAction::kWait, 1).ok());
  mirror_->Start();
  ASSERT_TRUE(failpoints_.AwaitHit("mirror.copy.after_piece", absl::Seconds(30)).ok());
  const std::string path = root_ + "/a/toy/log-0";
  ASSERT_TRUE(mirror_->files()->Rename(path + ".new", path).ok());
  ASSERT_TRUE(file->WriteAt(100, Bytes("after")).ok());
  ASSERT_TRUE(failpoints_.Release("mirror.copy.after_piece").ok());
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_EQ(mirror_->status().state, MirrorState::kInStep) << mirror_->status().Text();
  EXPECT_EQ(There(), Here());
  ASSERT_TRUE(file->WriteAt(200, Bytes("later")).ok());
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_EQ(There(), Here());
  EXPECT_EQ(There().size(), 1u);
}

TEST_F(JobMirrorTest, ANewProcessOfThePeerGetsAWholeCopy) {
  Make(false);
  mirror_->Start();
  auto file = OpenFile("log-0");
  ASSERT_TRUE(file->WriteAt(0, Bytes("one")).ok());
  EXPECT_TRUE(file->Sync().ok());
  links_->Hold(true);
  ASSERT_TRUE(file->WriteAt(0, Bytes("two")).ok());  // lost with the process
  next_store_ = NewStore();
  links_->NewProcess(next_store_.get());
  mirror_->OnNewProcess();
  links_->Hold(false);
  AwaitState(MirrorState::kInStep);
  EXPECT_EQ(There(), Here());
  EXPECT_EQ(There().at("log-0"), "two");
}

TEST_F(JobMirrorTest, AFailureThereFailsTheSync) {
  Make(false);
  mirror_->Start();
  auto file = OpenFile("log-0");
  EXPECT_TRUE(file->Sync().ok());
  there_->SetRules(env::ParseFaultPlan("*/.mirror/*:*:1+:enospc")->rules);
  ASSERT_TRUE(file->WriteAt(0, Bytes("two")).ok());
  const absl::Status status = file->Sync();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("at peer b is not in step"));
  EXPECT_THAT(mirror_->status().Text(), HasSubstr("behind: "));
  there_->SetRules({});
  AwaitState(MirrorState::kInStep);
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_EQ(There(), Here());
}

TEST_F(JobMirrorTest, WithDegradeAFailureThereIsNoFailureHere) {
  Make(true);
  mirror_->Start();
  auto file = OpenFile("log-0");
  AwaitState(MirrorState::kInStep);
  there_->SetRules(env::ParseFaultPlan("*/.mirror/*:*:1+:eio")->rules);
  ASSERT_TRUE(file->WriteAt(0, Bytes("two")).ok());
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_EQ(mirror_->status().state, MirrorState::kBehind);
  there_->SetRules({});
  AwaitState(MirrorState::kInStep);
  EXPECT_EQ(There(), Here());
}

TEST_F(JobMirrorTest, ASilentPeerIsWaitedForABoundedTime) {
  for (const bool degrade : {false, true}) {
    Make(degrade, absl::Milliseconds(200));
    mirror_->Start();
    auto file = OpenFile("log-0");
    AwaitState(MirrorState::kInStep);
    links_->Hold(true);
    ASSERT_TRUE(file->WriteAt(0, Bytes("held")).ok());
    const absl::Time begun = absl::Now();
    const absl::Status status = file->Sync();
    EXPECT_LT(absl::Now() - begun, absl::Seconds(10));
    EXPECT_EQ(status.ok(), degrade) << status;
    if (!degrade) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("peer b has acknowledged nothing"));
    }
    EXPECT_THAT(mirror_->status().Text(), HasSubstr("behind: peer b has acknowledged nothing"));
    links_->Hold(false);
    // Nothing of it was lost; with degrade it is copied anew.
    AwaitState(MirrorState::kInStep);
    EXPECT_TRUE(file->Sync().ok());
    EXPECT_EQ(There(), Here());
    file.reset();
    mirror_->Stop();
  }
}

TEST_F(JobMirrorTest, APeerThatFallsSilentAmidTheCopyIsNamed) {
  Make(true, absl::Milliseconds(200));
  OpenFile("log-0");
  ASSERT_TRUE(failpoints_.Arm("mirror.copy.after_piece", env::FailpointAction::kWait, 0).ok());
  ASSERT_TRUE(OpenFile("log-1")->WriteAt(0, Bytes("one")).ok());
  mirror_->Start();
  ASSERT_TRUE(failpoints_.AwaitHit("mirror.copy.after_piece", absl::Seconds(30)).ok());
  links_->Hold(true);
  ASSERT_TRUE(failpoints_.Release("mirror.copy.after_piece").ok());
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (mirror_->status().Text().find("behind: peer b has acknowledged nothing") != 0) {
    ASSERT_LT(absl::Now(), deadline) << mirror_->status().Text();
    std::this_thread::yield();
  }
  links_->Hold(false);
  AwaitState(MirrorState::kInStep);
  EXPECT_EQ(There(), Here());
}

TEST_F(JobMirrorTest, WhatIsOnTheWayIsBounded) {
  Make(false);
  mirror_->Start();
  auto file = OpenFile("log-0");
  AwaitState(MirrorState::kInStep);
  links_->Hold(true);
  const std::string large(8 << 20, 'y');
  std::thread writes([&] {
    for (uint64_t i = 0; i < 12; ++i) {
      EXPECT_TRUE(file->WriteAt(i * large.size(), Bytes(large)).ok());
    }
  });
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (links_->most() < (30 << 20)) {
    ASSERT_LT(absl::Now(), deadline);
    std::this_thread::yield();
  }
  links_->Hold(false);
  writes.join();
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_LE(links_->most(), uint64_t{32} << 20);
  EXPECT_EQ(There(), Here());
}

TEST_F(JobMirrorTest, StopEndsWhatWaits) {
  Make(false);
  mirror_->Start();
  auto file = OpenFile("log-0");
  AwaitState(MirrorState::kInStep);
  links_->Hold(true);
  std::thread syncs([&] { EXPECT_TRUE(absl::IsUnavailable(file->Sync())); });
  mirror_->Stop();
  syncs.join();
}

}  // namespace
}  // namespace shardd::peer

#include "server/journal/job_journal.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>

#include "server/env/faulty_file_system.h"
#include "server/journal/log_reader.h"
#include "server/journal/snapshot_file.h"

namespace shardd::journal {
namespace {

constexpr uint64_t kChunks = 4;
constexpr uint64_t kElements = 2048;  // of a chunk

// A job of four chunks in one bucket; a step adds its number to every element.
class FakeJob : public ChunkSource {
 public:
  Copy CopyChunk(uint64_t chunk, std::byte* out) override {
    const std::lock_guard lock(mutex);
    for (uint64_t i = 0; i < kElements; ++i) {
      reinterpret_cast<float*>(out)[i] = values[chunk];
    }
    return {applied[chunk], kElements, 1};
  }
  uint64_t ImageTailBytes() const override { return sizeof(tail); }
  void CopyImageTail(std::byte* out) const override { std::memcpy(out, &tail, sizeof(tail)); }
  void Apply(uint64_t step) {
    for (uint64_t c = 0; c < kChunks; ++c) {
      const std::lock_guard lock(mutex);
      values[c] += static_cast<float>(step);
      applied[c] = step;
    }
  }
  std::mutex mutex;
  float values[kChunks] = {};
  uint64_t applied[kChunks] = {};
  const uint64_t tail = 0x7a11;
};

class JobJournalTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "/tmp/shardd-journal-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override {
    journal_.reset();
    std::filesystem::remove_all(root_);
  }

  JournalOptions Options(env::FileSystem* files) {
    JournalOptions options;
    options.files = files;
    options.failpoints = &failpoints_;
    options.directory = root_ + "/toy";
    options.job = job_;
    options.sizes = {.image_bytes = 4096,
                     .chunks = kChunks,
                     .chunk_bytes = kElements * 4,
                     .chunk_gradient_bytes = kElements * 4,
                     .buckets = 1,
                     .gradient_bytes = kChunks * kElements * 4};
    v1::DaemonConfig::Journal config;
    config.set_snapshots_kept(kept_);
    config.set_segment_bytes(1 << 18);
    config.set_log_bytes_max(1 << 20);
    options.plan = PlanJournal(options.sizes, config);
    options.snapshots_kept = kept_;
    options.degrade = degrade_;
    options.retry = absl::Milliseconds(5);
    options.log = [this](const std::string& line) {
      const std::lock_guard lock(log_mutex_);
      log_ += line + "\n";
    };
    options.source = &source_;
    return options;
  }
  void Start(const std::string& plan) {
    files_ =
        std::make_unique<env::FaultyFileSystem>(env::PosixFileSystem(), *env::ParseFaultPlan(plan));
    const absl::Status made = JobJournal::MakeFiles(Options(files_.get()));
    ASSERT_TRUE(made.ok()) << made;
    journal_ = std::make_unique<JobJournal>(Options(files_.get()), LogEnd{}, Manifest{}, 0);
    journal_->Start();
  }
  void SetFaults(const std::string& plan) { files_->SetRules(env::ParseFaultPlan(plan)->rules); }
  // As the job does between two steps.
  void Boundary() {
    if (!journal_->WantsImage()) return;
    env::AlignedBuffer image(4096);
    image.as<uint64_t>()[0] = step_;
    journal_->BeginSnapshot(std::move(image), 4096, step_);
  }
  std::future<void> BeginStep() {
    ++step_;
    for (float& g : gradient_) g = static_cast<float>(step_);
    journal_->AppendGradient({.kind = RecordKind::kGradient, .step = step_},
                             reinterpret_cast<std::byte*>(gradient_), sizeof(gradient_), 4096);
    auto durable = std::make_shared<std::promise<void>>();
    journal_->Commit({.kind = RecordKind::kDecision, .step = step_}, env::AlignedBuffer(4096), 8,
                     [durable] { durable->set_value(); });
    return durable->get_future();
  }
  void Step() {
    Boundary();
    BeginStep().wait();
    source_.Apply(step_);
  }
  void AwaitState(JournalState state) {
    while (journal_->status().state != state) {
      Boundary();
      std::this_thread::yield();
    }
  }
  void AwaitLog(const std::string& text) {
    while (true) {
      const std::lock_guard lock(log_mutex_);
      if (log_.find(text) != std::string::npos) return;
      std::this_thread::yield();
    }
  }
  // The machine dies; what is left leads to this step. Checks the values of all chunks.
  uint64_t RecoveredStep(uint64_t seed = 0) {
    journal_->Stop();
    EXPECT_TRUE(env::DropUnsynced(root_, seed).ok());
    return ReadBack();
  }
  uint64_t ReadBack() {
    absl::StatusOr<Manifest> manifest = ReadManifest(env::PosixFileSystem(), root_ + "/toy");
    EXPECT_TRUE(manifest.ok()) << manifest.status();
    if (!manifest.ok() || manifest->snapshots.empty()) return 0;
    const ManifestSnapshot& snapshot = manifest->snapshots.back();
    auto reader = SnapshotReader::Open(env::PosixFileSystem(), root_ + "/toy", job_, snapshot);
    EXPECT_TRUE(reader.ok()) << reader.status();
    uint64_t step = *reinterpret_cast<const uint64_t*>((*reader)->image());
    EXPECT_EQ(step, snapshot.step);
    EXPECT_EQ((*reader)->image_bytes(), 4096 + sizeof(uint64_t));
    EXPECT_EQ(*reinterpret_cast<const uint64_t*>((*reader)->image() + 4096), source_.tail);
    std::vector<ChunkBytes> chunks;
    float values[kChunks];
    uint64_t applied[kChunks];
    uint64_t c = 0;
    for (auto batch = (*reader)->NextBatch(); !batch->empty(); batch = (*reader)->NextBatch()) {
      for (const ChunkBytes& chunk : *batch) {
        EXPECT_TRUE((*reader)->Check(chunk, c, c).ok());
        values[c] = *reinterpret_cast<const float*>(chunk.payload.data());
        applied[c++] = chunk.header->step;
      }
    }
    absl::StatusOr<LogIndex> log = ReadLog(env::PosixFileSystem(), root_ + "/toy", job_,
                                           {.keep_lsn = manifest->snapshots.front().redo_lsn,
                                            .redo_lsn = snapshot.redo_lsn,
                                            .durable_lsn = manifest->durable_lsn});
    EXPECT_TRUE(log.ok()) << log.status();
    if (!log.ok()) return 0;
    for (const RecordPlace& place : log->records) {
      EXPECT_TRUE(ReadRecord(*log, place, job_).ok());
      if (place.fields.kind != RecordKind::kDecision) continue;
      EXPECT_EQ(place.fields.step, step + 1);
      step = place.fields.step;
      for (uint64_t k = 0; k < kChunks; ++k) {
        if (applied[k] < step) values[k] += static_cast<float>(step);
      }
    }
    for (uint64_t k = 0; k < kChunks; ++k) {
      EXPECT_EQ(values[k], static_cast<float>(step * (step + 1) / 2)) << "chunk " << k;
    }
    return step;
  }

  const JobIdentity job_{"toy", 11, 22};
  std::string root_;
  uint32_t kept_ = 1;
  bool degrade_ = false;
  env::Failpoints failpoints_;
  FakeJob source_;
  std::mutex log_mutex_;
  std::string log_;
  std::unique_ptr<env::FaultyFileSystem> files_;
  std::unique_ptr<JobJournal> journal_;
  uint64_t step_ = 0;
  alignas(4096) float gradient_[kChunks * kElements] = {};
};

TEST_F(JobJournalTest, CommittedStepsSurviveTheMachine) {
  Start("unsynced");
  for (int i = 0; i < 20; ++i) Step();
  EXPECT_EQ(journal_->status().state, JournalState::kWhole);
  EXPECT_EQ(journal_->status().durable_step, 20u);
  EXPECT_EQ(RecoveredStep(), 20u);
}

TEST_F(JobJournalTest, OneSyncCoversAStep) {
  Start("");
  Step();
  const uint64_t before = journal_->status().syncs;
  for (int i = 0; i < 10; ++i) {
    BeginStep().wait();
    source_.Apply(step_);
  }
  EXPECT_EQ(journal_->status().syncs, before + 10);
}

TEST_F(JobJournalTest, TheFirstCommitWaitsForTheFirstSnapshot) {
  Start("unsynced,*/snapshot-0:sync:2:wait");
  Boundary();
  std::future<void> durable = BeginStep();
  files_->AwaitHeld();
  EXPECT_EQ(durable.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_EQ(journal_->status().durable_step, 0u);
  files_->Release();
  durable.wait();
  source_.Apply(1);
  EXPECT_EQ(RecoveredStep(), 1u);
}

TEST_F(JobJournalTest, SnapshotsKeepTheLogShortAndEverythingFlat) {
  Start("unsynced");
  uint64_t most = 0;
  const auto files = [&] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  Step();
  const auto open = files();
  uint64_t snapshots = 0, last = 0;
  while (snapshots < 50) {
    Step();
    const JournalStatus status = journal_->status();
    most = std::max(most, status.log_bytes);
    if (status.snapshot_step != last) ++snapshots;
    last = status.snapshot_step;
  }
  const JournalPlan plan = Options(files_.get()).plan;
  EXPECT_LE(most, plan.log_bytes_max + plan.segment_bytes);
  EXPECT_LE(files(), open + 2);
  const size_t on_disk = std::distance(std::filesystem::directory_iterator(root_ + "/toy"), {});
  EXPECT_LE(on_disk, plan.segments + plan.snapshots + 8);  // with the logs of what is unsynced
  EXPECT_EQ(RecoveredStep(), step_);
}

TEST_F(JobJournalTest, WhatWasNotDecidedIsDroppedAndQuietIsTold) {
  Start("unsynced");
  Step();
  journal_->AppendGradient({.kind = RecordKind::kGradient, .step = 99},
                           reinterpret_cast<std::byte*>(gradient_), sizeof(gradient_), 4096);
  std::promise<void> quiet;
  journal_->Abandon({.kind = RecordKind::kState, .generation = 2}, env::AlignedBuffer(4096), 8,
                    [&] { quiet.set_value(); });
  quiet.get_future().wait();
  Step();
  EXPECT_EQ(RecoveredStep(), 2u);
}

TEST_F(JobJournalTest, OneFailureIsMadeGoodInAnotherSegment) {
  for (const char* fault : {"*/log-*:sync:1:eio", "*/log-*:write:1:eio",
                            "*/log-*:write:2:short=8192", "*/log-*:write:1:enospc"}) {
    SCOPED_TRACE(fault);
    std::filesystem::remove_all(root_ + "/toy");
    step_ = 0;
    std::fill(source_.values, source_.values + kChunks, 0.0f);
    std::fill(source_.applied, source_.applied + kChunks, 0);
    Start("unsynced");
    Step();
    Step();
    SetFaults(fault);
    Step();
    EXPECT_EQ(journal_->status().state, JournalState::kWhole);
    AwaitLog("its journal failed");
    Step();
    EXPECT_EQ(RecoveredStep(), 4u);
  }
}

TEST_F(JobJournalTest, StopWaitsAndGoesOnWhenThereIsRoom) {
  Start("unsynced");
  Step();
  SetFaults("*/log-*:write:1+:enospc");
  std::future<void> durable = BeginStep();
  AwaitState(JournalState::kStalled);
  EXPECT_NE(journal_->status().error.find("No space left"), std::string::npos)
      << journal_->status().error;
  EXPECT_NE(journal_->status().error.find(root_ + "/toy/log-"), std::string::npos);
  EXPECT_EQ(durable.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_EQ(journal_->status().durable_step, 1u);
  SetFaults("");
  durable.wait();
  source_.Apply(2);
  AwaitState(JournalState::kWhole);
  EXPECT_EQ(journal_->status().error, "");
  Step();
  EXPECT_EQ(RecoveredStep(), 3u);
}

TEST_F(JobJournalTest, StoppedForGoodLosesOnlyWhatWasNotTold) {
  Start("unsynced");
  Step();
  SetFaults("*/log-*:write:1+:eio");
  std::future<void> durable = BeginStep();
  AwaitState(JournalState::kStalled);
  // A group that breaks meanwhile is told that its memory is its own again.
  std::promise<void> quiet;
  journal_->Abandon({.kind = RecordKind::kState, .generation = 2}, env::AlignedBuffer(4096), 8,
                    [&] { quiet.set_value(); });
  quiet.get_future().wait();
  EXPECT_EQ(RecoveredStep(), 1u);
}

TEST_F(JobJournalTest, DegradeGoesOnAndIsWholeAgainWithASnapshot) {
  degrade_ = true;
  Start("unsynced");
  Step();
  Step();
  SetFaults("*/log-*:write:1+:eio");
  BeginStep().wait();  // told, though it is not durable
  source_.Apply(3);
  EXPECT_EQ(journal_->status().state, JournalState::kDegraded);
  EXPECT_EQ(journal_->status().durable_step, 2u);
  EXPECT_NE(journal_->status().error.find("Input/output error"), std::string::npos);
  AwaitLog("the loss of the machine would cost all steps after 2");
  for (int i = 0; i < 5; ++i) Step();
  SetFaults("");
  AwaitState(JournalState::kWhole);
  Step();
  EXPECT_EQ(journal_->status().durable_step, step_);
  EXPECT_EQ(RecoveredStep(), step_);
}

TEST_F(JobJournalTest, DegradedForGoodStillHasWhatWasDurable) {
  degrade_ = true;
  Start("unsynced");
  Step();
  Step();
  SetFaults("*:write:1+:eio");
  for (int i = 0; i < 50; ++i) {
    Boundary();
    BeginStep().wait();
    source_.Apply(step_);
  }
  EXPECT_EQ(journal_->status().durable_step, 2u);
  EXPECT_EQ(RecoveredStep(), 2u);
}

TEST_F(JobJournalTest, SnapshotsThatFailAreTakenAgain) {
  Start("unsynced,*/snapshot-*:write:3-9:eio");
  Step();
  AwaitLog("a snapshot failed");
  EXPECT_EQ(journal_->status().state, JournalState::kWhole);
  EXPECT_EQ(RecoveredStep(), 1u);
}

TEST_F(JobJournalTest, AFullLogThatWaitsForItsSnapshotSaysSo) {
  Start("unsynced");
  Step();
  SetFaults("*/snapshot-*:sync:1:wait");
  std::future<void> held = std::async(std::launch::async, [&] { files_->AwaitHeld(); });
  std::future<void> last;
  JournalStatus status;
  while (status.state != JournalState::kStalled ||
         held.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (!last.valid() || last.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
      if (last.valid()) source_.Apply(step_);
      Boundary();
      last = BeginStep();
    }
    std::this_thread::yield();
    status = journal_->status();
  }
  EXPECT_NE(status.error.find("is full and waits for a snapshot"), std::string::npos);
  files_->Release();
  last.wait();
  source_.Apply(step_);
  AwaitState(JournalState::kWhole);
  EXPECT_EQ(RecoveredStep(), step_);
}

TEST_F(JobJournalTest, SeveralSnapshotsAreKept) {
  kept_ = 3;
  Start("unsynced");
  uint64_t last = 0, snapshots = 0;
  while (snapshots < 5) {
    Step();
    snapshots += journal_->status().snapshot_step != last ? 1 : 0;
    last = journal_->status().snapshot_step;
  }
  EXPECT_EQ(RecoveredStep(), step_);
  EXPECT_EQ(ReadManifest(env::PosixFileSystem(), root_ + "/toy")->snapshots.size(), 3u);
}

TEST_F(JobJournalTest, RoomIsCheckedAndTakenBeforehand) {
  JournalOptions options = Options(env::PosixFileSystem());
  options.plan.snapshot_bytes = uint64_t{1} << 50;
  const absl::Status status = JobJournal::MakeFiles(options);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("free"), std::string::npos) << status;
  EXPECT_FALSE(std::filesystem::exists(options.directory));
  env::FaultyFileSystem files(env::PosixFileSystem(),
                              *env::ParseFaultPlan("*/log-2.new:preallocate:1:enospc"));
  EXPECT_TRUE(absl::IsResourceExhausted(JobJournal::MakeFiles(Options(&files))));
  EXPECT_FALSE(std::filesystem::exists(options.directory));
  ASSERT_TRUE(JobJournal::MakeFiles(Options(env::PosixFileSystem())).ok());
  uint64_t bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(options.directory)) {
    bytes += file.file_size();
  }
  EXPECT_GE(bytes, Options(env::PosixFileSystem()).plan.total());
}

// The machine dies at any moment, with any half of what was not synced on the disk.
TEST_F(JobJournalTest, DeathAtAnyMoment) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(seed);
    std::filesystem::remove_all(root_ + "/toy");
    step_ = 0;
    std::fill(source_.values, source_.values + kChunks, 0.0f);
    std::fill(source_.applied, source_.applied + kChunks, 0);
    Start("unsynced");
    for (uint64_t i = 0; i < 1 + seed * 3; ++i) Step();
    const uint64_t told = step_;
    Boundary();
    const std::future<void> not_awaited = BeginStep();
    EXPECT_GE(RecoveredStep(seed % 3 == 0 ? 0 : seed), told);
  }
}

}  // namespace
}  // namespace shardd::journal

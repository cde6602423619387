#include "server/journal/job_journal.h"

#include <pthread.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/journal/snapshot_file.h"

namespace shardd::journal {

namespace {

// A file that goes through the page cache is synced at this much, so that the last sync of a step
// is short.
constexpr uint64_t kUnsyncedBytes = 64 << 20;

uint64_t OldestRedo(const Manifest& manifest) {
  return manifest.snapshots.empty() ? 0 : manifest.snapshots.front().redo_lsn;
}

uint64_t LastNumber(const Manifest& manifest) {
  return manifest.snapshots.empty() ? 0 : manifest.snapshots.back().number;
}

uint64_t LiveBytes(const LogEnd& end) {
  uint64_t bytes = 0;
  for (const LiveSegment& segment : end.live) bytes += segment.bytes;
  return bytes;
}

}  // namespace

std::string_view JournalStateName(JournalState state) {
  switch (state) {
    case JournalState::kEmpty:
      return "empty";
    case JournalState::kBuilding:
      return "building";
    case JournalState::kWhole:
      return "whole";
    case JournalState::kStalled:
      return "stalled";
    case JournalState::kDegraded:
      return "degraded";
  }
  return "";
}

absl::Status JobJournal::MakeFiles(const JournalOptions& options) {
  env::FileSystem* files = options.files;
  const std::string parent = env::ParentOf(options.directory);
  const std::string building =
      absl::StrCat(parent, "/.", options.directory.substr(parent.size() + 1), ".new");
  const auto make = [&]() -> absl::Status {
    if (absl::Status s = env::RemoveTree(files, options.directory); !s.ok()) return s;
    if (absl::Status s = env::RemoveTree(files, building); !s.ok()) return s;
    if (absl::Status s = env::MakeDirectories(files, building); !s.ok()) return s;
    absl::Status s = CheckRoom(files, building, options.job.name, options.plan);
    if (!s.ok()) return s;
    LogWriter log(files, building, options.job, options.plan.segment_bytes, {});
    if (s = log.Preallocate(options.plan.segments); !s.ok()) return s;
    for (uint64_t slot = 0; slot < options.plan.snapshots; ++slot) {
      s = PreallocateSnapshot(files, building, slot, options.plan.snapshot_bytes);
      if (!s.ok()) return s;
    }
    Manifest manifest;
    manifest.job = options.job;
    if (s = WriteManifest(files, building, manifest, [] {}); !s.ok()) return s;
    if (!options.peers.empty()) {
      s = env::ReplaceFile(files, env::JoinPath(building, kPeersName),
                           std::as_bytes(std::span(options.peers)));
      if (!s.ok()) return s;
    }
    if (s = files->Rename(building, options.directory); !s.ok()) return s;
    return files->SyncDirectory(parent);
  };
  absl::Status status = make();
  if (!status.ok()) (void)env::RemoveTree(files, building);
  return status;
}

JobJournal::JobJournal(JournalOptions options, LogEnd end, Manifest manifest,
                       uint64_t committed_step)
    : options_(std::move(options)),
      log_(options_.files, options_.directory, options_.job, options_.plan.segment_bytes, end),
      durable_lsn_(end.next_lsn - 1),
      since_snapshot_(LiveBytes(end)),
      manifest_(std::move(manifest)),
      next_snapshot_(LastNumber(manifest_) + 1),
      free_lsn_(OldestRedo(manifest_)),
      live_bytes_(LiveBytes(end)) {
  manifest_.job = options_.job;
  if (manifest_.snapshots.empty()) return;
  state_ = JournalState::kWhole;
  base_ready_ = true;
  synced_step_ = durable_step_ = committed_step;
}

JobJournal::~JobJournal() { Stop(); }

absl::Status JobJournal::Prepare() {
  if (absl::Status status = log_.Discard(); !status.ok()) return status;
  // The configuration may have changed; without room the log takes what it needs when it does.
  if (log_.live_segments() + log_.free_segments() < options_.plan.segments) {
    const absl::Status status = log_.Preallocate(options_.plan.segments - log_.live_segments());
    if (!status.ok()) {
      options_.log(absl::StrCat("job ", options_.job.name,
                                ": its journal has less room than planned: ", status.message()));
    }
  }
  return absl::OkStatus();
}

void JobJournal::Start() {
  writer_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "shardd-journal");
    WriterMain();
  });
  copier_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "shardd-snapshot");
    CopierMain();
  });
}

void JobJournal::BeginStop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
}

void JobJournal::Stop() {
  BeginStop();
  if (writer_.joinable()) writer_.join();
  if (copier_.joinable()) copier_.join();
  entries_.clear();
  held_.clear();
}

void JobJournal::Push(std::shared_ptr<Entry> entry) {
  if (entry->has_record && entry->owned.data() != nullptr) {
    entry->record.payload = entry->owned.data();
  }
  std::function<void()> now;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == JournalState::kDegraded) {
      now = std::move(entry->done);
    } else {
      sync_wanted_ = sync_wanted_ || entry->sync;
      entries_.push_back(std::move(entry));
    }
  }
  if (now) now();
  changed_.notify_all();
}

void JobJournal::AppendGradient(const RecordFields& fields, const std::byte* payload,
                                uint64_t bytes, uint64_t unit) {
  auto entry = std::make_shared<Entry>();
  entry->record = {fields, payload, bytes, unit};
  entry->gradient = true;
  Push(std::move(entry));
}

void JobJournal::Commit(const RecordFields& fields, env::AlignedBuffer payload, uint64_t bytes,
                        std::function<void()> durable) {
  auto entry = std::make_shared<Entry>();
  entry->record = {fields, nullptr, bytes, kPageBytes};
  entry->owned = std::move(payload);
  entry->sync = true;
  entry->commit = true;
  entry->done = std::move(durable);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& earlier : entries_) earlier->gradient = false;  // decided
  }
  Push(std::move(entry));
}

void JobJournal::AwaitDurable(std::function<void()> durable) {
  auto entry = std::make_shared<Entry>();
  entry->has_record = false;
  entry->sync = true;
  entry->awaits = true;
  entry->done = std::move(durable);
  Push(std::move(entry));
}

void JobJournal::Abandon(const RecordFields& fields, env::AlignedBuffer payload, uint64_t bytes,
                         std::function<void()> quiet) {
  auto entry = std::make_shared<Entry>();
  entry->record = {fields, nullptr, bytes, kPageBytes};
  entry->owned = std::move(payload);
  entry->sync = true;
  entry->done = std::move(quiet);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& earlier : entries_) earlier->dropped = earlier->dropped || earlier->gradient;
  }
  Push(std::move(entry));
}

bool JobJournal::WantsImage() const {
  const std::lock_guard lock(mutex_);
  if (request_.has_value()) return false;
  switch (state_) {
    case JournalState::kEmpty:
      return true;
    case JournalState::kWhole:
      return since_snapshot_ >= options_.plan.log_bytes_max / options_.plan.snapshots;
    case JournalState::kDegraded:
      return absl::Now() >= retry_at_;
    case JournalState::kBuilding:
    case JournalState::kStalled:
      return false;
  }
  return false;
}

void JobJournal::BeginSnapshot(env::AlignedBuffer image, uint64_t bytes, uint64_t step) {
  auto marker = std::make_shared<Entry>();
  marker->has_record = false;
  marker->marks_snapshot = true;
  marker->sync = true;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == JournalState::kDegraded || state_ == JournalState::kEmpty) {
      hold_until_base_ = state_ == JournalState::kEmpty;  // else steps were told without it
      begin_after_gap_ = state_ == JournalState::kDegraded;
      base_ready_ = false;
      state_ = JournalState::kBuilding;
      failures_ = 0;
    }
    request_ = SnapshotRequest{
        .id = ++requests_, .image = std::move(image), .image_bytes = bytes, .step = step};
  }
  Push(std::move(marker));
}

JournalStatus JobJournal::status() const {
  const std::lock_guard lock(mutex_);
  JournalStatus status;
  status.state = state_;
  // Commits wait for a snapshot that fails.
  if (state_ == JournalState::kBuilding && hold_until_base_ && !error_.empty()) {
    status.state = JournalState::kStalled;
  }
  status.error = error_;
  if (waits_for_room_) {
    status.state = JournalState::kStalled;
    if (status.error.empty()) {
      status.error = absl::StrCat("the log in ", options_.directory,
                                  " is full and waits for a snapshot; raise journal.log_bytes_max");
    }
  }
  status.durable_step = durable_step_;
  status.snapshot_step = manifest_.snapshots.empty() ? 0 : manifest_.snapshots.back().step;
  status.log_bytes = live_bytes_;
  status.disk_bytes = options_.plan.total();
  status.bytes_written = bytes_written_;
  status.syncs = syncs_;
  return status;
}

bool JobJournal::WriterHasWork() const {
  if (!give_up_.empty()) return true;
  if (state_ == JournalState::kStalled) return absl::Now() >= retry_at_;
  return written_ < entries_.size() || sync_wanted_;
}

void JobJournal::WriterMain() {
  Lock lock(mutex_);
  while (true) {
    while (!stop_ && !WriterHasWork()) {
      if (state_ == JournalState::kStalled) {
        // Nothing is being written: whoever waits for quiet has it.
        Calls calls;
        ReleaseQuiet(&calls);
        lock.unlock();
        for (const auto& call : calls) call();
        lock.lock();
        if (stop_) break;
        changed_.wait_for(lock, absl::ToChronoNanoseconds(
                                    std::max(retry_at_ - absl::Now(), absl::Milliseconds(1))));
      } else {
        changed_.wait(lock);
      }
    }
    if (stop_) return;
    if (!give_up_.empty()) {
      Calls calls;
      Degrade(std::exchange(give_up_, ""), &calls);
      lock.unlock();
      for (const auto& call : calls) call();
      lock.lock();
      continue;
    }
    if (state_ == JournalState::kStalled || begin_after_gap_) {
      log_.StartOver(begin_after_gap_);
      begin_after_gap_ = false;
      written_ = 0;
    }
    absl::Status status = WriteEntries(&lock);
    if (status.ok() && !stop_) status = SyncEntries(&lock);
    NoteLog();
    if (stop_) return;
    if (!status.ok()) {
      OnFailure(status, &lock);
      continue;
    }
    failures_ = 0;
    if (state_ == JournalState::kStalled) {
      options_.log(absl::StrCat("job ", options_.job.name, ": its journal works again"));
      error_.clear();
      state_ = base_ready_ ? JournalState::kWhole : JournalState::kBuilding;
    }
  }
}

void JobJournal::NoteLog() {
  live_bytes_ = log_.live_bytes();
  since_snapshot_ += log_.bytes_written() - bytes_written_;
  bytes_written_ = log_.bytes_written();
}

// All entries that are there, in order.
absl::Status JobJournal::WriteEntries(Lock* lock) {
  while (written_ < entries_.size() && !stop_) {
    const std::shared_ptr<Entry> entry = entries_[written_];
    if (entry->marks_snapshot) {
      // What comes after it has an LSN above all that is durable, whatever fails.
      if (absl::Status status = SyncEntries(lock); !status.ok()) return status;
      if (request_.has_value() && !request_->marked) {
        request_->marked = true;
        request_->redo_lsn = log_.next_lsn();
        since_snapshot_ = 0;
      }
      ++written_;
      changed_.notify_all();
      continue;
    }
    if (entry->dropped || !entry->has_record) {
      ++written_;
      continue;
    }
    if (free_lsn_ > 0) log_.Free(free_lsn_);
    if (absl::Status status = AwaitRoom(entry->record, lock); !status.ok()) return status;
    if (stop_) break;
    if (entry->dropped) continue;
    lock->unlock();
    const absl::Status status = log_.Append(entry->record);
    if (status.ok()) options_.failpoints->Reach("journal.append.after");
    lock->lock();
    NoteLog();
    if (!status.ok()) return status;
    ++written_;
  }
  return absl::OkStatus();
}

// Where the log is as long as it may be, the snapshot that lets it be cut is waited for.
absl::Status JobJournal::AwaitRoom(const Record& record, Lock* lock) {
  const auto full = [&] {
    return request_.has_value() && request_->marked && log_.NeedsSegment(record) &&
           log_.free_segments() == 0 && live_bytes_ >= options_.plan.log_bytes_max;
  };
  while (full() && !stop_) {
    if (options_.degrade && !error_.empty()) {
      waits_for_room_ = false;
      return absl::ResourceExhaustedError(error_);
    }
    waits_for_room_ = true;
    changed_.notify_all();  // the copier hurries
    changed_.wait_for(*lock, std::chrono::milliseconds(100));
    log_.Free(free_lsn_);
    live_bytes_ = log_.live_bytes();
  }
  waits_for_room_ = false;
  return absl::OkStatus();
}

// Makes durable what is written, if somebody waits for that, and tells.
absl::Status JobJournal::SyncEntries(Lock* lock) {
  const bool much = !log_.direct() && log_.next_lsn() - 1 - log_.durable_lsn() > 0 &&
                    log_.bytes_written() - bytes_at_sync_ > kUnsyncedBytes;
  const bool marker = written_ < entries_.size() && entries_[written_]->marks_snapshot;
  if (!sync_wanted_ && !much && !marker) return absl::OkStatus();
  if (written_ == entries_.size()) sync_wanted_ = false;
  lock->unlock();
  options_.failpoints->Reach("journal.sync.before");
  const absl::Status status = log_.Sync();
  if (status.ok()) options_.failpoints->Reach("journal.sync.after");
  lock->lock();
  if (!status.ok()) {
    sync_wanted_ = true;
    return status;
  }
  ++syncs_;
  bytes_at_sync_ = log_.bytes_written();
  durable_lsn_ = log_.durable_lsn();
  Calls calls;
  Acknowledge(&calls);
  lock->unlock();
  for (const auto& call : calls) call();
  lock->lock();
  changed_.notify_all();
  return absl::OkStatus();
}

void JobJournal::Acknowledge(Calls* calls) {
  for (; written_ > 0; --written_) {
    const std::shared_ptr<Entry> entry = std::move(entries_.front());
    entries_.pop_front();
    if (entry->commit) {
      synced_step_ = entry->record.fields.step;
      if (base_ready_) durable_step_ = synced_step_;
    }
    if (!entry->done) continue;
    if ((entry->commit || entry->awaits) && !base_ready_ && hold_until_base_) {
      held_.push_back(std::move(entry->done));
    } else {
      calls->push_back(std::move(entry->done));
    }
  }
}

void JobJournal::OnFailure(const absl::Status& why, Lock* lock) {
  const std::string text(why.message());
  ++failures_;
  written_ = 0;
  sync_wanted_ = true;
  options_.log(absl::StrCat("job ", options_.job.name, ": its journal failed: ", text));
  if (failures_ == 1) {  // once at once: another segment may do
    log_.StartOver(false);
    return;
  }
  Calls calls;
  retry_at_ = absl::Now() + options_.retry;
  if (options_.degrade) {
    Degrade(text, &calls);
  } else {
    if (state_ != JournalState::kStalled) {
      options_.log(absl::StrCat("job ", options_.job.name,
                                ": waits for its journal (journal.on_failure = stop)"));
    }
    state_ = JournalState::kStalled;
    error_ = text;
  }
  lock->unlock();
  for (const auto& call : calls) call();
  lock->lock();
}

void JobJournal::Degrade(const std::string& why, Calls* calls) {
  options_.log(absl::StrCat("job ", options_.job.name,
                            ": goes on without its journal (journal.on_failure = degrade); the "
                            "loss of the machine would cost all steps after ",
                            durable_step_));
  state_ = JournalState::kDegraded;
  error_ = why;
  retry_at_ = absl::Now() + options_.retry;
  base_ready_ = false;
  request_.reset();
  for (const auto& entry : entries_) {
    if (entry->done) calls->push_back(std::move(entry->done));
  }
  entries_.clear();
  written_ = 0;
  sync_wanted_ = false;
  for (auto& held : held_) calls->push_back(std::move(held));
  held_.clear();
  changed_.notify_all();
}

void JobJournal::ReleaseQuiet(Calls* calls) {
  for (const auto& entry : entries_) {
    if (entry->done && !entry->commit && !entry->awaits)
      calls->push_back(std::exchange(entry->done, nullptr));
  }
}

}  // namespace shardd::journal

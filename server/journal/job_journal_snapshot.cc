// Snapshots, copied while the job trains.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/journal/job_journal.h"
#include "server/journal/snapshot_file.h"

namespace shardd::journal {

namespace {

constexpr uint64_t kChunkUnit = 64 << 10;

// The `index`th chunk of the source; `copy` has room for it.
absl::Status AddChunk(ChunkSource* source, uint64_t index, env::AlignedBuffer* copy,
                      SnapshotWriter* writer) {
  const uint64_t number = source->ChunkAt(index);
  const ChunkSource::Copy taken = source->CopyChunk(number, copy->data());
  Record chunk;
  chunk.fields.kind = RecordKind::kChunk;
  chunk.fields.step = taken.applied;
  chunk.fields.bucket = number;
  chunk.fields.count = taken.count;
  chunk.fields.arrays = taken.arrays;
  chunk.payload = copy->data();
  chunk.payload_bytes = taken.count * taken.arrays * sizeof(float);
  chunk.unit = kChunkUnit;
  return writer->Add(chunk);
}

// The image, with what the source has of it.
absl::Status AddImage(ChunkSource* source, const env::AlignedBuffer& head, uint64_t head_bytes,
                      uint64_t step, SnapshotWriter* writer) {
  Record image;
  image.fields.kind = RecordKind::kImage;
  image.fields.step = step;
  image.unit = kChunkUnit;
  image.payload = head.data();
  image.payload_bytes = head_bytes;
  env::AlignedBuffer whole;
  if (const uint64_t tail = source->ImageTailBytes(); tail > 0) {
    whole = env::AlignedBuffer(head_bytes + tail);
    std::memcpy(whole.data(), head.data(), head_bytes);
    source->CopyImageTail(whole.data() + head_bytes);
    image.payload = whole.data();
    image.payload_bytes += tail;
  }
  return writer->Add(image);
}

}  // namespace

void JobJournal::CopierMain() {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || (request_.has_value() && request_->marked); });
    if (stop_) return;
    copying_ = request_->id;
    const absl::Status status = TakeSnapshot(&lock);
    if (Cancelled() || status.ok()) continue;
    error_ = absl::StrCat("a snapshot failed: ", status.message());
    options_.log(absl::StrCat("job ", options_.job.name, ": ", error_));
    if (options_.degrade && !base_ready_) {
      // The writer may be reading what it is to give up.
      give_up_ = error_;
      request_.reset();
      changed_.notify_all();
      continue;
    }
    // Again with the same image: the log has all that came after it.
    changed_.wait_for(lock, absl::ToChronoNanoseconds(options_.retry), [&] { return Cancelled(); });
  }
}

// A file of a snapshot that the manifest does not name.
uint64_t JobJournal::FreeSlot() const {
  for (uint64_t slot = 0;; ++slot) {
    const bool used =
        std::any_of(manifest_.snapshots.begin(), manifest_.snapshots.end(),
                    [&](const ManifestSnapshot& snapshot) { return snapshot.slot == slot; });
    if (!used) return slot;
  }
}

absl::Status JobJournal::TakeSnapshot(Lock* lock) {
  // The request may be withdrawn meanwhile, its memory may not.
  env::AlignedBuffer bytes = std::move(request_->image);
  const uint64_t image_bytes = request_->image_bytes;
  ManifestSnapshot named{};
  named.step = request_->step;
  named.redo_lsn = request_->redo_lsn;
  const uint64_t slot = FreeSlot(), number = next_snapshot_++;
  const auto give_back = [&] {
    if (!Cancelled() && request_->image.data() == nullptr) {
      request_->image = std::move(bytes);
    }
  };
  lock->unlock();
  absl::StatusOr<std::unique_ptr<SnapshotWriter>> writer = SnapshotWriter::Create(
      options_.files, options_.directory, slot, options_.plan.snapshot_bytes, options_.job, number);
  absl::Status status = writer.status();
  if (status.ok()) {
    status = AddImage(options_.source, bytes, image_bytes, named.step, writer->get());
  }
  lock->lock();
  if (status.ok()) status = CopyChunks(writer->get(), lock);
  if (status.ok()) {
    lock->unlock();
    absl::StatusOr<ManifestSnapshot> finished = (*writer)->Finish();
    lock->lock();
    status = finished.status();
    if (status.ok()) {
      finished->step = named.step;
      finished->redo_lsn = named.redo_lsn;
      status = Publish(*finished, lock);
    }
  }
  if (!status.ok()) give_back();
  return status;
}

bool JobJournal::Hurried() const {
  return !base_ready_ || live_bytes_ >= options_.plan.log_bytes_max / 4 * 3;
}

void JobJournal::Throttle(uint64_t bytes, absl::Time began, Lock* lock) {
  const absl::Time due =
      began + absl::Seconds(static_cast<double>(bytes) /
                            static_cast<double>(options_.snapshot_bytes_per_second));
  while (!Cancelled() && !Hurried() && absl::Now() < due) {
    changed_.wait_for(*lock, absl::ToChronoNanoseconds(due - absl::Now()));
  }
}

absl::StatusOr<Manifest> JobJournal::MakeFilesWithSnapshot(const JournalOptions& options,
                                                           const env::AlignedBuffer& image,
                                                           uint64_t image_bytes, uint64_t step) {
  if (absl::Status status = MakeFiles(options); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<SnapshotWriter>> writer = SnapshotWriter::Create(
      options.files, options.directory, 0, options.plan.snapshot_bytes, options.job, 1);
  if (!writer.ok()) return writer.status();
  absl::Status status = AddImage(options.source, image, image_bytes, step, writer->get());
  env::AlignedBuffer copy(options.sizes.chunk_bytes);
  for (uint64_t i = 0; status.ok() && i < options.sizes.chunks; ++i) {
    status = AddChunk(options.source, i, &copy, writer->get());
  }
  if (!status.ok()) return status;
  absl::StatusOr<ManifestSnapshot> finished = (*writer)->Finish();
  if (!finished.ok()) return finished.status();
  finished->step = step;
  finished->redo_lsn = 1;
  Manifest manifest;
  manifest.job = options.job;
  manifest.snapshots.push_back(*finished);
  status = WriteManifest(options.files, options.directory, manifest, [] {});
  if (!status.ok()) return status;
  return manifest;
}

absl::Status JobJournal::CopyChunks(SnapshotWriter* writer, Lock* lock) {
  const absl::Time began = absl::Now();
  env::AlignedBuffer copy(options_.sizes.chunk_bytes);
  for (uint64_t c = 0; c < options_.sizes.chunks; ++c) {
    if (Cancelled()) return absl::CancelledError("the snapshot is no longer wanted");
    lock->unlock();
    const absl::Status status = AddChunk(options_.source, c, &copy, writer);
    if (status.ok()) options_.failpoints->Reach("journal.snapshot.after_chunk");
    lock->lock();
    if (!status.ok()) return status;
    if (options_.snapshot_bytes_per_second > 0) Throttle(writer->bytes(), began, lock);
  }
  return absl::OkStatus();
}

// The snapshot counts from here on, and what it makes superfluous is free.
absl::Status JobJournal::Publish(const ManifestSnapshot& snapshot, Lock* lock) {
  if (Cancelled()) return absl::CancelledError("the snapshot is no longer wanted");
  Manifest next = manifest_;
  // After a gap, older snapshots have no log that leads up to now.
  if (!base_ready_) next.snapshots.clear();
  next.snapshots.push_back(snapshot);
  while (next.snapshots.size() > options_.snapshots_kept) {
    next.snapshots.erase(next.snapshots.begin());
  }
  next.durable_lsn = std::max(durable_lsn_, snapshot.redo_lsn - 1);
  lock->unlock();
  const absl::Status status = WriteManifest(options_.files, options_.directory, next, [this] {
    options_.failpoints->Reach("journal.manifest.before_rename");
  });
  if (status.ok()) options_.failpoints->Reach("journal.manifest.after_rename");
  lock->lock();
  if (!status.ok()) return status;
  manifest_ = std::move(next);
  free_lsn_ = manifest_.snapshots.front().redo_lsn;
  if (Cancelled()) return absl::OkStatus();  // the log broke off meanwhile
  request_.reset();
  error_.clear();
  Calls calls;
  if (!base_ready_) {
    base_ready_ = true;
    durable_step_ = std::max(snapshot.step, synced_step_);
    if (state_ == JournalState::kBuilding) state_ = JournalState::kWhole;
    options_.log(absl::StrCat("job ", options_.job.name, ": its journal is whole from step ",
                              snapshot.step, " on"));
    calls.swap(held_);
  }
  lock->unlock();
  for (const auto& call : calls) call();
  lock->lock();
  changed_.notify_all();
  return absl::OkStatus();
}

}  // namespace shardd::journal

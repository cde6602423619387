#include "server/journal/log_writer.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace shardd::journal {

void FillHeader(const Record& record, const JobIdentity& job, RecordHeader* h) {
  h->magic = kRecordMagic;
  h->version = kJournalVersion;
  h->job_tag = job.job_tag;
  h->timeline = job.timeline;
  h->kind = static_cast<uint32_t>(record.fields.kind);
  h->dtype = record.fields.dtype;
  h->generation = record.fields.generation;
  h->step = record.fields.step;
  h->bucket = record.fields.bucket;
  h->offset = record.fields.offset;
  h->count = record.fields.count;
  h->arrays = record.fields.arrays;
  h->payload_bytes = record.payload_bytes;
  h->piece_bytes = PieceBytes(record.payload_bytes, record.unit);
  const uint64_t padded = h->padded_bytes();
  h->pieces = static_cast<uint32_t>((padded + h->piece_bytes - 1) / h->piece_bytes);
  std::memset(h->reserved, 0, sizeof(h->reserved));
  std::memset(h->piece_crc, 0, sizeof(h->piece_crc));
  for (uint32_t p = 0; p < h->pieces; ++p) {
    const uint64_t at = p * h->piece_bytes;
    h->piece_crc[p] = PieceCrc(record.payload + at, std::min(h->piece_bytes, padded - at));
  }
  h->header_crc = PageCrc(h, &h->header_crc);
}

LogWriter::LogWriter(env::FileSystem* files, std::string directory, JobIdentity job,
                     uint64_t segment_bytes, LogEnd end)
    : files_(files),
      directory_(std::move(directory)),
      job_(std::move(job)),
      segment_bytes_(segment_bytes),
      live_(end.live.begin(), end.live.end()),
      free_(std::move(end.free)),
      discard_(std::move(end.discard)),
      next_lsn_(end.next_lsn),
      durable_lsn_(end.next_lsn - 1),
      next_epoch_(end.next_epoch) {}

uint64_t LogWriter::NewSlot() const {
  uint64_t slot = 0;
  for (const LiveSegment& segment : live_) slot = std::max(slot, segment.slot + 1);
  for (uint64_t free : free_) slot = std::max(slot, free + 1);
  return slot;
}

absl::StatusOr<std::unique_ptr<env::File>> LogWriter::MakeFile(uint64_t slot, uint64_t bytes) {
  // It has its name when it has its length: a shorter one was damaged.
  const std::string path = env::JoinPath(directory_, SegmentName(slot));
  const std::string building = path + ".new";
  absl::StatusOr<std::unique_ptr<env::File>> file =
      files_->Open(building, {.mode = env::OpenMode::kCreateOrEmpty, .direct = true});
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->Preallocate(bytes);
  if (status.ok()) status = (*file)->Sync();
  file->reset();
  if (status.ok()) status = files_->Rename(building, path);
  if (!status.ok()) {
    (void)files_->Remove(building);
    return status;
  }
  if (status = files_->SyncDirectory(directory_); !status.ok()) return status;
  return files_->Open(path, {.mode = env::OpenMode::kReadWrite, .direct = true});
}

absl::Status LogWriter::Preallocate(size_t count) {
  while (free_.size() < count) {
    const uint64_t slot = NewSlot();
    absl::StatusOr<std::unique_ptr<env::File>> file = MakeFile(slot, segment_bytes_);
    if (!file.ok()) return file.status();
    free_.push_back(slot);
  }
  return absl::OkStatus();
}

absl::Status LogWriter::Discard() {
  for (; !discard_.empty(); discard_.pop_back()) {
    absl::StatusOr<std::unique_ptr<env::File>> file =
        files_->Open(env::JoinPath(directory_, SegmentName(discard_.back())),
                     {.mode = env::OpenMode::kReadWrite, .direct = true});
    if (!file.ok()) return file.status();
    std::memset(page_.data(), 0, kPageBytes);
    if (absl::Status s = (*file)->WriteAt(0, page_.span()); !s.ok()) return s;
    if (absl::Status s = (*file)->Sync(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

void LogWriter::StartOver(bool gap) {
  file_.reset();
  if (gap) {
    // Past every LSN that an earlier snapshot can name.
    durable_lsn_ = next_lsn_++;
    gap_ = true;
  } else {
    next_lsn_ = durable_lsn_ + 1;
  }
  // A segment without a durable record is not needed.
  while (!live_.empty() && live_.back().first_lsn >= next_lsn_) {
    free_.push_back(live_.back().slot);
    live_.pop_back();
  }
}

absl::Status LogWriter::BeginSegment(uint64_t least_bytes) {
  file_.reset();
  const uint64_t bytes = std::max(segment_bytes_, least_bytes);
  uint64_t slot = 0;
  std::unique_ptr<env::File> file;
  if (!free_.empty() && bytes == segment_bytes_) {
    slot = free_.front();
    absl::StatusOr<std::unique_ptr<env::File>> opened =
        files_->Open(env::JoinPath(directory_, SegmentName(slot)),
                     {.mode = env::OpenMode::kReadWrite, .direct = true});
    if (!opened.ok()) return opened.status();
    file = *std::move(opened);
    // It may be of a time when segments were smaller.
    if (absl::Status status = file->Preallocate(bytes); !status.ok()) return status;
  } else {
    slot = NewSlot();
    absl::StatusOr<std::unique_ptr<env::File>> made = MakeFile(slot, bytes);
    if (!made.ok()) return made.status();
    file = *std::move(made);
    free_.insert(free_.begin(), slot);
  }
  absl::StatusOr<uint64_t> size = file->Size();
  if (!size.ok()) return size.status();
  std::memset(page_.data(), 0, kPageBytes);
  auto* header = page_.as<SegmentHeader>();
  header->magic = kSegmentMagic;
  header->version = kJournalVersion;
  header->job_tag = job_.job_tag;
  header->timeline = job_.timeline;
  header->epoch = next_epoch_;
  header->nonce = nonce_ = RandomNonce();
  header->first_lsn = next_lsn_;
  header->durable_lsn = durable_lsn_;
  header->gap = gap_ ? 1 : 0;
  header->file_bytes = *size;
  header->crc = PageCrc(header, &header->crc);
  // From here on the file counts as used, whatever becomes of the write.
  free_.erase(free_.begin());
  live_.push_back({slot, next_epoch_, next_lsn_, kPageBytes});
  ++next_epoch_;
  if (absl::Status status = file->WriteAt(0, page_.span()); !status.ok()) return status;
  capacity_ = *size;
  offset_ = kPageBytes;
  bytes_written_ += kPageBytes;
  file_ = std::move(file);
  return absl::OkStatus();
}

bool LogWriter::NeedsSegment(const Record& record) const {
  return file_ == nullptr ||
         offset_ + kPageBytes + env::RoundUpToPage(record.payload_bytes) > capacity_;
}

absl::Status LogWriter::Append(const Record& record) {
  const uint64_t padded = env::RoundUpToPage(record.payload_bytes);
  if (NeedsSegment(record)) {
    // A segment is begun only when all before it is durable.
    if (file_ != nullptr) {
      if (absl::Status status = Sync(); !status.ok()) return status;
    }
    if (absl::Status status = BeginSegment(2 * kPageBytes + padded); !status.ok()) return status;
  }
  auto* header = page_.as<RecordHeader>();
  header->epoch = live_.back().epoch;
  header->nonce = nonce_;
  header->lsn = next_lsn_;
  header->durable_lsn = durable_lsn_;
  FillHeader(record, job_, header);
  const std::array<std::span<const std::byte>, 2> parts = {
      std::span<const std::byte>(page_.data(), kPageBytes),
      std::span<const std::byte>(record.payload, padded)};
  if (absl::Status status = file_->WriteAt(offset_, parts); !status.ok()) return status;
  offset_ += kPageBytes + padded;
  bytes_written_ += kPageBytes + padded;
  live_.back().bytes = offset_;
  ++next_lsn_;
  return absl::OkStatus();
}

absl::Status LogWriter::Sync() {
  if (file_ == nullptr || synced()) return absl::OkStatus();
  if (absl::Status status = file_->Sync(); !status.ok()) return status;
  durable_lsn_ = next_lsn_ - 1;
  gap_ = false;
  return absl::OkStatus();
}

void LogWriter::Free(uint64_t lsn) {
  // The last one may be the current one; the one after a segment says where it ends.
  while (live_.size() > 1 && live_[1].first_lsn <= lsn) {
    free_.push_back(live_.front().slot);
    live_.pop_front();
  }
}

uint64_t LogWriter::live_bytes() const {
  uint64_t bytes = 0;
  for (const LiveSegment& segment : live_) bytes += segment.bytes;
  return bytes;
}

}  // namespace shardd::journal

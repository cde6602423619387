#include "server/journal/snapshot_file.h"

#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/journal/log_reader.h"

namespace shardd::journal {

namespace {

constexpr uint64_t kBatchBytes = 8 << 20;
constexpr size_t kDepth = 3;

absl::StatusOr<std::unique_ptr<env::File>> OpenFile(env::FileSystem* files,
                                                    const std::string& directory, uint64_t slot,
                                                    uint64_t bytes) {
  const std::string path = env::JoinPath(directory, SnapshotName(slot));
  const bool exists = files->Stat(path).ok();
  absl::StatusOr<std::unique_ptr<env::File>> file = files->Open(
      path, {.mode = exists ? env::OpenMode::kReadWrite : env::OpenMode::kCreate, .direct = true});
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->Preallocate(bytes);
  if (status.ok() && !exists) {
    status = (*file)->Sync();
    if (status.ok()) status = files->SyncDirectory(directory);
  }
  if (status.ok()) return file;
  if (!exists) {
    file->reset();
    (void)files->Remove(path);
  }
  return status;
}

}  // namespace

absl::Status PreallocateSnapshot(env::FileSystem* files, const std::string& directory,
                                 uint64_t slot, uint64_t bytes) {
  return OpenFile(files, directory, slot, bytes).status();
}

SnapshotWriter::SnapshotWriter(std::unique_ptr<env::File> file, uint64_t slot,
                               const JobIdentity& job, uint64_t number)
    : file_(std::move(file)), slot_(slot), job_(job), number_(number), nonce_(RandomNonce()) {}

absl::StatusOr<std::unique_ptr<SnapshotWriter>> SnapshotWriter::Create(
    env::FileSystem* files, const std::string& directory, uint64_t slot, uint64_t bytes,
    const JobIdentity& job, uint64_t number) {
  absl::StatusOr<std::unique_ptr<env::File>> file = OpenFile(files, directory, slot, bytes);
  if (!file.ok()) return file.status();
  return std::unique_ptr<SnapshotWriter>(new SnapshotWriter(*std::move(file), slot, job, number));
}

absl::Status SnapshotWriter::Add(const Record& record) {
  auto* header = page_.as<RecordHeader>();
  header->epoch = number_;
  header->nonce = nonce_;
  header->lsn = offsets_.size() + 1;
  header->durable_lsn = 0;
  FillHeader(record, job_, header);
  const std::array<std::span<const std::byte>, 2> parts = {
      std::span<const std::byte>(page_.data(), kPageBytes),
      std::span<const std::byte>(record.payload, header->padded_bytes())};
  if (absl::Status status = file_->WriteAt(offset_, parts); !status.ok()) return status;
  offsets_.push_back(offset_);
  offset_ += kPageBytes + header->padded_bytes();
  return absl::OkStatus();
}

absl::StatusOr<ManifestSnapshot> SnapshotWriter::Finish() {
  env::AlignedBuffer places(offsets_.size() * sizeof(uint64_t));
  std::memcpy(places.data(), offsets_.data(), offsets_.size() * sizeof(uint64_t));
  Record end;
  end.fields.kind = RecordKind::kEnd;
  end.fields.bucket = offsets_.size();
  // Where END lies goes with the manifest: the file's bytes less what END takes.
  end.payload = places.data();
  end.payload_bytes = offsets_.size() * sizeof(uint64_t);
  if (absl::Status status = Add(end); !status.ok()) return status;
  if (absl::Status status = file_->Sync(); !status.ok()) return status;
  ManifestSnapshot snapshot{};
  snapshot.slot = slot_;
  snapshot.number = number_;
  snapshot.nonce = nonce_;
  snapshot.records = offsets_.size();
  snapshot.bytes = offset_;
  return snapshot;
}

SnapshotReader::SnapshotReader(std::unique_ptr<env::File> file, const JobIdentity& job,
                               const ManifestSnapshot& snapshot)
    : file_(std::move(file)), job_(job), snapshot_(snapshot) {}

absl::StatusOr<std::unique_ptr<SnapshotReader>> SnapshotReader::Open(
    env::FileSystem* files, const std::string& directory, const JobIdentity& job,
    const ManifestSnapshot& snapshot) {
  const std::string path = env::JoinPath(directory, SnapshotName(snapshot.slot));
  absl::StatusOr<std::unique_ptr<env::File>> file = files->Open(path, {.direct = true});
  if (!file.ok()) return file.status();
  std::unique_ptr<SnapshotReader> reader(new SnapshotReader(*std::move(file), job, snapshot));
  if (absl::Status status = reader->ReadEnds(); !status.ok()) return status;
  reader->PlanBatches();
  return reader;
}

absl::Status SnapshotReader::CheckHeader(const RecordHeader& h, uint64_t lsn,
                                         uint64_t offset) const {
  const std::string what = PlaceName(*file_, offset);
  if (absl::Status status = CheckRecordHeader(h, job_, what); !status.ok()) return status;
  if (h.nonce != snapshot_.nonce || h.epoch != snapshot_.number || h.lsn != lsn) {
    return absl::DataLossError(
        absl::StrCat(what, " is not record ", lsn, " of snapshot ", snapshot_.number));
  }
  return absl::OkStatus();
}

absl::StatusOr<env::AlignedBuffer> SnapshotReader::ReadWhole(uint64_t offset, uint64_t lsn,
                                                             RecordKind kind) {
  const std::string what = PlaceName(*file_, offset);
  env::AlignedBuffer page(kPageBytes);
  absl::StatusOr<size_t> n = file_->ReadAt(offset, page.span());
  if (!n.ok()) return n.status();
  if (*n < kPageBytes) return absl::DataLossError(what + " is cut short");
  const auto* header = page.as<RecordHeader>();
  if (absl::Status status = CheckHeader(*header, lsn, offset); !status.ok()) return status;
  if (header->kind != static_cast<uint32_t>(kind) ||
      header->padded_bytes() > snapshot_.bytes - offset) {
    return absl::DataLossError(what + " says sizes that do not fit");
  }
  env::AlignedBuffer whole(kPageBytes + header->padded_bytes());
  n = file_->ReadAt(offset, whole.span());
  if (!n.ok()) return n.status();
  if (*n < whole.size()) return absl::DataLossError(what + " is cut short");
  absl::Status status =
      CheckPieces(*whole.as<RecordHeader>(), 0, whole.span().subspan(kPageBytes), what);
  if (!status.ok()) return status;
  return whole;
}

absl::Status SnapshotReader::ReadEnds() {
  absl::StatusOr<uint64_t> size = file_->Size();
  if (!size.ok()) return size.status();
  if (snapshot_.bytes > *size || snapshot_.records < 2 ||
      snapshot_.records > snapshot_.bytes / kPageBytes) {
    return absl::DataLossError(absl::StrCat(file_->path(), " has ", *size, " bytes, too few for ",
                                            snapshot_.records, " records in ", snapshot_.bytes));
  }
  const uint64_t places = (snapshot_.records - 1) * sizeof(uint64_t);
  const uint64_t end_bytes = kPageBytes + env::RoundUpToPage(places);
  if (snapshot_.bytes < end_bytes) {
    return absl::DataLossError(absl::StrCat(file_->path(), " is too short for a snapshot"));
  }
  end_offset_ = snapshot_.bytes - end_bytes;
  absl::StatusOr<env::AlignedBuffer> end =
      ReadWhole(end_offset_, snapshot_.records, RecordKind::kEnd);
  if (!end.ok()) return end.status();
  if (end->as<RecordHeader>()->payload_bytes != places) {
    return absl::DataLossError(PlaceName(*file_, end_offset_) + " says sizes that do not fit");
  }
  offsets_.resize(snapshot_.records - 1);
  std::memcpy(offsets_.data(), end->data() + kPageBytes, places);
  absl::StatusOr<env::AlignedBuffer> image = ReadWhole(0, 1, RecordKind::kImage);
  if (!image.ok()) return image.status();
  image_ = *std::move(image);
  // IMAGE, chunks and END follow each other, whole pages each.
  uint64_t least = image_.size();
  bool ordered = offsets_[0] == 0;
  for (size_t i = 1; ordered && i < offsets_.size(); ++i) {
    ordered = offsets_[i] >= least && offsets_[i] % kPageBytes == 0 && offsets_[i] < end_offset_;
    least = offsets_[i] + kPageBytes;
  }
  if (!ordered || least > end_offset_) {
    return absl::DataLossError(PlaceName(*file_, end_offset_) +
                               " says where records lie that cannot lie there");
  }
  return absl::OkStatus();
}

void SnapshotReader::PlanBatches() {
  std::vector<Extent> extents;
  size_t first = 1;
  batches_ = {first};
  for (size_t i = 1; i < offsets_.size(); ++i) {
    const uint64_t next = i + 1 < offsets_.size() ? offsets_[i + 1] : end_offset_;
    const bool last = i + 1 == offsets_.size();
    const uint64_t after = last ? 0 : (i + 2 < offsets_.size() ? offsets_[i + 2] : end_offset_);
    if (!last && after - offsets_[first] <= kBatchBytes) continue;
    extents.push_back({file_.get(), offsets_[first], next - offsets_[first]});
    first = i + 1;
    batches_.push_back(first);
  }
  ahead_ = std::make_unique<ReadAhead>(std::move(extents), kDepth);
}

absl::StatusOr<std::vector<ChunkBytes>> SnapshotReader::NextBatch() {
  std::vector<ChunkBytes> chunks;
  if (next_batch_ + 1 >= batches_.size()) return chunks;
  absl::StatusOr<std::span<const std::byte>> bytes = ahead_->Next();
  if (!bytes.ok()) return bytes.status();
  const size_t first = batches_[next_batch_], last = batches_[next_batch_ + 1];
  ++next_batch_;
  for (size_t i = first; i < last; ++i) {
    const uint64_t next = i + 1 < offsets_.size() ? offsets_[i + 1] : end_offset_;
    const uint64_t at = offsets_[i] - offsets_[first];
    ChunkBytes chunk;
    chunk.header = reinterpret_cast<const RecordHeader*>(bytes->data() + at);
    chunk.payload = bytes->subspan(at + kPageBytes, next - offsets_[i] - kPageBytes);
    chunk.offset = offsets_[i];
    chunks.push_back(chunk);
  }
  return chunks;
}

absl::Status SnapshotReader::Check(const ChunkBytes& chunk, uint64_t index, uint64_t number) const {
  const RecordHeader& h = *chunk.header;
  if (absl::Status s = CheckHeader(h, index + 2, chunk.offset); !s.ok()) return s;
  const std::string what = PlaceName(*file_, chunk.offset);
  if (h.kind != static_cast<uint32_t>(RecordKind::kChunk) || h.bucket != number ||
      h.padded_bytes() != chunk.payload.size() ||
      h.payload_bytes != h.count * h.arrays * sizeof(float)) {
    return absl::DataLossError(what + " says sizes that do not fit");
  }
  return CheckPieces(h, 0, chunk.payload, what);
}

}  // namespace shardd::journal

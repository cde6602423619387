// A snapshot of a job in one file: IMAGE, a CHUNK per chunk, END.
#ifndef SHARDD_SERVER_JOURNAL_SNAPSHOT_FILE_H_
#define SHARDD_SERVER_JOURNAL_SNAPSHOT_FILE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/env/aligned_buffer.h"
#include "server/env/file_system.h"
#include "server/journal/format.h"
#include "server/journal/log_writer.h"
#include "server/journal/read_ahead.h"

namespace shardd::journal {

// One thread.
class SnapshotWriter {
 public:
  // Overwrites the file of `slot` in `directory`, making it (`bytes` long at least) if it is
  // missing. `number` is the snapshot's.
  static absl::StatusOr<std::unique_ptr<SnapshotWriter>> Create(env::FileSystem* files,
                                                                const std::string& directory,
                                                                uint64_t slot, uint64_t bytes,
                                                                const JobIdentity& job,
                                                                uint64_t number);
  // First IMAGE, then the chunks in order. The payload as for LogWriter::Append.
  absl::Status Add(const Record& record);
  // Writes END and makes all of it durable. `step` and `redo_lsn` are the caller's to fill in.
  absl::StatusOr<ManifestSnapshot> Finish();
  uint64_t bytes() const { return offset_; }

 private:
  SnapshotWriter(std::unique_ptr<env::File> file, uint64_t slot, const JobIdentity& job,
                 uint64_t number);

  std::unique_ptr<env::File> file_;
  const uint64_t slot_;
  const JobIdentity job_;
  const uint64_t number_;
  const uint64_t nonce_;
  std::vector<uint64_t> offsets_;
  uint64_t offset_ = 0;
  env::AlignedBuffer page_{kPageBytes};
};

// Makes the file that a snapshot of `bytes` will need, durable under its name.
absl::Status PreallocateSnapshot(env::FileSystem* files, const std::string& directory,
                                 uint64_t slot, uint64_t bytes);

// A chunk as it lies in the file; not checked yet.
struct ChunkBytes {
  const RecordHeader* header = nullptr;
  std::span<const std::byte> payload;
  uint64_t offset = 0;  // of the header in the file
};

class SnapshotReader {
 public:
  // Opens the snapshot and reads its ends. DataLoss names file and offset of what is damaged.
  static absl::StatusOr<std::unique_ptr<SnapshotReader>> Open(env::FileSystem* files,
                                                              const std::string& directory,
                                                              const JobIdentity& job,
                                                              const ManifestSnapshot& snapshot);
  // The image of the job segment, and its length.
  const std::byte* image() const { return image_.data() + kPageBytes; }
  uint64_t image_bytes() const { return image_.as<RecordHeader>()->payload_bytes; }
  uint64_t chunks() const { return offsets_.size() - 1; }
  uint64_t bytes() const { return snapshot_.bytes; }

  // Chunks in order, some at a time, read ahead; empty after the last. Valid until the next call.
  absl::StatusOr<std::vector<ChunkBytes>> NextBatch();
  // Whether `chunk` is whole, is the `index`th of this snapshot, and number `number` of its job.
  // Any thread.
  absl::Status Check(const ChunkBytes& chunk, uint64_t index, uint64_t number) const;

 private:
  SnapshotReader(std::unique_ptr<env::File> file, const JobIdentity& job,
                 const ManifestSnapshot& snapshot);
  absl::Status ReadEnds();
  absl::Status CheckHeader(const RecordHeader& header, uint64_t lsn, uint64_t offset) const;
  absl::StatusOr<env::AlignedBuffer> ReadWhole(uint64_t offset, uint64_t lsn, RecordKind kind);
  void PlanBatches();

  std::unique_ptr<env::File> file_;
  const JobIdentity job_;
  const ManifestSnapshot snapshot_;
  env::AlignedBuffer image_;
  std::vector<uint64_t> offsets_;  // of IMAGE and chunks
  uint64_t end_offset_ = 0;        // of END
  std::vector<size_t> batches_;    // batch i is offsets_[batches_[i]] up to offsets_[batches_[i+1]]
  size_t next_batch_ = 0;
  std::unique_ptr<ReadAhead> ahead_;
};

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_SNAPSHOT_FILE_H_

// Writes the log of one job: segments in files that are used again, records in them.
#ifndef SHARDD_SERVER_JOURNAL_LOG_WRITER_H_
#define SHARDD_SERVER_JOURNAL_LOG_WRITER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/env/aligned_buffer.h"
#include "server/env/file_system.h"
#include "server/journal/format.h"

namespace shardd::journal {

// A file that holds records which may still be needed.
struct LiveSegment {
  uint64_t slot = 0;
  uint64_t epoch = 0;
  uint64_t first_lsn = 0;
  uint64_t bytes = 0;  // that are in use
};

// Where a log goes on.
struct LogEnd {
  uint64_t next_lsn = 1;
  uint64_t next_epoch = 1;
  std::vector<LiveSegment> live;  // ascending
  std::vector<uint64_t> free;     // slots whose files are there and not needed
  // Of these, what is newer than the log's end: a log that was begun after a gap and never
  // counted. Their headers must go before the log goes on.
  std::vector<uint64_t> discard;
};

// What is appended. The payload lies at a multiple of 4096 in memory and is readable up to the
// next multiple of 4096 after its end.
struct Record {
  RecordFields fields;
  const std::byte* payload = nullptr;
  uint64_t payload_bytes = 0;
  uint64_t unit = kPageBytes;  // pieces are a multiple of it
};

// One thread.
class LogWriter {
 public:
  LogWriter(env::FileSystem* files, std::string directory, JobIdentity job, uint64_t segment_bytes,
            LogEnd end);

  // Makes files until `count` are free, durable under their names. Needs no segment.
  absl::Status Preallocate(size_t count);
  // Empties the headers of LogEnd::discard, durably. Before the first Append.
  absl::Status Discard();
  // The next record goes into a new segment that begins with `next_lsn`. What is not durable is
  // given up: after a failure, or (gap) when the log does not continue.
  void StartOver(bool gap);
  // Writes one record. Begins a new segment when this one is full, after making it durable. After
  // an error only StartOver may be called.
  absl::Status Append(const Record& record);
  // All that was appended is durable.
  absl::Status Sync();
  // Segments wholly before `lsn` are free; call it when nothing durable refers to them.
  void Free(uint64_t lsn);

  uint64_t next_lsn() const { return next_lsn_; }
  uint64_t durable_lsn() const { return durable_lsn_; }
  bool synced() const { return durable_lsn_ + 1 == next_lsn_; }
  // Bytes of the segments that are needed.
  uint64_t live_bytes() const;
  size_t live_segments() const { return live_.size(); }
  size_t free_segments() const { return free_.size(); }
  // Whether `record` needs a new segment.
  bool NeedsSegment(const Record& record) const;
  uint64_t bytes_written() const { return bytes_written_; }
  // Whether the current file goes around the page cache.
  bool direct() const { return file_ != nullptr && file_->direct(); }

 private:
  absl::Status BeginSegment(uint64_t least_bytes);
  absl::StatusOr<std::unique_ptr<env::File>> MakeFile(uint64_t slot, uint64_t bytes);
  uint64_t NewSlot() const;
  void Seal(const Record& record);

  env::FileSystem* files_;
  const std::string directory_;
  const JobIdentity job_;
  const uint64_t segment_bytes_;
  std::deque<LiveSegment> live_;
  std::vector<uint64_t> free_;
  std::vector<uint64_t> discard_;
  uint64_t next_lsn_;
  uint64_t durable_lsn_;
  uint64_t next_epoch_;
  bool gap_ = false;
  // The current segment; null: the next Append begins one.
  std::unique_ptr<env::File> file_;
  uint64_t nonce_ = 0;
  uint64_t offset_ = 0;
  uint64_t capacity_ = 0;
  uint64_t bytes_written_ = 0;
  env::AlignedBuffer page_{kPageBytes};
};

// Fills in and seals a record's header page; `lsn`, `epoch`, `nonce` and `durable_lsn` are the
// caller's.
void FillHeader(const Record& record, const JobIdentity& job, RecordHeader* header);

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_LOG_WRITER_H_

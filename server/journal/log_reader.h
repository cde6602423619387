// Finds what counts in a log: the segments, the records, and where it ends.
#ifndef SHARDD_SERVER_JOURNAL_LOG_READER_H_
#define SHARDD_SERVER_JOURNAL_LOG_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/env/aligned_buffer.h"
#include "server/env/file_system.h"
#include "server/journal/format.h"
#include "server/journal/log_writer.h"

namespace shardd::journal {

// A record whose header page is whole. Its payload is not, unless its LSN is above what is known
// to be durable.
struct RecordPlace {
  size_t segment = 0;   // index into LogIndex::files
  uint64_t offset = 0;  // of the header page
  uint64_t padded_bytes = 0;
  uint64_t piece_bytes = 0;
  uint64_t lsn = 0;
  RecordFields fields;
  uint64_t payload_bytes = 0;
};

struct LogIndex {
  std::vector<std::unique_ptr<env::File>> files;  // of the segments that count
  std::vector<RecordPlace> records;               // from redo_lsn on, ascending
  LogEnd end;                                     // where a writer goes on
  std::string cut;                                // where a torn tail was cut; empty: nowhere
};

// Reads all headers of the log in `directory`, and the payloads that are above the durable LSN.
// DataLoss names file and offset of what is damaged at or below the durable LSN.
struct LogRange {
  uint64_t keep_lsn = 1;     // segments that end before it are free
  uint64_t redo_lsn = 1;     // the first record that counts; >= keep_lsn
  uint64_t durable_lsn = 0;  // what the manifest tells
  // Only the process that wrote the log died, so that what it wrote is there: gradients are not
  // read, and those after the last decision are left out, since the last may not be whole.
  bool machine_lived = false;
};
absl::StatusOr<LogIndex> ReadLog(env::FileSystem* files, const std::string& directory,
                                 const JobIdentity& job, const LogRange& range);

// Reads a record whole: header page and payload, checked.
absl::StatusOr<env::AlignedBuffer> ReadRecord(const LogIndex& log, const RecordPlace& place,
                                              const JobIdentity& job);

// The step that a log leads to, from a snapshot of `snapshot_step` on.
uint64_t LastStep(const LogIndex& log, uint64_t snapshot_step);

// "FILE at OFFSET", for messages.
std::string PlaceName(const env::File& file, uint64_t offset);

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_LOG_READER_H_

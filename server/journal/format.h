// The files of docs/journal_format.md, byte for byte.
#ifndef SHARDD_SERVER_JOURNAL_FORMAT_H_
#define SHARDD_SERVER_JOURNAL_FORMAT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace shardd::journal {

inline constexpr uint32_t kJournalVersion = 1;
inline constexpr size_t kPageBytes = 4096;
// Who else holds parts of the job, of one that spans daemons; its owner's to write and read.
inline constexpr char kPeersName[] = "PEERS";
inline constexpr size_t kMaxPieces = 960;
inline constexpr size_t kMaxSnapshots = 16;
inline constexpr uint64_t kMaxSlot = (uint64_t{1} << 31) - 1;

inline constexpr uint64_t kSegmentMagic = 0x316c'6464'7261'6873;   // "shardd" "l1"
inline constexpr uint64_t kRecordMagic = 0x3165'6464'7261'6873;    // "shardd" "e1"
inline constexpr uint64_t kManifestMagic = 0x316d'6464'7261'6873;  // "shardd" "m1"

enum class RecordKind : uint32_t {
  kGradient = 1,
  kDecision = 2,
  kState = 3,
  kImage = 16,
  kChunk = 17,
  kEnd = 18,
};

// Which job's files these are.
struct JobIdentity {
  std::string name;
  uint64_t job_tag = 0;
  uint64_t timeline = 0;
};

struct SegmentHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t crc;  // of the page with this field 0
  uint64_t job_tag;
  uint64_t timeline;
  uint64_t epoch;  // from 1
  uint64_t nonce;
  uint64_t first_lsn;
  uint64_t durable_lsn;
  uint64_t gap;         // 1: does not continue the segment before it
  uint64_t file_bytes;  // what the file has at least
};

// What a record says of its payload.
struct RecordFields {
  RecordKind kind = RecordKind::kState;
  uint64_t generation = 0;
  uint64_t step = 0;    // CHUNK: the applied steps that it carries
  uint64_t bucket = 0;  // CHUNK: the chunk; END: how many records there were
  uint64_t offset = 0;  // GRADIENT: the element of the bucket with which it begins
  uint32_t dtype = 0;   // GRADIENT
  uint32_t arrays = 0;  // CHUNK: master, then moments, of `count` fp32 each
  uint64_t count = 0;   // elements
};

struct RecordHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t header_crc;  // of the page with this field 0
  uint64_t job_tag;
  uint64_t timeline;
  uint64_t epoch;
  uint64_t nonce;
  uint64_t lsn;
  uint64_t durable_lsn;
  uint32_t kind;
  uint32_t dtype;
  uint64_t generation;
  uint64_t step;
  uint64_t bucket;
  uint64_t count;
  uint64_t payload_bytes;  // without padding
  uint64_t piece_bytes;    // a multiple of 4096
  uint32_t pieces;
  uint32_t arrays;
  uint64_t offset;
  uint64_t reserved[15];
  uint32_t piece_crc[kMaxPieces];

  uint64_t padded_bytes() const {
    return (payload_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  RecordFields fields() const {
    return {static_cast<RecordKind>(kind), generation, step, bucket, offset, dtype, arrays, count};
  }
};
static_assert(sizeof(RecordHeader) == kPageBytes);

struct ManifestSnapshot {
  uint64_t slot;     // file snapshot-SLOT
  uint64_t number;   // ascending over the life of the job
  uint64_t nonce;    // of its records
  uint64_t records;  // with IMAGE and END
  uint64_t bytes;    // of the file that count
  uint64_t step;     // committed when it began
  uint64_t redo_lsn;
  uint64_t reserved;
};

struct ManifestPage {
  uint64_t magic;
  uint32_t version;
  uint32_t crc;  // of the page with this field 0
  uint64_t job_tag;
  uint64_t timeline;
  uint64_t durable_lsn;
  uint64_t snapshots;  // oldest first; 0: the first one is not complete
  char name[72];
  ManifestSnapshot snapshot[kMaxSnapshots];
  std::byte reserved[kPageBytes - 120 - kMaxSnapshots * sizeof(ManifestSnapshot)];
};
static_assert(sizeof(ManifestPage) == kPageBytes);

// CRC32C of the page at `page` with the four bytes at `crc` taken as 0.
uint32_t PageCrc(const void* page, const uint32_t* crc);
uint32_t PieceCrc(const std::byte* data, size_t bytes);

// Why a page is no header of this job, or OK. `what` names file and offset.
absl::Status CheckSegmentHeader(const SegmentHeader& header, const JobIdentity& job,
                                const std::string& what);
// Magic, version, CRC, identity and the sizes; the caller compares epoch, nonce and LSN.
absl::Status CheckRecordHeader(const RecordHeader& header, const JobIdentity& job,
                               const std::string& what);
// Of pieces [first, first + n) whose bytes `data` holds.
absl::Status CheckPieces(const RecordHeader& header, size_t first, std::span<const std::byte> data,
                         const std::string& what);

// How a payload is cut: `unit` (a multiple of 4096) times the least number that needs no more than
// kMaxPieces.
uint64_t PieceBytes(uint64_t payload_bytes, uint64_t unit);

// "log-3", "snapshot-0".
std::string SegmentName(uint64_t slot);
std::string SnapshotName(uint64_t slot);
// The slot in a name of that kind; -1 for other names.
int64_t SlotOf(const std::string& name, const std::string& prefix);

// From the system; never 0.
uint64_t RandomNonce();

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_FORMAT_H_

// The shared-memory structures of docs/formats/segments.md, byte for byte.
//
// Everything is little-endian. Fields that another process reads while they are
// written are accessed with std::atomic_ref by both sides. Whoever reads a
// structure that another process wrote copies it first, then checks the copy.
#ifndef SHARDD_PROTO_CONTRACT_SEGMENTS_H_
#define SHARDD_PROTO_CONTRACT_SEGMENTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shardd::contract {

inline constexpr uint32_t kFormatVersion = 1;
// Of the job segment of a job whose state is not fp32 throughout: what knows
// fp32 alone must not read it.
inline constexpr uint32_t kStateFormatVersion = 2;
inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr uint32_t kOldestProtocolVersion = 1;

inline constexpr uint64_t kWeightsMagic = 0x3177'6464'7261'6873;  // "shardd" "w1"
inline constexpr uint64_t kRingMagic = 0x3172'6464'7261'6873;     // "shardd" "r1"
inline constexpr uint64_t kJobMagic = 0x316a'6464'7261'6873;      // "shardd" "j1"
inline constexpr uint64_t kReducedMagic = 0x3164'6464'7261'6873;  // "shardd" "d1"
inline constexpr uint64_t kChunkMagic = 0x3163'6464'7261'6873;    // "shardd" "c1"

inline constexpr size_t kSegmentPage = 4096;
inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kMaxBlobBytes = 1 << 20;
inline constexpr uint64_t kStepRecords = 1024;
inline constexpr size_t kBoardGroups = 64;

constexpr uint64_t RoundUpTo(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// ---------------------------------------------------------------------------
// Weights segment: written by the daemon, read-only for every worker.
//   page 0                      WeightsHeader
//   page 1                      Board
//   bucket_lines_offset         BucketLine  [buckets]
//   session_lines_offset        SessionLine [session_lines]
//   weights_offset (4 KiB)      weights [flat_elements] of weight_dtype
// ---------------------------------------------------------------------------

struct WeightsHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t weight_dtype;
  uint64_t job_tag;
  uint64_t timeline;
  uint64_t layout_hash;
  uint64_t flat_elements;
  uint64_t buckets;
  uint64_t session_lines;
  uint64_t bucket_lines_offset;
  uint64_t session_lines_offset;
  uint64_t weights_offset;
  uint64_t total_bytes;
};

enum class BoardState : uint32_t {
  kInitialising = 1,  // elements are missing
  kReady = 2,
  kFailed = 3,  // the job ended; the reason is in Board::failure
  kDeleted = 4,
};

// The last decision, as workers need it. A worker that takes part in a step sees
// every decision: the next one needs its EndStep.
struct Board {
  // Futex word is the low half. Changes whenever anything on the board, a bucket
  // line or a session line that a sleeper may wait for has changed.
  alignas(64) std::atomic<uint64_t> event;
  std::atomic<uint32_t> sleepers_hint;  // unused by the daemon; kept zero
  std::atomic<uint32_t> state;          // BoardState
  // 1 while the job's thread sleeps: after writing a descriptor (then a full
  // fence) a worker that reads 1 rings the doorbell.
  alignas(64) std::atomic<uint32_t> daemon_sleeps;
  // The generation being formed or running; a worker whose own differs Joins again.
  alignas(64) std::atomic<uint64_t> generation;
  // Sequence lock: odd while the fields below change.
  alignas(64) std::atomic<uint64_t> decision_seq;
  std::atomic<uint64_t> committed_step;
  std::atomic<uint64_t> applied;
  std::atomic<uint32_t> result;  // shardd.v1.StepResult
  std::atomic<uint32_t> reserved;
  std::atomic<double> loss;
  std::atomic<double> grad_norm;
  std::atomic<double> loss_scale;  // for the next step
  std::atomic<double> clip_factor;
  char skip_reason[256];  // NUL-terminated
  char failure[512];      // NUL-terminated, when state is kFailed
  // Of the decision, under decision_seq too: the lr of the first groups; 0 beyond.
  std::atomic<double> lr[kBoardGroups];
};
static_assert(sizeof(Board) <= kSegmentPage);

struct alignas(64) BucketLine {
  // All weights of the bucket carry this step (the decisions committed so far).
  // Written last, after a store fence.
  std::atomic<uint64_t> ready_step;
  uint64_t reserved[7];
};
static_assert(sizeof(BucketLine) == kLineBytes);

enum class SessionState : uint32_t {
  kFree = 0,
  kAttached = 1,
  kRefused = 2,  // ask SessionError
};

struct alignas(64) SessionLine {
  std::atomic<uint64_t> session;  // nonce of the session it belongs to; 0: free
  // How many of its descriptors (in ring order, since the session began) the
  // daemon is done with; their ring space may be used again.
  std::atomic<uint64_t> released;
  std::atomic<uint32_t> state;  // SessionState
  uint32_t reserved0;
  uint64_t reserved[5];
};
static_assert(sizeof(SessionLine) == kLineBytes);

// ---------------------------------------------------------------------------
// Ring: a memfd of one worker, sealed F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// written by that worker, read-only for the daemon.
//   page 0                      RingHeader
//   page 1 ..                   Descriptor [queue_entries], a power of two
//   data_offset (4 KiB)         data_bytes
// ---------------------------------------------------------------------------

struct RingHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t queue_entries;
  uint64_t data_offset;
  uint64_t data_bytes;
  // Descriptors written since the session began. Release store after the descriptor.
  alignas(64) std::atomic<uint64_t> head;
  // Counts up while the worker lives, several times per heartbeat_seconds.
  alignas(64) std::atomic<uint64_t> heartbeat;
};
static_assert(sizeof(RingHeader) <= kSegmentPage);

enum class DescriptorKind : uint8_t {
  kGrad = 1,  // one node of one bucket
  kInit = 2,  // fp32 masters of any range of the flat space
  // Bytes of a frozen parameter: `bucket` is its index, begin and count are bytes.
  kFrozen = 3,
  // fp32 values of moment `bucket` of one parameter, which `step` optimizer steps were applied to.
  // Before the last masters: these make the job complete.
  kMoment = 4,
};

struct alignas(64) Descriptor {
  uint64_t job_tag;
  uint64_t generation;
  uint64_t step;         // kInit: 0
  uint64_t begin;        // first element in the flat space; kGrad: the bucket's first
  uint64_t count;        // elements
  uint64_t data_offset;  // bytes from the start of the data area, a multiple of 64
  uint32_t slot_lo;      // kGrad: the tree node; kInit: 0
  uint32_t slot_hi;
  uint32_t bucket;  // kGrad; kInit: 0
  uint8_t kind;     // DescriptorKind
  uint8_t dtype;    // of the data: a leaf is grad_dtype, a larger node and kInit fp32
  uint16_t reserved;
};
static_assert(sizeof(Descriptor) == 64);

// ---------------------------------------------------------------------------
// State segment: chunk records, daemon only. See docs/formats/segments.md for
// the stagger.
// ---------------------------------------------------------------------------

inline constexpr size_t kChunkHeaderBytes = 4096;
inline constexpr size_t kUndoOffset = 1024;
inline constexpr size_t kUndoBytes = 2 * (64 + 3 * 4 * 64) + 2 * 4 * 64;
static_assert(kUndoOffset + kUndoBytes <= kChunkHeaderBytes);

struct ChunkHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t chunk_elements;
  uint64_t job_tag;
  uint64_t timeline;
  uint64_t chunk;
  // Optimizer steps that all elements carry. Release store after them.
  std::atomic<uint64_t> applied;
  // crc32c of the fields above `applied`.
  uint32_t crc;
  uint32_t reserved;
  // At kUndoOffset: the two undo slots of kernels/undo.h.
};
static_assert(sizeof(ChunkHeader) <= kUndoOffset);

// The arrays of a chunk record.
struct StateShape {
  int moments = 0;
  size_t master_bytes = 4;  // of one element
  size_t moment_bytes = 4;
};

// Byte offsets inside a chunk record. The moments are staggered against the
// master because streams at equal offsets within 4 KiB collide.
constexpr size_t MasterOffset() { return kChunkHeaderBytes; }
constexpr size_t MomentOffset(uint32_t chunk_elements, int moment, const StateShape& shape = {}) {
  const auto m = static_cast<size_t>(moment);
  return kChunkHeaderBytes + chunk_elements * (shape.master_bytes + shape.moment_bytes * m) + 128 +
         256 * m;
}
// Bytes of one chunk record.
constexpr size_t ChunkRecordBytes(uint32_t chunk_elements, const StateShape& shape) {
  const size_t end = shape.moments == 0 ? MasterOffset() + chunk_elements * shape.master_bytes
                                        : MomentOffset(chunk_elements, shape.moments - 1, shape) +
                                              chunk_elements * shape.moment_bytes;
  return RoundUpTo(end, kSegmentPage);
}

// ---------------------------------------------------------------------------
// Reduced segment: daemon only.
//   page 0                      ReducedHeader
//   lines_offset                ReducedLine [buckets]
//   sums_offset                 double [blocks]: sums of squares
//   data_offset (4 KiB)         the tree sum [flat_elements] of dtype
// ---------------------------------------------------------------------------

struct ReducedHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t dtype;  // fp32, or the gradient dtype when slots = 1
  uint64_t job_tag;
  uint64_t timeline;
  uint64_t flat_elements;
  uint64_t buckets;
  uint64_t blocks;
  uint64_t lines_offset;
  uint64_t sums_offset;
  uint64_t data_offset;
  uint64_t total_bytes;
};

struct alignas(64) ReducedLine {
  // The step whose complete sum the bucket holds. 0 while it is written.
  std::atomic<uint64_t> step;
  std::atomic<uint32_t> nonfinite;
  uint32_t reserved0;
  uint64_t reserved[6];
};
static_assert(sizeof(ReducedLine) == kLineBytes);

// ---------------------------------------------------------------------------
// Job segment: daemon only.
//   page 0                      JobHeader
//   config_offset               serialized shardd.v1.JobConfig, config_bytes
//   parameters_offset           serialized shardd.v1.OpenRequest holding `parameters` only
//   table_offset                ParameterEntry [2][parameters]
//   records_offset              StepRecordEntry [kStepRecords]
//   decisions_offset            2 decision slots of decision_bytes each
// ---------------------------------------------------------------------------

// As many as there can be slots.
inline constexpr uint64_t kMaxFinishedRanks = 4096;

struct JobHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t uid;
  char name[72];
  char boot_id[40];
  uint8_t job_id[16];
  uint64_t job_tag;
  uint64_t timeline;
  uint64_t layout_hash;
  uint64_t config_hash;
  uint64_t parameters;
  uint64_t groups;
  uint64_t config_offset;
  uint64_t config_bytes;
  uint64_t parameters_offset;
  uint64_t parameters_bytes;
  uint64_t table_offset;
  uint64_t records_offset;
  uint64_t decisions_offset;
  uint64_t decision_bytes;
  uint64_t total_bytes;
  // 1 once every element has been uploaded.
  alignas(64) std::atomic<uint64_t> initialised;
  // Stored before it is used.
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> recomputed_steps;
  std::atomic<uint64_t> regroups;
  std::atomic<uint64_t> failed;  // 1: `failure` says why the job ended
  char failure[512];
  // Ranks of a group of finished_world_size that closed in good order at finished_step while others
  // had not: bit r % 64 of word r / 64. Hints: they count only at that step.
  std::atomic<uint64_t> finished_world_size;
  std::atomic<uint64_t> finished_step;
  std::atomic<uint64_t> finished[kMaxFinishedRanks / 64];
};
static_assert(sizeof(JobHeader) <= kSegmentPage);

// Per-parameter optimizer progress; copy `decision sequence & 1` is current.
struct alignas(64) ParameterEntry {
  uint64_t applied;
  double beta1_product;
  double beta2_product;
  float scalars[8];
  uint64_t reserved;
};
static_assert(sizeof(ParameterEntry) == kLineBytes);

struct alignas(64) StepRecordEntry {
  uint64_t step;  // 0: empty
  uint64_t applied;
  uint64_t generation;
  uint32_t result;
  uint32_t reserved0;
  double loss;
  double grad_norm;
  double loss_scale;
  double lr;
  uint64_t tokens;
  int64_t unix_nanos;
  char reason[176];  // NUL-terminated
};
static_assert(sizeof(StepRecordEntry) == 256);

// One of the two decision slots: this header, then presence bits
// [(parameters + 63) / 64] u64, then DecisionGroup [groups], then the blob.
struct DecisionHeader {
  uint64_t sequence;  // ascending; the slot with the higher valid one is current
  uint64_t timeline;
  uint64_t step;     // committed step
  uint64_t applied;  // after it
  uint64_t generation;
  uint32_t result;            // shardd.v1.StepResult
  uint32_t clip_factor_bits;  // unscale-and-clip factor, a float
  // Loss-scale state after this decision.
  double loss_scale;
  uint32_t clean_steps;
  uint32_t hysteresis_left;
  uint64_t skipped_steps;
  uint64_t consecutive_skips;
  uint64_t presence_words;
  uint64_t groups;
  uint64_t blob_bytes;
  uint32_t reserved;
  uint32_t crc;  // crc32c of the slot with this field 0: header, bits, groups, blob
};

struct DecisionGroup {
  double lr, beta1, beta2, eps, weight_decay;
};

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_SEGMENTS_H_

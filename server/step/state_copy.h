// A copy of a job's state at one committed step, taken while training goes on.
//
// It begins between two steps. From then on every chunk is copied into a pool of bounded size
// before it is changed: by a thread of the copy's own, as fast as memory allows, and by the
// updater where it comes first. A reader takes the chunks out, which makes room again; one that
// nobody has copied yet is read where it lies. So a reader never waits for room, and whoever
// waits for room waits for the reader alone. While nothing changes the state, a reader that is
// in a hurry is better off alone: then the thread begins with the next step.
#ifndef SHARDD_SERVER_STEP_STATE_COPY_H_
#define SHARDD_SERVER_STEP_STATE_COPY_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/contract/layout.h"
#include "proto/control.pb.h"
#include "server/step/chunk_gate.h"
#include "server/store/decision_log.h"
#include "server/store/job_segments.h"

namespace shardd::step {

// What a checkpoint says of the job besides its chunks, as it was when the copy began.
struct StateSnapshot {
  explicit StateSnapshot(contract::Layout of) : layout(std::move(of)) {}

  std::string job_id;  // 32 hex digits
  uint32_t uid = 0;
  uint64_t timeline = 0;
  uint64_t generation = 0;
  int64_t unix_nanos = 0;
  v1::JobConfig config;        // as created
  v1::OpenRequest parameters;  // `parameters` and `frozen` only
  contract::Layout layout;     // of them
  contract::Range chunks;      // all parts, and what lies between them
  // What this daemon holds; a directory each. Each is a member of the checkpoint's set.
  struct Part {
    contract::Range chunks;
    uint32_t member = 1;
  };
  std::vector<Part> parts;                      // ascending
  uint32_t members = 1;                         // of all daemons
  int moments = 0;                              // state arrays besides the master
  store::Decision decision;                     // sequence 0: none yet
  std::vector<contract::ParameterEntry> table;  // of the decision
  std::optional<contract::StepRecordEntry> record;
};

// One chunk's arrays, [count] each; null: not there, or not asked for.
struct ChunkArrays {
  const float* master = nullptr;
  std::array<const float*, kernels::kMaxStates> moment = {};
  uint64_t count = 0;
};

// Memory for chunks that nobody has taken yet. Thread-safe.
class CopyPool {
 public:
  // ResourceExhausted: the address space has no room.
  static absl::StatusOr<std::shared_ptr<CopyPool>> Create(uint64_t bytes);
  ~CopyPool();
  // Makes all of it resident, some tenths of a second a gigabyte, so that updates do not pay for
  // it: by whoever is in no hurry, before the copy begins.
  void Populate();
  // The same on a thread of its own, from the first page on; once.
  void BeginPopulate();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;
  float* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  CopyPool(float* data, uint64_t bytes);
  float* const data_;
  const uint64_t bytes_;
  std::atomic<bool> stop_{false};
  std::thread populator_;
};

class StateCopy {
 public:
  struct Options {
    std::shared_ptr<CopyPool> pool;  // of one chunk at least
    bool masters_only = false;
    bool lazy = false;  // the thread begins with Hurry
  };
  // Bytes of one chunk in the pool.
  static uint64_t SlotBytes(const contract::Layout& layout, int moments, bool masters_only);

  // Between two steps: every chunk of `snapshot.parts` carries the snapshot's step.
  // `segments` and `gate` are used until Detach returns.
  StateCopy(StateSnapshot snapshot, const Options& options, const store::JobSegments* segments,
            ChunkGate* gate);
  ~StateCopy();
  StateCopy(const StateCopy&) = delete;
  StateCopy& operator=(const StateCopy&) = delete;

  const StateSnapshot& snapshot() const { return snapshot_; }

  // The next step has begun, and will change the state. Any thread; cheap when called again.
  void Hurry();

  // --- the updater ---
  // Before `chunk`, whose claim the caller holds, is changed. False: the pool is full; release
  // the claim, AwaitRoom, and begin again.
  bool CopyBeforeUpdate(uint64_t chunk);
  // Waits until CopyBeforeUpdate has a chance; at once if it had one all along. No claim may be
  // held.
  void AwaitRoom(uint64_t chunk);

  // --- the reader: any threads ---
  // Gives `chunk` to `read`, once; the arrays are good during the call. Cancelled after Cancel
  // or Detach; else what `read` returned.
  absl::Status Take(uint64_t chunk, absl::FunctionRef<absl::Status(const ChunkArrays&)> read);

  // Takes from now on fail, and nobody waits for room any more.
  void Cancel();
  // `told` is called when that comes about, once; at once if it has. Replaces the
  // one before; may be empty.
  void OnCancel(std::function<void()> told);
  // Cancel, then waits until nothing reads the segments any more. By their owner.
  void Detach();

  // --- figures; any thread ---
  // For how long updates waited for room.
  double stall_seconds() const { return 1e-9 * static_cast<double>(stall_nanos_.load()); }
  // How long updates took to copy, all threads together.
  double copy_seconds() const { return 1e-9 * static_cast<double>(copy_nanos_.load()); }
  uint64_t pool_bytes() const { return slots_ * slot_bytes_; }
  // The most that the pool has held.
  uint64_t pool_bytes_used() const;

 private:
  enum class Where : uint8_t { kLive, kPool, kTaken };
  struct Place {
    Where where = Where::kLive;
    uint32_t slot = 0;
  };
  void CopyAll();
  bool HasChance(uint64_t chunk);  // under mutex_
  // Both with the chunk's claim held.
  bool CopyToPool(uint64_t chunk);
  void CopyChunk(uint64_t chunk, float* to) const;
  ChunkArrays View(const float* slot, uint64_t chunk) const;
  float* Slot(uint32_t slot) const { return pool_->data() + slot * (slot_bytes_ / sizeof(float)); }
  Place& place(uint64_t chunk) { return places_[chunk - snapshot_.chunks.begin]; }
  bool Covers(uint64_t chunk) const {
    return chunk >= snapshot_.chunks.begin && chunk < snapshot_.chunks.end;
  }

  const StateSnapshot snapshot_;
  const int moments_;  // that are copied
  const store::JobSegments* const segments_;
  ChunkGate* const gate_;
  const uint64_t slot_bytes_;
  const std::shared_ptr<CopyPool> pool_;
  const uint32_t slots_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a slot came free, a chunk left kLive, or the end
  // All under mutex_.
  std::vector<Place> places_;
  std::vector<uint32_t> free_;  // used last, given first: what is in a cache
  uint32_t fresh_ = 0;          // slots from here on were never used
  uint32_t reading_ = 0;        // Takes that may be in the segments
  bool cancelled_ = false;
  std::function<void()> told_;

  std::atomic<bool> hurried_;
  std::atomic<uint64_t> stall_nanos_{0};
  std::atomic<uint64_t> copy_nanos_{0};
  std::thread copier_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_STATE_COPY_H_

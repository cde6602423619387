// The journal of one job: makes steps durable while they are computed, and takes snapshots.
//
// The job's thread hands over records and goes on; a writer thread appends them in order and
// calls back when they are durable. One fdatasync covers all that was handed over before it. A
// second thread copies snapshots.
//
// When the disk fails: what is not durable is written anew into another segment. If that fails
// too, the journal stalls and tries again each second, or (degrade) gives up its log, lets
// commits pass, and begins anew with a snapshot when the disk works again.
#ifndef SHARDD_SERVER_JOURNAL_JOB_JOURNAL_H_
#define SHARDD_SERVER_JOURNAL_JOB_JOURNAL_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/env/aligned_buffer.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/journal/format.h"
#include "server/journal/log_writer.h"
#include "server/journal/manifest.h"
#include "server/journal/plan.h"

namespace shardd::journal {

// Where snapshots copy chunks from. Thread-safe.
class ChunkSource {
 public:
  virtual ~ChunkSource() = default;
  struct Copy {
    uint64_t applied = 0;
    uint64_t count = 0;   // elements of each array
    uint32_t arrays = 1;  // master, then moments (left out while they are zeros)
  };
  // Copies the chunk, whole and at one step, to `out`, which has room for the plan's chunk_bytes.
  virtual Copy CopyChunk(uint64_t chunk, std::byte* out) = 0;
  // The `index`th chunk that the journal is of, ascending.
  virtual uint64_t ChunkAt(uint64_t index) const { return index; }
  // What belongs to the image behind what BeginSnapshot is given, and never changes.
  virtual uint64_t ImageTailBytes() const { return 0; }
  virtual void CopyImageTail(std::byte* /*out*/) const {}
};

struct JournalOptions {
  env::FileSystem* files = nullptr;
  env::Failpoints* failpoints = nullptr;
  std::string directory;  // of this job
  JobIdentity job;
  JobSizes sizes;
  JournalPlan plan;
  uint32_t snapshots_kept = 1;
  uint64_t snapshot_bytes_per_second = 0;
  bool degrade = false;
  // Contents of the file PEERS, of a job that spans daemons; empty: there is none.
  std::string peers;
  absl::Duration retry = absl::Seconds(1);
  std::function<void(const std::string&)> log;
  ChunkSource* source = nullptr;
};

enum class JournalState {
  kEmpty,     // no snapshot has been begun
  kBuilding,  // the first snapshot (or the first after kDegraded) is not complete
  kWhole,
  kStalled,   // the disk fails, and commits wait
  kDegraded,  // the disk fails, and commits pass without being durable
};

// "empty", "building", "whole", "stalled", "degraded".
std::string_view JournalStateName(JournalState state);

struct JournalStatus {
  JournalState state = JournalState::kEmpty;
  std::string error;           // why it is stalled or degraded, or why snapshots fail
  uint64_t durable_step = 0;   // the last step that survives the machine; 0 with no snapshot
  uint64_t snapshot_step = 0;  // of the newest complete one
  uint64_t log_bytes = 0;      // of segments that are needed
  uint64_t disk_bytes = 0;     // of all files, as planned
  uint64_t bytes_written = 0;  // to the log, by this daemon
  uint64_t syncs = 0;
};

class JobJournal {
 public:
  // Makes the directory and its files for a new job, durably, after checking that there is room.
  // What was there is removed. On failure nothing is left.
  static absl::Status MakeFiles(const JournalOptions& options);
  // The same, with a complete snapshot of what lies in the source: `image` (its first
  // `image_bytes`) is the job segment between two steps, the last of which was `step`. All of it is
  // durable on return. Returns the manifest that goes with it.
  static absl::StatusOr<Manifest> MakeFilesWithSnapshot(const JournalOptions& options,
                                                        const env::AlignedBuffer& image,
                                                        uint64_t image_bytes, uint64_t step);

  // `end` and `manifest` as read from the files, or as MakeFiles left them (defaults).
  // `committed_step`: what log and snapshot lead to.
  JobJournal(JournalOptions options, LogEnd end, Manifest manifest, uint64_t committed_step);
  ~JobJournal();
  JobJournal(const JobJournal&) = delete;
  JobJournal& operator=(const JobJournal&) = delete;

  // Removes what would be taken for a part of the log, and makes room, before Start.
  absl::Status Prepare();
  // Starts the threads. Once. The source outlives them.
  void Start();
  // Ends the threads. What is not durable is dropped, its callbacks with it.
  void Stop();
  // The same, without waiting for a write or sync that is under way.
  void BeginStop();

  // The calls below are the job's thread's. Callbacks come from this journal's threads, or from
  // the call itself; they may not call back into the journal.

  // A bucket's sum, which lies in memory that does not change until the step is durable or
  // Abandon has called back. Written as soon as possible, durable with the commit.
  void AppendGradient(const RecordFields& fields, const std::byte* payload, uint64_t bytes,
                      uint64_t unit);
  // The decision on the gradients that were handed over. `durable` is called once all of it is, or
  // once commits pass without (degraded).
  void Commit(const RecordFields& fields, env::AlignedBuffer payload, uint64_t bytes,
              std::function<void()> durable);
  // `durable` is called once all that was handed over before is, as Commit's.
  void AwaitDurable(std::function<void()> durable);
  // Gradients that are not decided are dropped. `quiet` is called when none of their memory is
  // read any more and the state record is durable (or the disk fails).
  void Abandon(const RecordFields& fields, env::AlignedBuffer payload, uint64_t bytes,
               std::function<void()> quiet);

  // Whether BeginSnapshot should be called at the next moment between two steps.
  bool WantsImage() const;
  // Begins a snapshot: `image` is the job segment as of `step` (without what the source has of
  // it), no later step is decided, and no
  // gradient of one has been handed over.
  void BeginSnapshot(env::AlignedBuffer image, uint64_t bytes, uint64_t step);

  JournalStatus status() const;

 private:
  struct Entry {
    Record record;
    env::AlignedBuffer owned;
    bool has_record = true;
    bool gradient = false;  // of a step that is not decided
    bool dropped = false;
    bool sync = false;
    bool marks_snapshot = false;
    bool commit = false;
    bool awaits = false;  // for AwaitDurable
    std::function<void()> done;
  };
  struct SnapshotRequest {
    uint64_t id = 0;
    env::AlignedBuffer image;
    uint64_t image_bytes = 0;
    uint64_t step = 0;
    bool marked = false;  // redo_lsn is known
    uint64_t redo_lsn = 0;
  };
  using Lock = std::unique_lock<std::mutex>;
  using Calls = std::vector<std::function<void()>>;

  void Push(std::shared_ptr<Entry> entry);
  // job_journal.cc: the writer's thread.
  void WriterMain();
  bool WriterHasWork() const;
  absl::Status WriteEntries(Lock* lock);
  absl::Status SyncEntries(Lock* lock);
  absl::Status AwaitRoom(const Record& record, Lock* lock);
  void Acknowledge(Calls* calls);
  void OnFailure(const absl::Status& why, Lock* lock);
  void Degrade(const std::string& why, Calls* calls);
  void ReleaseQuiet(Calls* calls);
  void NoteLog();
  // job_journal_snapshot.cc: the copier's thread.
  void CopierMain();
  absl::Status TakeSnapshot(Lock* lock);
  absl::Status CopyChunks(class SnapshotWriter* writer, Lock* lock);
  absl::Status Publish(const ManifestSnapshot& snapshot, Lock* lock);
  bool Cancelled() const { return stop_ || !request_.has_value() || request_->id != copying_; }
  void Throttle(uint64_t bytes, absl::Time began, Lock* lock);
  bool Hurried() const;
  uint64_t FreeSlot() const;

  const JournalOptions options_;
  LogWriter log_;  // the writer's thread only

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // All below under mutex_.
  std::deque<std::shared_ptr<Entry>> entries_;  // not durable, in order
  size_t written_ = 0;                          // of them, in the current segment
  bool sync_wanted_ = false;
  bool begin_after_gap_ = false;
  JournalState state_ = JournalState::kEmpty;
  std::string error_;
  int failures_ = 0;  // in a row
  absl::Time retry_at_ = absl::InfinitePast();
  std::string give_up_;          // why the writer is to degrade; empty: it is not
  bool base_ready_ = false;      // a snapshot and the log cover everything
  bool hold_until_base_ = true;  // commits wait for the first snapshot
  Calls held_;                   // commits that do
  uint64_t synced_step_ = 0;     // of the last decision that is durable in the log
  uint64_t durable_step_ = 0;
  uint64_t durable_lsn_ = 0;
  std::optional<SnapshotRequest> request_;
  uint64_t requests_ = 0;
  uint64_t copying_ = 0;         // id of the request that the copier is at
  uint64_t since_snapshot_ = 0;  // log bytes since the newest one began
  Manifest manifest_;
  uint64_t next_snapshot_ = 1;
  uint64_t free_lsn_ = 0;        // segments before it are free
  bool waits_for_room_ = false;  // the log is full until a snapshot is complete
  uint64_t live_bytes_ = 0, bytes_written_ = 0, bytes_at_sync_ = 0, syncs_ = 0;
  bool stop_ = false;
  std::thread writer_, copier_;
};

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_JOB_JOURNAL_H_

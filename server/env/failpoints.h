// Named points where a test can hold or kill the daemon.
//
// A point is a call SHARDD_FAILPOINT(failpoints, "step.decide.before"); it costs one relaxed load
// while nothing is armed. Names are registered in kFailpointNames, so that a
// misspelt one is an error and a tool can list them.
#ifndef SHARDD_SERVER_ENV_FAILPOINTS_H_
#define SHARDD_SERVER_ENV_FAILPOINTS_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardd::env {

// In the order of a step. What each one stands before or after is its name.
inline constexpr auto kFailpointNames = std::to_array<std::string_view>({
    "job.create.before_rename",       // segments are built under their temporary name
    "step.publish.after_descriptor",  // a gradient descriptor was accepted
    "step.reduce.before",             // all nodes of a bucket are there
    "step.reduce.after",              // the bucket's sum is marked complete
    "step.decide.before",             // all is there; nothing is recorded
    "step.decide.after_record",       // the decision is recorded, nobody was told
    "step.update.before",             // the decision is on the board, no chunk is updated
    "step.update.after_chunk",        // some chunk carries the new state
    "step.update.after",              // all buckets are ready
    "session.join.before_reply",      // a group has formed
    "peer.prepared",                  // this owner has its part of the step; nobody was told
    "peer.decision.before_send",      // the coordinator recorded the decision; no other was told
    "peer.decision.received",         // recorded as the coordinator told it, not carried out
    "peer.reshard.stored",            // all chunks that move here are stored; nobody was told
    "reshard.after_copy",             // every chunk lies with its new owner too; not recorded
    "reshard.after_record",           // the new owners are recorded; nobody was told
    "peer.handover.before_accept",    // asked to coordinate; nothing is recorded
    "peer.handover.after_accept",     // recorded that this daemon coordinates; nobody was told
    "recover.after_mend",             // a torn chunk is mended, not redone
    "checkpoint.copy.begun",          // a save's copy was begun, between two steps
    "checkpoint.before_rename",       // a checkpoint's files and manifest are durable, not its name
    "checkpoint.restore.loaded",      // a restored job's state is built, not its name
    "spill.before_rename",            // a spill is written under its temporary name
    "spill.before_free",              // a spill is durable, the job is still in memory
    "unspill.before_initialised",     // a spilled job is read, and does not count yet
    "unspill.before_remove",          // a spilled job is in memory, and on disk still
    "journal.append.after",           // a record is written to the log, not durable
    "journal.sync.before",            // all of a step is written, not durable
    "journal.sync.after",             // it is durable, nobody was told
    "journal.snapshot.after_chunk",   // a chunk is in a snapshot that does not count yet
    "journal.manifest.before_rename",  // the manifest that names a snapshot is durable, not its
                                       // name
    "journal.manifest.after_rename",   // the snapshot counts, the log before it is not yet free
    "recover.journal.after_chunk",     // a chunk is loaded into segments that nobody sees
    "recover.journal.after_step",      // a step is redone there
    "recover.journal.before_rename",   // all is redone there
    "mirror.copy.after_piece",         // some of a journal was sent to the peer that mirrors it
    "mirror.sync.before_wait",         // a sync was asked of the peer, and is not done here
    "mirror.store.after_sync",         // the peer has synced, and has not said so
    "mirror.store.before_rename",      // a mirror is complete and durable, not its name
    "mirror.store.after_rename",       // it counts, the one before it is still there
    "mirror.delete.after_note",        // a deletion that the peer must learn of is noted
    "mirror.fetch.after_piece",        // some of a journal came back from the peer
    "mirror.fetch.before_rename",      // all of it is durable, not its name
});

enum class FailpointAction { kOff, kWait, kKill };

// "off", "wait" or "kill"; InvalidArgument lists them.
absl::StatusOr<FailpointAction> ParseFailpointAction(const std::string& text);

// Thread-safe.
class Failpoints {
 public:
  // NotFound lists the names. `skip`: pass this many times before acting.
  absl::Status Arm(const std::string& name, FailpointAction action, uint32_t skip);
  // The same from "NAME:ACTION"; an empty text arms nothing.
  absl::Status ArmFromText(const std::string& text);
  // Waits until a thread is held at `name`; returns how often it has been passed or held.
  absl::StatusOr<uint64_t> AwaitHit(const std::string& name, absl::Duration timeout);
  // Lets the held threads go on and disarms. FailedPrecondition if not armed.
  absl::Status Release(const std::string& name);
  // Lets everybody go on, now and later. For shutdown.
  void ReleaseAll();

  void Reach(std::string_view name) {
    if (armed_.load(std::memory_order_relaxed) != 0) ReachSlow(name);
  }

 private:
  struct Point {
    FailpointAction action = FailpointAction::kOff;
    uint32_t skip = 0;
    uint64_t hits = 0;
    uint32_t held = 0;
    uint64_t epoch = 0;  // a held thread goes on when this changes
  };
  void ReachSlow(std::string_view name);

  std::atomic<int> armed_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool off_ = false;
  std::map<std::string, Point, std::less<>> points_;
};

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_FAILPOINTS_H_

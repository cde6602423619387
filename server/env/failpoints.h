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
inline constexpr std::array<std::string_view, 11> kFailpointNames = {
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
    "recover.after_mend",             // a torn chunk is mended, not redone
};

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

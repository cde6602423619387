// One save, verification, restore or export that somebody waits for: its progress, and how it is
// cancelled.
#ifndef SHARDD_SERVER_CHECKPOINT_OPERATION_H_
#define SHARDD_SERVER_CHECKPOINT_OPERATION_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/control.pb.h"

namespace shardd::checkpoint {

// Thread-safe.
class Operation {
 public:
  // `report` is called with every message, from the threads that make progress, one at a time.
  explicit Operation(std::function<void(const v1::CheckpointProgress&)> report);

  // Asks it to end soon. What OnCancel gave is called, once.
  void Cancel();
  bool cancelled() const;
  // `cancel` is called by Cancel; at once if that was. Replaces the one before.
  void OnCancel(std::function<void()> cancel);
  absl::Status CancelledStatus() const;

  // Changes the message and reports it; `change` runs under a lock.
  void Update(const std::function<void(v1::CheckpointProgress*)>& change);
  // Counts bytes; reports every now and then. Cancelled when it is.
  absl::Status Advance(uint64_t bytes);
  v1::CheckpointProgress progress() const;

  // Waits until `deadline`; false when it was cancelled meanwhile.
  bool WaitUntil(absl::Time deadline);

 private:
  const std::function<void(const v1::CheckpointProgress&)> report_;
  const absl::Time started_ = absl::Now();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // All under mutex_.
  bool cancelled_ = false;
  std::function<void()> cancel_;
  v1::CheckpointProgress progress_;
  absl::Time reported_ = absl::InfinitePast();
};

// Keeps to a number of bytes a second by making its caller wait.
class Throttle {
 public:
  // 0: as fast as can be. `operation` outlives it.
  Throttle(uint64_t bytes_per_second, Operation* operation);
  // Before `bytes` more are written. Cancelled when the operation is.
  absl::Status Spend(uint64_t bytes);

 private:
  const uint64_t bytes_per_second_;
  Operation* const operation_;
  absl::Time due_ = absl::InfinitePast();  // of the next byte
};

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_OPERATION_H_

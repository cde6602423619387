#include "server/checkpoint/operation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardd::checkpoint {

namespace {

// How often progress is told.
constexpr absl::Duration kReportInterval = absl::Milliseconds(100);
// Unused allowance of a throttle is not kept for longer than this.
constexpr absl::Duration kBurst = absl::Milliseconds(50);

}  // namespace

Operation::Operation(std::function<void(const v1::CheckpointProgress&)> report)
    : report_(std::move(report)) {}

void Operation::Cancel() {
  std::function<void()> cancel;
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_) return;
    cancelled_ = true;
    cancel = std::move(cancel_);
  }
  changed_.notify_all();
  if (cancel) cancel();
}

bool Operation::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

void Operation::OnCancel(std::function<void()> cancel) {
  {
    const std::lock_guard lock(mutex_);
    if (!cancelled_) {
      cancel_ = std::move(cancel);
      return;
    }
  }
  if (cancel) cancel();
}

absl::Status Operation::CancelledStatus() const {
  const std::lock_guard lock(mutex_);
  return absl::CancelledError(absl::StrCat("the call for job '", progress_.job(),
                                           "' was cancelled; nothing of it was kept"));
}

void Operation::Update(const std::function<void(v1::CheckpointProgress*)>& change) {
  const std::lock_guard lock(mutex_);
  change(&progress_);
  reported_ = absl::Now();
  progress_.set_seconds(absl::ToDoubleSeconds(reported_ - started_));
  report_(progress_);
}

absl::Status Operation::Advance(uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    progress_.set_done_bytes(progress_.done_bytes() + bytes);
    const absl::Time now = absl::Now();
    if (!cancelled_ && now - reported_ < kReportInterval) return absl::OkStatus();
    if (!cancelled_) {
      reported_ = now;
      progress_.set_seconds(absl::ToDoubleSeconds(now - started_));
      report_(progress_);
      return absl::OkStatus();
    }
  }
  return CancelledStatus();
}

v1::CheckpointProgress Operation::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

bool Operation::WaitUntil(absl::Time deadline) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_until(lock, absl::ToChronoTime(deadline), [&] { return cancelled_; });
}

Throttle::Throttle(uint64_t bytes_per_second, Operation* operation)
    : bytes_per_second_(bytes_per_second), operation_(operation) {}

absl::Status Throttle::Spend(uint64_t bytes) {
  if (bytes_per_second_ == 0) {
    return operation_->cancelled() ? operation_->CancelledStatus() : absl::OkStatus();
  }
  const absl::Time now = absl::Now();
  due_ = std::max(due_, now - kBurst);
  if (due_ > now && !operation_->WaitUntil(due_)) return operation_->CancelledStatus();
  due_ += absl::Seconds(static_cast<double>(bytes) / static_cast<double>(bytes_per_second_));
  return absl::OkStatus();
}

}  // namespace shardd::checkpoint

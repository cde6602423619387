#include "server/env/failpoints.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardd::env {

namespace {

absl::Status CheckName(const std::string& name) {
  if (std::find(kFailpointNames.begin(), kFailpointNames.end(), name) != kFailpointNames.end()) {
    return absl::OkStatus();
  }
  std::string names;
  for (std::string_view known : kFailpointNames) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(known));
  }
  return absl::NotFoundError(
      absl::StrCat("there is no failpoint '", name, "'; there are: ", names));
}

}  // namespace

absl::StatusOr<FailpointAction> ParseFailpointAction(const std::string& text) {
  if (text == "off") return FailpointAction::kOff;
  if (text == "wait") return FailpointAction::kWait;
  if (text == "kill") return FailpointAction::kKill;
  return absl::InvalidArgumentError(
      absl::StrCat("failpoint action '", text, "' is unknown; there are: off, wait, kill"));
}

absl::Status Failpoints::ArmFromText(const std::string& text) {
  if (text.empty()) return absl::OkStatus();
  const size_t colon = text.find(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("arm_failpoint is '", text, "'; give NAME:ACTION"));
  }
  absl::StatusOr<FailpointAction> action = ParseFailpointAction(text.substr(colon + 1));
  if (!action.ok()) return action.status();
  return Arm(text.substr(0, colon), *action, 0);
}

absl::Status Failpoints::Arm(const std::string& name, FailpointAction action, uint32_t skip) {
  if (absl::Status status = CheckName(name); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  Point& point = points_[name];
  const bool was_armed = point.action != FailpointAction::kOff;
  const bool is_armed = action != FailpointAction::kOff;
  point.action = action;
  point.skip = skip;
  point.hits = 0;
  ++point.epoch;
  armed_ += static_cast<int>(is_armed) - static_cast<int>(was_armed);
  changed_.notify_all();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Failpoints::AwaitHit(const std::string& name, absl::Duration timeout) {
  if (absl::Status status = CheckName(name); !status.ok()) return status;
  std::unique_lock lock(mutex_);
  Point& point = points_[name];
  const bool hit = changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                                     [&] { return point.held > 0 || off_; });
  if (!hit || point.held == 0) {
    return absl::DeadlineExceededError(
        absl::StrCat("no thread came to failpoint '", name, "' in time"));
  }
  return point.hits;
}

absl::Status Failpoints::Release(const std::string& name) {
  if (absl::Status status = CheckName(name); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  Point& point = points_[name];
  if (point.action == FailpointAction::kOff) {
    return absl::FailedPreconditionError(
        absl::StrCat("failpoint '", name, "' is not armed; arm it first"));
  }
  point.action = FailpointAction::kOff;
  ++point.epoch;
  --armed_;
  changed_.notify_all();
  return absl::OkStatus();
}

void Failpoints::ReleaseAll() {
  std::lock_guard lock(mutex_);
  off_ = true;
  armed_ = 0;
  for (auto& [name, point] : points_) {
    point.action = FailpointAction::kOff;
    ++point.epoch;
  }
  changed_.notify_all();
}

void Failpoints::ReachSlow(std::string_view name) {
  std::unique_lock lock(mutex_);
  auto it = points_.find(name);
  if (it == points_.end() || off_) return;
  Point& point = it->second;
  if (point.action == FailpointAction::kOff) return;
  ++point.hits;
  if (point.skip > 0) {
    --point.skip;
    return;
  }
  if (point.action == FailpointAction::kKill) {
    kill(getpid(), SIGKILL);
    return;
  }
  ++point.held;
  const uint64_t epoch = point.epoch;
  changed_.notify_all();
  changed_.wait(lock, [&] { return point.epoch != epoch || off_; });
  --point.held;
}

}  // namespace shardd::env

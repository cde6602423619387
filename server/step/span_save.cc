#include "server/step/span_save.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd::step {

void SpanSave::Ordered(Phase phase) {
  {
    const std::lock_guard lock(mutex_);
    ordered_ = phase;
  }
  changed_.notify_all();
}

void SpanSave::Answered(const std::string& daemon, Phase phase, const absl::Status& status) {
  if (!status.ok()) {
    return End(
        absl::Status(status.code(), absl::StrCat("daemon ", daemon, ": ", status.message())));
  }
  {
    const std::lock_guard lock(mutex_);
    answered_[daemon] = phase;
  }
  changed_.notify_all();
}

void SpanSave::End(absl::Status why) {
  std::function<void()> told;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return;
    ended_ = std::move(why);
    told.swap(told_);
  }
  changed_.notify_all();
  if (told) told();
}

void SpanSave::OnEnd(std::function<void()> told) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_.ok()) {
      told_ = std::move(told);
      return;
    }
  }
  if (told) told();
}

absl::Status SpanSave::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

absl::Status SpanSave::AwaitOrder(Phase phase) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ended_.ok() || (ordered_.has_value() && *ordered_ >= phase); });
  return ended_;
}

absl::Status SpanSave::AwaitAnswers(Phase phase) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    return !ended_.ok() || std::all_of(others_.begin(), others_.end(), [&](const auto& daemon) {
      const auto it = answered_.find(daemon);
      return it != answered_.end() && it->second >= phase;
    });
  });
  return ended_;
}

}  // namespace shardd::step

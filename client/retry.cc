#include "client/retry.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace shardd {

absl::Duration Backoff::Before(uint32_t attempt) const {
  if (attempt == 0) return absl::ZeroDuration();
  absl::Duration pause = first;
  while (--attempt > 0 && pause < most) pause *= 2;
  return std::min(pause, most);
}

WaitClock SystemWait() { return {absl::Now, absl::SleepFor}; }

absl::Status RetryUntil(absl::Time deadline, const Backoff& backoff, const WaitClock& clock,
                        absl::FunctionRef<absl::Status()> attempt,
                        absl::FunctionRef<bool(const absl::Status&)> may_pass) {
  for (uint32_t made = 1;; ++made) {
    const absl::Time now = clock.now();
    absl::Status status = attempt();
    if (status.ok() || !may_pass(status) || now >= deadline) return status;
    clock.sleep(std::min(backoff.Before(made), deadline - clock.now()));
  }
}

}  // namespace shardd

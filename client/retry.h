// Trying again, with pauses that grow, until it succeeds or a deadline has passed.
#ifndef SHARDD_CLIENT_RETRY_H_
#define SHARDD_CLIENT_RETRY_H_

#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace shardd {

// Pauses: `first`, then twice the one before, `most` at most.
struct Backoff {
  absl::Duration first;
  absl::Duration most;
  // The pause before attempt `attempt` (the first one is 0, and waits for nothing).
  absl::Duration Before(uint32_t attempt) const;
};

// The time, injected.
struct WaitClock {
  std::function<absl::Time()> now;
  std::function<void(absl::Duration)> sleep;
};
WaitClock SystemWait();

// Calls `attempt` until it succeeds, fails with a status that may not pass, or the deadline has
// come; returns its last status. The last attempt is made at the deadline; there is always one.
absl::Status RetryUntil(absl::Time deadline, const Backoff& backoff, const WaitClock& clock,
                        absl::FunctionRef<absl::Status()> attempt,
                        absl::FunctionRef<bool(const absl::Status&)> may_pass);

}  // namespace shardd

#endif  // SHARDD_CLIENT_RETRY_H_

// Waiting for something on the board, while looking out for everything that would
// make the wait pointless.
#ifndef SHARDD_CLIENT_BOARD_WAITER_H_
#define SHARDD_CLIENT_BOARD_WAITER_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "client/attach_connection.h"
#include "client/weights_segment.h"

namespace shardd {

enum class BoardEvent {
  kDone,        // the condition holds
  kFailed,      // the job has ended: WeightsSegment::Failure says why
  kDeleted,     // the job was deleted
  kRefused,     // the daemon refused this session, or its place was taken
  kRegrouped,   // the generation is over: Join
  kDaemonGone,  // it hung up
  kDeadline,
};

// Thread-safe.
class BoardWaiter {
 public:
  // All outlive this.
  BoardWaiter(const WeightsSegment* segment, const AttachConnection* attach)
      : segment_(*segment), attach_(*attach) {}

  // What stands in the way of a session of `generation`; kDone: nothing. Costs a few
  // loads: does not ask whether the daemon is alive.
  BoardEvent Check(uint64_t generation) const;

  // Returns when `done` holds (kDone) or when something of Check, a hang-up or the
  // deadline comes first. Those go before `done`: a decision on the board of a
  // generation that is over is told by Join. `done` is evaluated again whenever the
  // board's event has changed.
  BoardEvent Wait(uint64_t generation, absl::FunctionRef<bool()> done, absl::Time deadline) const;

 private:
  const WeightsSegment& segment_;
  const AttachConnection& attach_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_BOARD_WAITER_H_

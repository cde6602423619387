#include "client/board_waiter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "absl/time/clock.h"
#include "proto/contract/segments.h"

namespace shardd {

namespace {

// An event is at most this far away most of the time; a sleep and its wake-up cost
// more than that.
constexpr absl::Duration kSpin = absl::Microseconds(20);
// A killed daemon wakes nobody: look at the attach socket this often.
constexpr absl::Duration kLook = absl::Milliseconds(50);

static_assert(std::endian::native == std::endian::little, "the futex word is the low half");

void SleepWhile(const std::atomic<uint64_t>& event, uint64_t seen, absl::Duration at_most) {
  const timespec timeout = absl::ToTimespec(at_most);
  // Not the private variant: the daemon wakes from another process.
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&event), FUTEX_WAIT,
          static_cast<uint32_t>(seen), &timeout, nullptr, 0);
}

}  // namespace

BoardEvent BoardWaiter::Check(uint64_t generation) const {
  const contract::Board& board = segment_.board();
  const contract::SessionLine& line = segment_.line();
  switch (static_cast<contract::BoardState>(board.state.load(std::memory_order_acquire))) {
    case contract::BoardState::kFailed:
      return BoardEvent::kFailed;
    case contract::BoardState::kDeleted:
      return BoardEvent::kDeleted;
    case contract::BoardState::kInitialising:
    case contract::BoardState::kReady:
      break;
  }
  const auto state =
      static_cast<contract::SessionState>(line.state.load(std::memory_order_acquire));
  if (state == contract::SessionState::kRefused ||
      line.session.load(std::memory_order_acquire) != attach_.session()) {
    return BoardEvent::kRefused;
  }
  if (board.generation.load(std::memory_order_acquire) != generation) {
    return BoardEvent::kRegrouped;
  }
  return BoardEvent::kDone;
}

BoardEvent BoardWaiter::Wait(uint64_t generation, absl::FunctionRef<bool()> done,
                             absl::Time deadline) const {
  const std::atomic<uint64_t>& event = segment_.board().event;
  absl::Time sleep_from = absl::Now() + kSpin;
  while (true) {
    const uint64_t seen = event.load(std::memory_order_acquire);
    const BoardEvent obstacle = Check(generation);
    if (obstacle != BoardEvent::kDone) return obstacle;
    if (done()) return BoardEvent::kDone;
    absl::Time now = absl::Now();
    while (now < sleep_from && event.load(std::memory_order_acquire) == seen) now = absl::Now();
    if (event.load(std::memory_order_acquire) != seen) continue;
    if (attach_.Gone()) return BoardEvent::kDaemonGone;
    if (now >= deadline) return BoardEvent::kDeadline;
    SleepWhile(event, seen, std::min(kLook, deadline - now));
  }
}

}  // namespace shardd

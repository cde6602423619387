// How a session goes on when its daemon has died and another process takes its place.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/retry.h"
#include "client/session_impl.h"

namespace shardd {

namespace {

// A daemon that is back is found within this; looking costs next to nothing.
constexpr Backoff kLook = {.first = absl::Milliseconds(5), .most = absl::Milliseconds(100)};
// A private one is started by looking for it.
constexpr Backoff kStart = {.first = absl::Milliseconds(5), .most = absl::Seconds(5)};

// Of an attempt to attach: the daemon is not there, ends, or died again meanwhile.
bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsCancelled(status) || absl::IsUnauthenticated(status);
}

std::string Seconds(absl::Duration duration) {
  return absl::FormatDuration(absl::Trunc(duration, absl::Milliseconds(100)));
}

}  // namespace

bool SessionImpl::DaemonGone(const absl::Status& status) const {
  if (status.ok() || absl::IsInvalidArgument(status) || !lost_.ok()) return false;
  // A daemon that ends says so, or cancels the calls that wait, before it hangs up.
  if (absl::IsUnavailable(status) || absl::IsCancelled(status)) return true;
  // What else a verb failed with may be that its session is unknown to the next daemon.
  if (!parts_.daemon.attach().Gone()) return false;
  const BoardEvent event = waiter().Check(generation_);
  return event != BoardEvent::kFailed && event != BoardEvent::kDeleted;
}

absl::Status SessionImpl::GiveUp(absl::Status why) {
  lost_ = std::move(why);
  return lost_;
}

absl::Status SessionImpl::Reattach() {
  const absl::Duration patience = parts_.options.reconnect_timeout;
  const std::string& job = parts_.job.name;
  const std::string& socket = parts_.daemon.found.socket_path;
  std::string parting;
  parts_.daemon.attach().Gone(&parting);
  if (!parting.empty()) parting = absl::StrCat(" (", parting, ")");
  if (patience <= absl::ZeroDuration()) {
    return GiveUp(
        absl::UnavailableError(absl::StrCat("the daemon of job '", job, "' at ", socket, " is gone",
                                            parting, "; start it and open the job again")));
  }
  parts_.options.log(absl::StrCat("the daemon of ", job, " went away", parting, "; waiting up to ",
                                  Seconds(patience), " for it to come back"));
  const bool has_state = !uploads_wanted_ || !initialising();
  parts_.daemon.attach().HangUp();
  const absl::Time began = absl::Now();
  const absl::Time deadline = began + patience;
  absl::StatusOr<DaemonLink> link;
  absl::Status status = RetryUntil(
      deadline, parts_.daemon.found.private_directory.empty() ? kLook : kStart, SystemWait(),
      [&] {
        link = Reopen(parts_, has_state, deadline);
        return link.status();
      },
      MayPass);
  if (!status.ok() && !MayPass(status)) return GiveUp(status);
  if (!status.ok()) {
    // Without its remedy.
    const std::string last(status.message().substr(0, status.message().find(';')));
    return GiveUp(absl::UnavailableError(
        absl::StrCat("the daemon of job '", job, "' at ", socket, " did not come back within ",
                     Seconds(patience), " (", last, "); start shardd there with the same state ",
                     "directory and open the job again: it goes on where it was. ",
                     "SHARDD_RECONNECT_SECONDS says how long a trainer waits")));
  }
  retired_.push_back(std::move(parts_.daemon.segment));
  parts_.daemon = *std::move(link);
  uploads_wanted_ = parts_.daemon.job.initialising();
  ++attachments_;
  joined_ = false;
  MakePublisher();
  view_->Rebase(parts_.daemon.segment->weights());
  const contract::Board& board = parts_.daemon.segment->board();
  parts_.options.log(absl::StrCat("re-attached to the daemon of ", job, " after ",
                                  Seconds(absl::Now() - began), " at step ",
                                  parts_.daemon.job.committed_step() + 1, ", generation ",
                                  board.generation.load(std::memory_order_acquire)));
  return absl::OkStatus();
}

}  // namespace shardd

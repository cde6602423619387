// Standing still: between two steps, so that the daemon can be replaced; or for good, when
// nobody uses the job.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

void Job::Drain(absl::Time deadline, Callback<v1::DrainedJob> done) {
  Post([this, deadline, done] { DoDrain(deadline, done); });
}

void Job::DoDrain(absl::Time deadline, Callback<v1::DrainedJob> done) {
  if (draining_ || drained_) {
    return done(absl::FailedPreconditionError(
        absl::StrCat("job '", name(), "' is being drained already; wait for the daemon to end")));
  }
  draining_ = std::move(done);
  drain_began_ = env_.now();
  drain_deadline_ = deadline;
}

void Job::RetireIdle(absl::Duration idle, Callback<v1::JobStatus> done) {
  Post([this, idle, done] {
    if (deleted_ || drained_ || copy_ != nullptr || due_copy_ || !members_.empty() ||
        !BetweenSteps() || env_.now() - idle_since_ < idle) {
      return done(absl::FailedPreconditionError(absl::StrCat("job '", name(), "' is in use")));
    }
    deleted_ = true;
    Publish();
    done(Status());
  });
}

void Job::UndoRetire() {
  Post([this] { deleted_ = false; });
}

// Nothing that a rank has given would have to be given again.
bool Job::BetweenSteps() const {
  return upload_.complete() && !commit_.pending() && sums_.empty() &&
         std::none_of(members_.begin(), members_.end(),
                      [](const auto& m) { return m->live() && m->ended; });
}

// After each round of the job's thread: a decision has just been carried out, or nothing has come.
void Job::CheckDrain() {
  if (!draining_) return;
  const absl::Time now = env_.now();
  const bool between = BetweenSteps();
  if (!between && now < drain_deadline_) return;
  drained_ = true;
  v1::DrainedJob job;
  job.set_name(name());
  job.set_committed_step(VisibleStep());
  job.set_seconds(absl::ToDoubleSeconds(now - drain_began_));
  job.set_between_steps(between);
  env_.log(absl::StrCat("job ", name(), ": stands still at step ", job.committed_step(),
                        between ? "" : ", in the middle of the next, which is computed again"));
  std::exchange(draining_, nullptr)(std::move(job));
}

absl::Status Job::Draining() const {
  return absl::UnavailableError(absl::StrCat(
      "job '", name(), "': the daemon is being drained; its successor will take it up"));
}

}  // namespace shardd::step

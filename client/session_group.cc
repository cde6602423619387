// How a session follows its rank group (docs/formats/segments.md, Generation).
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/regrouped.h"
#include "client/session_impl.h"

namespace shardd {

namespace {

constexpr char kOver[] = "shardd/generation-over";
// The daemon answers Join at its own deadline; this is for the way there and back.
constexpr absl::Duration kGrace = absl::Seconds(10);

// What a verb's body returns when the generation is over.
absl::Status GenerationOver() {
  absl::Status status = absl::AbortedError("the generation is over");
  status.SetPayload(kOver, absl::Cord());
  return status;
}

bool IsGenerationOver(const absl::Status& status) {
  return absl::IsAborted(status) && status.GetPayload(kOver).has_value();
}

}  // namespace

absl::Status SessionImpl::Explain(BoardEvent event) {
  switch (event) {
    case BoardEvent::kDone:
      return absl::OkStatus();
    case BoardEvent::kFailed:
      return absl::FailedPreconditionError(parts_.segment->Failure());
    case BoardEvent::kDeleted:
      return absl::FailedPreconditionError(absl::StrCat("job '", parts_.job.name, "' was deleted"));
    case BoardEvent::kRegrouped:
      return GenerationOver();
    case BoardEvent::kDaemonGone: {
      std::string why;
      parts_.attach->Gone(&why);
      return absl::UnavailableError(absl::StrCat(
          "the daemon of job '", parts_.job.name, "' is gone",
          why.empty() ? "" : absl::StrCat(" (", why, ")"), "; start it and open the job again"));
    }
    case BoardEvent::kRefused:
    case BoardEvent::kDeadline:
      return parts_.control->SessionError();
  }
  return absl::InternalError("unknown board event");
}

absl::Status SessionImpl::Await(absl::FunctionRef<bool()> done) {
  return Explain(waiter_.Wait(generation_, done, absl::Now() + parts_.job.step_timeout));
}

absl::Status SessionImpl::RunVerb(absl::FunctionRef<absl::Status()> body) {
  uint64_t generation = 0;
  absl::Status status;
  {
    std::shared_lock<std::shared_mutex> lock(verbs_);
    if (closed_) return absl::FailedPreconditionError("this session was closed; open a new one");
    generation = generation_;
    status = Explain(waiter_.Check(generation));
    if (status.ok()) status = body();
  }
  return IsGenerationOver(status) ? Regroup(generation) : status;
}

absl::Status SessionImpl::Regroup(uint64_t generation) {
  std::unique_lock<std::shared_mutex> lock(verbs_);
  // Another thread may have been here for the same change.
  while (generation_ == generation) {
    absl::Status status = Join();
    if (status.ok()) status = WaitAllWeights();
    if (IsGenerationOver(status)) {
      generation = generation_;  // it changed again meanwhile
      continue;
    }
    if (!status.ok()) return status;
    break;
  }
  return RegroupedStatus({next_step_, blob_});
}

absl::Status SessionImpl::Join() {
  const absl::Time deadline = absl::Now() + parts_.job.join_timeout;
  while (true) {
    v1::JoinRequest request;
    const absl::Duration left = std::max(deadline - absl::Now(), absl::Milliseconds(1));
    request.set_deadline_seconds(absl::ToDoubleSeconds(left));
    absl::StatusOr<v1::JoinReply> reply = parts_.control->Join(request, left + kGrace);
    if (reply.ok()) {
      generation_ = reply->generation();
      next_step_ = reply->next_step();
      blob_ = std::move(*reply->mutable_blob());
      loss_scale_ = reply->loss_scale();
      ended_ = false;
      publisher_->Begin(generation_, next_step_);
      return absl::OkStatus();
    }
    // ABORTED: a rank was lost while the group was forming. But a session whose place
    // was taken is told the same, and has a refusal on its line.
    const bool refused = waiter_.Check(generation_) == BoardEvent::kRefused;
    if (!absl::IsAborted(reply.status()) || refused || absl::Now() >= deadline) {
      return reply.status();
    }
  }
}

// Every rank starts from the same committed weights, however far it had come.
absl::Status SessionImpl::WaitAllWeights() {
  if (initialising()) return absl::OkStatus();
  uint64_t next = 0;
  return Await([&] {
    while (next < layout_.num_buckets() && parts_.segment->ready_step(next) + 1 >= next_step_) {
      ++next;
    }
    return next == layout_.num_buckets();
  });
}

}  // namespace shardd

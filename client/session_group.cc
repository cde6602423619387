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
      return absl::FailedPreconditionError(parts_.daemon.segment->Failure());
    case BoardEvent::kDeleted:
      return absl::FailedPreconditionError(absl::StrCat("job '", parts_.job.name, "' was deleted"));
    case BoardEvent::kRegrouped:
      return GenerationOver();
    case BoardEvent::kDaemonGone:
      return absl::UnavailableError(absl::StrCat("the daemon of job '", parts_.job.name,
                                                 "' is gone; start it and open the job again"));
    case BoardEvent::kRefused:
    case BoardEvent::kDeadline:
      return parts_.daemon.control->SessionError();
  }
  return absl::InternalError("unknown board event");
}

absl::Status SessionImpl::Await(absl::FunctionRef<bool()> done) {
  return Explain(waiter().Wait(generation_, done, absl::Now() + parts_.job.step_timeout));
}

absl::Status SessionImpl::RunVerb(absl::FunctionRef<absl::Status()> body,
                                  absl::FunctionRef<bool()> settled) {
  uint64_t generation = 0;
  uint64_t attachments = 0;
  bool gone = false;
  {
    std::shared_lock<std::shared_mutex> lock(verbs_);
    if (closed_) return absl::FailedPreconditionError("this session was closed; open a new one");
    if (!lost_.ok()) return lost_;
    generation = generation_;
    attachments = attachments_;
    absl::Status status = joined_ ? Explain(waiter().Check(generation)) : GenerationOver();
    if (status.ok()) status = body();
    gone = DaemonGone(status);
    if (!gone && !IsGenerationOver(status)) return status;
  }
  std::unique_lock<std::shared_mutex> lock(verbs_);
  // Another thread may have been here for the same daemon.
  return CatchUp(generation, gone && attachments_ == attachments, settled);
}

absl::Status SessionImpl::RunRead(absl::FunctionRef<absl::Status()> body) {
  while (true) {
    uint64_t attachments = 0;
    {
      std::shared_lock<std::shared_mutex> lock(verbs_);
      if (!lost_.ok()) return lost_;
      attachments = attachments_;
      absl::Status status = body();
      if (closed_ || !DaemonGone(status)) return status;
    }
    std::unique_lock<std::shared_mutex> lock(verbs_);
    if (attachments_ != attachments) continue;
    if (absl::Status status = Reattach(); !status.ok()) return status;
  }
}

absl::Status SessionImpl::CatchUp(uint64_t generation, bool gone,
                                  absl::FunctionRef<bool()> settled) {
  if (!lost_.ok()) return lost_;
  // Another thread may have been here for the same change.
  while (gone || !joined_ || generation_ == generation) {
    absl::Status status;
    if (gone) {
      status = Reattach();
      if (!status.ok()) return status;
      if (settled()) return absl::OkStatus();
    }
    status = Join();
    if (status.ok()) status = WaitAllWeights();
    if (status.ok()) break;
    gone = DaemonGone(status);
    if (!gone && !IsGenerationOver(status)) return status;
    generation = generation_;  // it changed again meanwhile
  }
  return RegroupedStatus({next_step_, blob_});
}

absl::Status SessionImpl::Rejoin() {
  std::unique_lock<std::shared_mutex> lock(verbs_);
  if (closed_) return absl::FailedPreconditionError("this session was closed; open a new one");
  if (ended_) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", next_step_, " was ended: it is decided with what was given; call ",
                     "WaitDecision first"));
  }
  joined_ = false;  // to the daemon it is one of the group still, which its Join breaks
  const absl::Status status = CatchUp(generation_, false, [] { return false; });
  return absl::IsAborted(status) && GetRegrouped(status) ? absl::OkStatus() : status;
}

absl::Status SessionImpl::JoinFirst() {
  while (true) {
    absl::Status status = Join();
    if (status.ok()) status = AwaitUploaded();
    if (DaemonGone(status)) {
      status = Reattach();
      if (!status.ok()) return status;
    } else if (!IsGenerationOver(status)) {
      return status;
    }
  }
}

absl::Status SessionImpl::Join() {
  const absl::Time deadline = absl::Now() + parts_.job.join_timeout;
  while (true) {
    v1::JoinRequest request;
    const absl::Duration left = std::max(deadline - absl::Now(), absl::Milliseconds(1));
    request.set_deadline_seconds(absl::ToDoubleSeconds(left));
    absl::StatusOr<v1::JoinReply> reply = parts_.daemon.control->Join(request, left + kGrace);
    if (reply.ok()) {
      generation_ = reply->generation();
      joined_ = true;
      next_step_ = reply->next_step();
      blob_ = std::move(*reply->mutable_blob());
      loss_scale_ = reply->loss_scale();
      uploads_wanted_ = reply->initialising();
      ended_ = false;
      publisher_->Begin(generation_, next_step_);
      return absl::OkStatus();
    }
    // ABORTED: a rank was lost while the group was forming. But a session whose place
    // was taken is told the same, and has a refusal on its line.
    const bool refused = waiter().Check(generation_) == BoardEvent::kRefused;
    if (!absl::IsAborted(reply.status()) || refused || absl::Now() >= deadline) {
      return reply.status();
    }
  }
}

// The board of a daemon that holds a part of the job says "initialising" too until the weights of
// the others have come, though all were uploaded: nothing is to be uploaded then.
absl::Status SessionImpl::AwaitUploaded() {
  if (uploads_wanted_) return absl::OkStatus();
  return Await([&] { return !initialising(); });
}

// Every rank starts from the same committed weights, however far it had come.
absl::Status SessionImpl::WaitAllWeights() {
  absl::Status status = AwaitUploaded();
  if (!status.ok() || initialising()) return status;
  uint64_t next = 0;
  return Await([&] {
    while (next < layout_.num_buckets() &&
           parts_.daemon.segment->ready_step(next) + 1 >= next_step_) {
      ++next;
    }
    return next == layout_.num_buckets();
  });
}

}  // namespace shardd

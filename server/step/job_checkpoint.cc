// Copies of the state for checkpoints, and what the status says of them.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "server/env/fault_guard.h"
#include "server/step/job.h"

namespace shardd::step {

void Job::BeginCopy(StateCopy::Options options, uint64_t at_step, std::shared_ptr<SpanSave> save,
                    Callback<std::shared_ptr<StateCopy>> done) {
  Post([this, options, at_step, save, done] { DoBeginCopy(options, at_step, save, done); });
}

absl::Status Job::CanCopy() const {
  const std::string what = absl::StrCat("job '", name(), "'");
  if (deleted_) return absl::NotFoundError(absl::StrCat(what, " was deleted"));
  if (copy_ != nullptr || due_copy_.has_value()) {
    return absl::AlreadyExistsError(
        absl::StrCat(what, " is being saved or exported; wait for that, or cancel it"));
  }
  if (!upload_.complete()) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, " has not all of its weights yet: parameter '", upload_.FirstMissing(),
                     "' was not uploaded; save it when its trainers have started"));
  }
  return absl::OkStatus();
}

void Job::DoBeginCopy(const StateCopy::Options& options, uint64_t at_step,
                      const std::shared_ptr<SpanSave>& save,
                      const Callback<std::shared_ptr<StateCopy>>& done) {
  const std::string what = absl::StrCat("job '", name(), "'");
  const uint64_t committed = decider_.committed_step();
  if (absl::Status status = CanCopy(); !status.ok()) return done(status);
  if (save != nullptr) {
    if (absl::Status status = save->ended(); !status.ok()) return done(status);
  } else if (absl::Status status = CanGather(); !status.ok()) {
    return done(status);
  }
  if (at_step != 0 && at_step < committed) {
    return done(absl::FailedPreconditionError(absl::StrCat(
        what, " is at step ", committed, ", past step ", at_step, "; name one that is to come")));
  }
  due_copy_ = DueCopy{options, at_step == 0 ? committed : at_step, save, done};
  if (save != nullptr && follows()) {
    due_copy_->step = std::numeric_limits<uint64_t>::max();  // until it is ordered
    return TellSaveAnswer(save->id(), v1::PeerMessage::Save::ARM, absl::OkStatus());
  }
  if (save != nullptr) {
    env_.log(absl::StrCat("job ", name(), ": step ", due_copy_->step, " is to be saved by its ",
                          save->others().size() + 1, " daemons"));
  } else if (LiesElsewhere()) {
    return Gather();
  }
  StartDueCopy();
}

bool Job::LiesElsewhere() const {
  return span_ != nullptr && updater_.owned().size() < layout_.num_chunks();
}

// Whether all chunks are here, or can be brought here for a copy.
absl::Status Job::CanGather() const {
  if (!LiesElsewhere()) return absl::OkStatus();
  const std::string what =
      absl::StrCat("job '", name(), "': ", updater_.owned().size(), " of its ",
                   layout_.num_chunks(), " chunks lie with daemon ", span_->self);
  if (follows()) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, "; ask its coordinator, daemon ", span_->coordinator));
  }
  const bool ranks =
      std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m->live(); });
  if (ranks) {
    return absl::FailedPreconditionError(
        absl::StrCat(what,
                     ", and its ranks are attached; export it when they have closed: then its "
                     "chunks come here; or save it and export the checkpoint"));
  }
  return OthersReached();
}

absl::Status Job::OthersReached() const {
  for (const std::string& daemon : Participants()) {
    const auto peer = span_->peers.find(daemon);
    if (peer != span_->peers.end() && peer->second.synced && span_->links->State(daemon).connected)
      continue;
    return absl::UnavailableError(absl::StrCat(
        "job '", name(), "': not all of its ", layout_.num_chunks(), " chunks lie with daemon ",
        span_->self, ", and daemon ", daemon, " is not reached", Silence(daemon)));
  }
  return absl::OkStatus();
}

// All chunks come here; the copy begins when they have. They move on when a group forms elsewhere.
void Job::Gather() {
  if (!due_copy_.has_value() || due_copy_->save != nullptr || !coordinates() || !LiesElsewhere() ||
      span_->resharding || !CanGather().ok()) {
    return;  // tried again when a daemon comes anew
  }
  StartReshard(Placement::ForRanks(layout_, {span_->self}));
}

// Between two steps alone: all chunks carry the current decision.
void Job::StartDueCopy() {
  if (!due_copy_.has_value() || commit_.pending() || decider_.committed_step() < due_copy_->step) {
    return;
  }
  if (due_copy_->save != nullptr) return StartPart();
  if (LiesElsewhere() && span_->resharding) return;
  const DueCopy due = *std::exchange(due_copy_, std::nullopt);
  if (LiesElsewhere()) {
    return due.done(absl::FailedPreconditionError(
        absl::StrCat("job '", name(), "': some of its chunks have moved to another daemon")));
  }
  SetCopy(std::make_shared<StateCopy>(Snapshot(), due.options, segments_.get(), updater_.gate()));
  env_.failpoints->Reach("checkpoint.copy.begun");
  due.done(copy_);
}

v1::OpenRequest Job::parameters() const {
  v1::OpenRequest parameters;
  const contract::JobHeader* header = segments_->header();
  parameters.ParseFromArray(segments_->job().at<char>(header->parameters_offset),
                            static_cast<int>(header->parameters_bytes));
  return parameters;
}

StateSnapshot Job::Snapshot() const {
  const contract::JobHeader* header = segments_->header();
  StateSnapshot snapshot(layout_);
  if (LiesElsewhere()) {
    const std::vector<OwnedChunks>& owned = span_->placement.ranges();
    snapshot.members = static_cast<uint32_t>(owned.size());
    for (uint32_t i = 0; i < owned.size(); ++i) {
      if (owned[i].daemon == span_->self) snapshot.parts.push_back({owned[i].chunks, i + 1});
    }
    if (!snapshot.parts.empty()) {
      snapshot.chunks = {snapshot.parts.front().chunks.begin, snapshot.parts.back().chunks.end};
    }
  } else {
    snapshot.chunks = {0, layout_.num_chunks()};
    snapshot.parts = {{snapshot.chunks, 1}};
  }
  snapshot.job_id = job_id_;
  snapshot.uid = uid_;
  snapshot.timeline = segments_->timeline();
  snapshot.generation = header->generation.load();
  snapshot.unix_nanos = absl::ToUnixNanos(env_.now());
  snapshot.config = config_;
  snapshot.parameters = parameters();
  snapshot.moments = optimizer_->num_states();
  snapshot.decision = decider_.current();
  const auto table = decider_.table();
  snapshot.table.assign(table.begin(), table.end());
  const uint64_t step = decider_.committed_step();
  const auto records = log_.Records(step, step);
  if (step > 0 && !records.empty()) snapshot.record = records.back();
  return snapshot;
}

void Job::OnFrozen(Member* member, const contract::Descriptor& d) {
  const uint64_t index = member->ring->last_index();
  if (upload_.complete()) {
    return Refuse(member, absl::FailedPreconditionError(absl::StrCat(
                              "an upload to job '", name(), "', which has all of its weights")));
  }
  if (absl::Status s = upload_.CheckFrozen(d.bucket, d.begin, d.count); !s.ok()) {
    return Refuse(member, std::move(s));
  }
  if (d.data_offset % 64 != 0 || d.data_offset > member->ring->data_bytes() ||
      d.count > member->ring->data_bytes() - d.data_offset) {
    return Refuse(member, absl::InvalidArgumentError("an upload whose data is not in the ring"));
  }
  const std::span<const std::byte> data(member->ring->data(d.data_offset), d.count);
  absl::Status written;
  if (env::RunGuarded([&] { written = segments_->WriteFrozen(d.bucket, d.begin, data); }) !=
      nullptr) {
    return Refuse(member, absl::DataLossError("the ring's memory is gone"));
  }
  if (!written.ok()) return Refuse(member, std::move(written));
  upload_.MarkFrozen(d.bucket, d.begin, d.count);
  ReleaseDescriptor(member, index);
  if (upload_.complete()) FinishInitialisation();
  Wake();
}

void Job::EndCopy(std::shared_ptr<StateCopy> copy) {
  copy->Cancel();  // at once: nobody may wait for it any more
  Post([this, copy] {
    if (copy_ != copy) return;
    DropCopy();
    MoveWaiting();
    TryForm();
    Publish();
  });
}

void Job::CancelDueCopy() {
  Post([this] {
    if (!due_copy_.has_value()) return;
    const DueCopy due = *std::exchange(due_copy_, std::nullopt);
    due.done(absl::CancelledError(absl::StrCat("the save of job '", name(), "' was cancelled")));
  });
}

void Job::SetCopy(std::shared_ptr<StateCopy> copy) {
  updater_.SetCopy(copy);
  const std::lock_guard lock(mutex_);
  copy_ = std::move(copy);
}

void Job::CancelCopy() {
  std::shared_ptr<StateCopy> copy;
  {
    const std::lock_guard lock(mutex_);
    copy = copy_;
  }
  if (copy != nullptr) copy->Cancel();
}

void Job::DropCopy() {
  if (copy_ == nullptr) return;
  copy_->Detach();
  past_stall_seconds_ += copy_->stall_seconds();
  past_copy_seconds_ += copy_->copy_seconds() / static_cast<double>(env_.pool->threads());
  SetCopy(nullptr);
}

void Job::ReportCheckpoint(CheckpointReport report) {
  const std::lock_guard lock(status_mutex_);
  checkpoint_report_ = std::move(report);
  FillCheckpointStatus(&status_);
}

CheckpointReport Job::LastCheckpoint() const {
  const std::lock_guard lock(status_mutex_);
  return checkpoint_report_;
}

// Under status_mutex_.
void Job::FillCheckpointStatus(v1::JobStatus* status) const {
  status->set_checkpoint_state(checkpoint_report_.state);
  status->set_checkpoint_step(checkpoint_report_.step);
  status->set_checkpoint_path(checkpoint_report_.path);
  status->set_checkpoint_failure(checkpoint_report_.failure);
}

}  // namespace shardd::step

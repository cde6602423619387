// The verbs of a step: weights, gradients, its end.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/job_options.h"
#include "client/session_impl.h"
#include "proto/contract/segments.h"

namespace shardd {

namespace {

// The daemon answers EndStep as soon as it has read what was published before.
constexpr absl::Duration kEndStepTimeout = absl::Seconds(60);

}  // namespace

absl::Status SessionImpl::CheckParameter(size_t parameter) const {
  if (parameter < layout_.num_parameters()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("parameter ", parameter, ": the job has ",
                                                 layout_.num_parameters(), " parameters"));
}

absl::Status SessionImpl::CheckWeightsCall(std::span<const size_t> parameters) const {
  for (size_t parameter : parameters) {
    absl::Status status = CheckParameter(parameter);
    if (!status.ok()) return status;
  }
  if (!ended_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the weights may be changing: step ", next_step_,
                   " was ended and its decision not yet seen; call WaitDecision first"));
}

absl::StatusOr<const void*> SessionImpl::WaitWeights(size_t parameter) {
  const void* weights = nullptr;
  absl::Status status = RunVerb([&]() -> absl::Status {
    absl::Status checked = CheckWeightsCall(std::span(&parameter, 1));
    if (!checked.ok()) return checked;
    absl::StatusOr<const void*> got = view_->Wait(parameter, next_step_ - 1);
    if (got.ok()) weights = *got;
    return got.status();
  });
  if (!status.ok()) return status;
  return weights;
}

absl::Status SessionImpl::Gather(std::span<const size_t> parameters) {
  return RunVerb([&] {
    absl::Status checked = CheckWeightsCall(parameters);
    return checked.ok() ? view_->Gather(parameters, next_step_ - 1) : checked;
  });
}

absl::Status SessionImpl::Release(std::span<const size_t> parameters) {
  for (size_t parameter : parameters) {
    absl::Status status = CheckParameter(parameter);
    if (!status.ok()) return status;
  }
  view_->Release(parameters);
  return absl::OkStatus();
}

absl::Status SessionImpl::CheckGradCall(size_t parameter, uint32_t slot) const {
  absl::Status status = CheckParameter(parameter);
  if (!status.ok()) return status;
  if (slot < run_.lo || slot >= run_.hi) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " of '", Name(parameter),
                                                   "': rank ", rank(), " has slots ", run_.lo,
                                                   " to ", run_.hi - 1));
  }
  if (initialising()) {
    return absl::FailedPreconditionError(
        "gradients before the weights are complete; upload them and call FinishUpload");
  }
  if (ended_) {
    return absl::FailedPreconditionError(absl::StrCat("a gradient of '", Name(parameter),
                                                      "' after EndStep; call WaitDecision first"));
  }
  return absl::OkStatus();
}

absl::StatusOr<void*> SessionImpl::AcquireGrad(size_t parameter, uint32_t slot) {
  void* buffer = nullptr;
  absl::Status status = RunVerb([&]() -> absl::Status {
    absl::Status checked = CheckGradCall(parameter, slot);
    if (!checked.ok()) return checked;
    absl::StatusOr<void*> got = publisher_->Acquire(parameter, slot);
    if (got.ok()) buffer = *got;
    return got.status();
  });
  if (!status.ok()) return status;
  return buffer;
}

absl::Status SessionImpl::ReadyGrad(size_t parameter, uint32_t slot) {
  return RunVerb([&] {
    absl::Status checked = CheckGradCall(parameter, slot);
    return checked.ok() ? publisher_->Ready(parameter, slot) : checked;
  });
}

RingPeer SessionImpl::MakeRingPeer() {
  RingPeer peer;
  peer.released = [this] {
    return parts_.daemon.segment->line().released.load(std::memory_order_acquire);
  };
  peer.doorbell = [this] {
    // Pairs with the daemon's fence between saying that it sleeps and its last look.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (parts_.daemon.segment->board().daemon_sleeps.load(std::memory_order_relaxed) == 1) {
      parts_.daemon.attach().RingDoorbell();
    }
  };
  peer.wait = [this](absl::FunctionRef<bool()> done) { return Await(done); };
  return peer;
}

absl::Status SessionImpl::CheckReport(const StepReport& report) const {
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat("EndStep of step ", next_step_, " by rank ", rank(), ": ", why));
  };
  if (report.slots.size() != run_.size()) {
    return refuse(
        absl::StrCat("it reports ", report.slots.size(), " slots; the rank has ", run_.size()));
  }
  if (!report.groups.empty() && report.groups.size() != parts_.job.groups.size()) {
    return refuse(absl::StrCat("it gives ", report.groups.size(), " parameter groups; the job has ",
                               parts_.job.groups.size()));
  }
  if (report.blob.size() > contract::kMaxBlobBytes) {
    return refuse(absl::StrCat("its blob has ", report.blob.size(), " bytes; at most ",
                               contract::kMaxBlobBytes, " are kept"));
  }
  std::vector<bool> absent(layout_.num_parameters(), false);
  for (size_t parameter : report.absent) {
    absl::Status status = CheckParameter(parameter);
    if (!status.ok()) return refuse(absl::StrCat("absent ", status.message()));
    if (publisher_->given(parameter)) {
      return refuse(absl::StrCat("parameter '", Name(parameter),
                                 "' is declared absent, but a gradient of it was given"));
    }
    absent[parameter] = true;
  }
  for (size_t p = 0; p < layout_.num_parameters(); ++p) {
    if (absent[p] || publisher_->given(p) || layout_.parameter_elements(p) == 0) continue;
    return refuse(absl::StrCat("parameter '", Name(p),
                               "' was neither given nor declared absent by rank ", rank(),
                               "; give its gradient, or name it in StepReport::absent"));
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::SendEndStep(const StepReport& report) {
  const std::vector<ParameterGroup>& groups = report.groups.empty() ? groups_ : report.groups;
  v1::EndStepRequest request;
  request.set_generation(generation_);
  request.set_step(next_step_);
  request.set_hyper_hash(HyperHash(groups));
  for (const SlotReport& slot : report.slots) {
    v1::SlotReport* added = request.add_slots();
    added->set_loss(slot.loss);
    added->set_tokens(slot.tokens);
  }
  for (size_t parameter : report.absent) request.add_absent(static_cast<uint32_t>(parameter));
  if (rank() == 0) {
    for (const ParameterGroup& group : groups) *request.add_groups() = ToProto(group);
    request.set_blob(report.blob);
  }
  absl::Status status = parts_.daemon.control->EndStep(std::move(request), kEndStepTimeout);
  if (absl::IsAborted(status)) {
    // The generation is over, or this session was refused: the board knows.
    absl::Status why = Explain(waiter().Check(generation_));
    return why.ok() ? status : why;
  }
  if (!status.ok()) return status;
  groups_ = groups;
  ended_ = true;
  return absl::OkStatus();
}

absl::Status SessionImpl::EndStep(const StepReport& report) {
  return RunVerb([&]() -> absl::Status {
    if (ended_) {
      return absl::FailedPreconditionError(absl::StrCat(
          "step ", next_step_, " was ended before; call WaitDecision to see what became of it"));
    }
    absl::Status status = CheckReport(report);
    if (status.ok()) status = publisher_->Finish();
    return status.ok() ? SendEndStep(report) : status;
  });
}

bool SessionImpl::TakeDecision(Decision* decision) {
  const WeightsSegment& segment = *parts_.daemon.segment;
  if (segment.board().committed_step.load(std::memory_order_acquire) < next_step_) return false;
  const std::optional<BoardDecision> news = segment.ReadDecision();
  if (!news) return false;
  decision->step = next_step_;
  decision->applied = news->applied;
  decision->result = static_cast<StepResult>(news->result);
  decision->reason = news->skip_reason;
  decision->loss = news->loss;
  decision->grad_norm = news->grad_norm;
  decision->loss_scale = news->loss_scale;
  decision->lr = news->lr;
  decision->lr.resize(std::min(news->lr.size(), groups_.size()));
  loss_scale_ = news->loss_scale;
  ended_ = false;
  publisher_->Begin(generation_, ++next_step_);
  retired_.clear();
  return true;
}

absl::StatusOr<Decision> SessionImpl::WaitDecision() {
  Decision decision;
  const auto taken = [&] { return TakeDecision(&decision); };
  const auto wait = [&]() -> absl::Status {
    if (!ended_) {
      return absl::FailedPreconditionError(
          absl::StrCat("WaitDecision before step ", next_step_, " was ended; call EndStep first"));
    }
    return Await(taken);
  };
  // A daemon that died after it decided has decided.
  absl::Status status = RunVerb(wait, [&] { return ended_ && taken(); });
  if (!status.ok()) return status;
  return decision;
}

}  // namespace shardd

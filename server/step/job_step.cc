// The step: gradients in, sums, the decision, the update.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/env/fault_guard.h"
#include "server/step/hyperparameters.h"
#include "server/step/job.h"
#include "server/step/schedule.h"

namespace shardd::step {

void Job::PollRing(Member* member) {
  // At most one queue's worth at a time, so that no rank keeps the others waiting.
  for (int i = 0; i < 256 && !member->evicted && member->ring != nullptr; ++i) {
    contract::Descriptor descriptor;
    absl::StatusOr<bool> next = false;
    Ring* ring = member->ring.get();
    if (env::RunGuarded([&] { next = ring->Next(&descriptor); }) != nullptr) {
      return Refuse(member, absl::DataLossError("the ring cannot be read: its memory is gone"));
    }
    if (!next.ok()) return Refuse(member, next.status());
    if (!*next) return;
    OnDescriptor(member, descriptor);
  }
}

void Job::OnDescriptor(Member* member, const contract::Descriptor& d) {
  if (d.job_tag != segments_->job_tag()) {
    return Refuse(member, absl::InvalidArgumentError(
                              "a descriptor carries the tag of another job or timeline"));
  }
  switch (static_cast<contract::DescriptorKind>(d.kind)) {
    case contract::DescriptorKind::kGrad:
      return OnGradient(member, d);
    case contract::DescriptorKind::kInit:
      return OnInit(member, d);
    case contract::DescriptorKind::kFrozen:
      return OnFrozen(member, d);
    case contract::DescriptorKind::kMoment:
      return OnMoment(member, d);
  }
  Refuse(member, absl::InvalidArgumentError(
                     absl::StrCat("a descriptor has the unknown kind ", int{d.kind})));
}

void Job::ReleaseDescriptor(Member* member, uint64_t index) {
  segments_->session_line(member->line)
      ->released.store(member->ring->Release(index), std::memory_order_release);
}

absl::Status Job::CheckGradient(const Member& member, const contract::Descriptor& d) const {
  const auto refuse = [&](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", member.rank, " of job '", name(), "' published ", what));
  };
  const uint64_t generation = segments_->header()->generation.load();
  if (d.generation != generation || !member.joined) {
    return refuse(
        absl::StrCat("for generation ", d.generation, ", but the group's is ", generation));
  }
  if (d.step != decider_.committed_step() + 1) {
    return refuse(absl::StrCat("for step ", d.step, ", but the job is at step ",
                               decider_.committed_step() + 1));
  }
  if (!upload_.complete()) return refuse("a gradient before the weights were uploaded");
  if (member.ended) return refuse(absl::StrCat("for step ", d.step, " after its EndStep"));
  if (d.bucket >= layout_.num_buckets()) {
    return refuse(absl::StrCat("bucket ", d.bucket, " of ", layout_.num_buckets()));
  }
  const contract::Range range = layout_.bucket_range(d.bucket);
  if (d.begin != range.begin || d.count != range.size()) {
    return refuse(absl::StrCat(d.count, " elements at ", d.begin, " as bucket ", d.bucket,
                               ", which has ", range.size(), " at ", range.begin));
  }
  const contract::SlotRange node{d.slot_lo, d.slot_hi};
  if (std::find(member.nodes.begin(), member.nodes.end(), node) == member.nodes.end()) {
    return refuse(absl::StrCat("slots ", d.slot_lo, "..", d.slot_hi,
                               ", which is no tree node of its own slots ", member.slots.lo, "..",
                               member.slots.hi));
  }
  const uint8_t dtype = node.size() == 1 ? static_cast<uint8_t>(config_.grad_dtype())
                                         : static_cast<uint8_t>(kernels::DType::kFloat32);
  if (d.dtype != dtype) {
    return refuse(absl::StrCat("dtype ", int{d.dtype}, " where dtype ", int{dtype}, " is due"));
  }
  const uint64_t bytes = d.count * kernels::DTypeSize(static_cast<kernels::DType>(dtype));
  if (d.data_offset % 64 != 0 || d.data_offset > member.ring->data_bytes() ||
      bytes > member.ring->data_bytes() - d.data_offset) {
    return refuse(absl::StrCat(bytes, " bytes at ", d.data_offset, " of a ring of ",
                               member.ring->data_bytes()));
  }
  return absl::OkStatus();
}

void Job::OnGradient(Member* member, const contract::Descriptor& d) {
  if (copy_ != nullptr) copy_->Hurry();
  const uint64_t index = member->ring->last_index();
  if (d.generation < segments_->header()->generation.load()) {
    ReleaseDescriptor(member, index);  // it has not seen the new generation yet
    return Wake();
  }
  if (absl::Status status = CheckGradient(*member, d); !status.ok()) {
    return Refuse(member, std::move(status));
  }
  if (SomeRankHasClosed() && !follows()) {
    finished_.clear();
    StoreFinished();
    return BreakGroup("a rank has closed and another goes on");
  }
  Contribution contribution;
  contribution.node = {d.slot_lo, d.slot_hi};
  contribution.dtype = static_cast<kernels::DType>(d.dtype);
  contribution.data = member->ring->data(d.data_offset);
  contribution.begin = d.begin;
  contribution.rank = member->rank;
  contribution.ring_index = index;
  switch (sums_.Add(d.bucket, contribution)) {
    case AddResult::kAdded:
      ++member->published;
      env_.failpoints->Reach("step.publish.after_descriptor");
      if (span_ != nullptr) OnLocalNodes(d.bucket);
      if (sums_.HasAllNodes(d.bucket)) FoldBucket(d.bucket);
      return;
    case AddResult::kDuplicate:
      ReleaseDescriptor(member, index);
      return Wake();
    case AddResult::kOverlaps:
      return Refuse(member, absl::InvalidArgumentError(absl::StrCat(
                                "rank ", member->rank, " published slots ", d.slot_lo, "..",
                                d.slot_hi, " of bucket ", d.bucket, ", which overlap others")));
  }
}

void Job::FoldBucket(uint64_t bucket) {
  if (SumsInUse()) return unfolded_.push_back(bucket);
  env_.failpoints->Reach("step.reduce.before");
  const void* fault = nullptr;
  absl::StatusOr<std::vector<Contribution>> folded =
      sums_.Fold(bucket, decider_.committed_step() + 1, &fault);
  if (!folded.ok()) {
    for (const auto& member : members_) {
      if (member->ring != nullptr && member->ring->Contains(fault)) {
        return Refuse(member.get(), absl::DataLossError("the ring's memory is gone"));
      }
    }
    return FailJob(
        absl::StrCat("bucket ", bucket, " cannot be summed: ", folded.status().message()));
  }
  env_.failpoints->Reach("step.reduce.after");
  if (durability_ != nullptr) {
    durability_->OnBucket(bucket, decider_.committed_step() + 1,
                          segments_->header()->generation.load());
  }
  for (const Contribution& c : *folded) {
    if (!c.daemon.empty()) continue;
    if (Member* member = AtRank(c.rank)) ReleaseDescriptor(member, c.ring_index);
  }
  Wake();
}

void Job::OnInit(Member* member, const contract::Descriptor& d) {
  const uint64_t index = member->ring->last_index();
  if (upload_.complete()) {
    return Refuse(member, absl::FailedPreconditionError(absl::StrCat(
                              "an upload to job '", name(), "', which has all of its weights")));
  }
  if (absl::Status status = upload_.Check(d.begin, d.count); !status.ok()) {
    return Refuse(member, std::move(status));
  }
  const uint64_t bytes = d.count * sizeof(float);
  if (d.dtype != static_cast<uint8_t>(kernels::DType::kFloat32) || d.data_offset % 64 != 0 ||
      d.data_offset > member->ring->data_bytes() ||
      bytes > member->ring->data_bytes() - d.data_offset) {
    return Refuse(member,
                  absl::InvalidArgumentError("an upload whose data is not fp32 in the ring"));
  }
  const std::byte* from = member->ring->data(d.data_offset);
  if (span_ != nullptr) {
    std::vector<float> values(d.count);  // others get copies of it
    if (env::RunGuarded([&] { std::memcpy(values.data(), from, d.count * 4); }) != nullptr) {
      return Refuse(member, absl::DataLossError("the ring's memory is gone"));
    }
    StoreInit(d.begin, d.count, values.data());
    ReleaseDescriptor(member, index);
    return Wake();
  }
  const void* fault = env::RunGuarded([&] {
    for (uint64_t at = 0; at < d.count;) {
      const uint64_t element = d.begin + at;
      const uint64_t chunk = element / layout_.chunk_elements();
      const uint64_t inside = element % layout_.chunk_elements();
      const uint64_t part = std::min(d.count - at, layout_.chunk_elements() - inside);
      segments_->chunk(chunk).Write(0, inside, part, reinterpret_cast<const float*>(from) + at);
      at += part;
    }
  });
  if (fault != nullptr) return Refuse(member, absl::DataLossError("the ring's memory is gone"));
  upload_.Mark(d.begin, d.count);
  ReleaseDescriptor(member, index);
  if (upload_.complete()) FinishInitialisation();
  Wake();
}

void Job::FinishInitialisation() {
  updater_.PublishMasters(decider_.committed_step(), decider_.table());
  segments_->header()->initialised.store(1, std::memory_order_release);
  board_.PublishDecision(CurrentNews());
  if (span_ != nullptr) {
    ExpectWeights();
  } else {
    board_.SetState(contract::BoardState::kReady);
  }
  if (durability_ != nullptr) durability_->AtBoundary(decider_.committed_step());
}

absl::Status Job::CheckEndStep(const Member& member, const v1::EndStepRequest& request) const {
  const std::string what = absl::StrCat("EndStep of step ", request.step(), " by rank ",
                                        member.rank, " of job '", name(), "'");
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", why));
  };
  if (request.generation() != segments_->header()->generation.load() || !member.joined) {
    return absl::AbortedError(
        absl::StrCat(what, ": generation ", request.generation(), " is over; Join again"));
  }
  if (request.step() != decider_.committed_step() + 1) {
    return refuse(absl::StrCat("the job is at step ", decider_.committed_step() + 1));
  }
  if (static_cast<uint32_t>(request.slots_size()) != member.slots.size()) {
    return refuse(absl::StrCat("it reports ", request.slots_size(), " slots; the rank has ",
                               member.slots.size()));
  }
  for (uint32_t p : request.absent()) {
    if (p >= layout_.num_parameters()) {
      return refuse(absl::StrCat("absent parameter ", p, " of ", layout_.num_parameters()));
    }
  }
  if (request.blob().size() > contract::kMaxBlobBytes) {
    return refuse(absl::StrCat("its trainer blob has ", request.blob().size(), " bytes; at most ",
                               contract::kMaxBlobBytes, " are kept"));
  }
  for (const auto& other : members_) {
    if (other.get() == &member || !other->live() || !other->ended) continue;
    if (other->hyper_hash != request.hyper_hash()) {
      return refuse(absl::StrCat("its hyper-parameters differ from those of rank ", other->rank,
                                 "; give the same lr, betas, eps and weight_decay on all ranks"));
    }
  }
  if (member.rank != 0) return absl::OkStatus();
  if (request.groups_size() != config_.groups_size()) {
    return refuse(absl::StrCat("it gives hyper-parameters of ", request.groups_size(),
                               " groups; the job has ", config_.groups_size()));
  }
  for (int g = 0; g < request.groups_size(); ++g) {
    absl::Status status =
        CheckHyperparameters(request.groups(g), *optimizer_, absl::StrCat("groups[", g, "]"));
    if (!status.ok()) return refuse(std::string(status.message()));
  }
  if (HashHyperparameters(request.groups()) != request.hyper_hash()) {
    return refuse("hyper_hash is not the hash of its groups");
  }
  return absl::OkStatus();
}

absl::Status Job::DoEndStep(const Session* session, v1::EndStepRequest* request) {
  absl::StatusOr<Member*> found = FindLive(session);
  if (!found.ok()) return found.status();
  if (failed_) return absl::FailedPreconditionError(failure_);
  if (drained_) return Draining();  // what it would take from the ring counts no more
  if (commit_.pending()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job '", name(), "': EndStep of step ", request->step(), " before step ",
                     decider_.committed_step(), " was told to be committed; wait for it"));
  }
  Member* member = *found;
  // What it published before this call; what it goes on publishing meanwhile has to wait.
  uint64_t published = 0;
  if (const Ring* ring = member->ring.get()) env::RunGuarded([&] { published = ring->head(); });
  while (member->ring != nullptr) {
    const uint64_t read = member->ring->last_index() + 1;
    if (static_cast<int64_t>(published - read) <= 0) break;
    PollRing(member);
    if (member->ring == nullptr || member->ring->last_index() + 1 == read) break;
  }
  if (member->evicted) return FindLive(session).status();
  if (span_ != nullptr && span_->awaiting_generation) {
    return absl::AbortedError(absl::StrCat("job '", name(), "': the group is over; Join again"));
  }
  if (running_group_ && SomeRankHasClosed() && !follows()) {
    finished_.clear();
    StoreFinished();
    BreakGroup("a rank has closed and another goes on");
  }
  if (absl::Status status = CheckEndStep(*member, *request); !status.ok()) {
    if (!absl::IsAborted(status)) env_.counters->refused_calls += 1;
    return status;
  }
  if (member->published < layout_.num_buckets() * member->nodes.size()) {
    const uint64_t bucket = member->published / member->nodes.size();
    const std::vector<contract::Run> runs = layout_.runs(layout_.bucket_range(bucket));
    return absl::InvalidArgumentError(
        absl::StrCat("EndStep of step ", request->step(), ": parameter '",
                     runs.empty() ? "" : layout_.parameter(runs.back().parameter).name,
                     "' was neither given nor declared absent by rank ", member->rank,
                     "; publish its bucket, or name it as absent"));
  }
  if (follows()) {
    v1::PeerMessage message;
    message.set_step(request->step());
    message.mutable_member_end()->set_session(member->session->nonce);
    *message.mutable_member_end()->mutable_request() = *request;
    message.mutable_member_end()->mutable_request()->clear_token();
    Tell(span_->coordinator, std::move(message));
  }
  AcceptEndStep(member, request);
  return absl::OkStatus();
}

void Job::AcceptEndStep(Member* member, v1::EndStepRequest* request) {
  member->ended = true;
  member->hyper_hash = request->hyper_hash();
  member->reports.assign(request->slots().begin(), request->slots().end());
  member->absent.assign(request->absent().begin(), request->absent().end());
  std::sort(member->absent.begin(), member->absent.end());
  member->absent.erase(std::unique(member->absent.begin(), member->absent.end()),
                       member->absent.end());
  if (member->rank == 0) {
    step_groups_.assign(request->groups().begin(), request->groups().end());
    step_blob_ = std::move(*request->mutable_blob());
  }
  if (step_started_ == absl::InfinitePast()) step_started_ = env_.now();
}

bool Job::Advance() {
  if (commit_.pending() || !running_group_ || failed_ || !upload_.complete() || !sums_.AllFolded())
    return false;
  if (follows()) {
    if (span_->preparing || span_->prepared_told || span_->awaiting_generation) return false;
    Prepare();
    return true;
  }
  if (span_ != nullptr && !OthersPrepared()) return false;
  uint32_t ended = 0;
  for (const auto& member : members_) ended += member->live() && member->ended ? 1 : 0;
  if (ended < world_size_) return false;
  BeginDecision();
  return true;
}

// What ranks and buckets together say of the step that all have ended.
StepInputs Job::GatherInputs() {
  StepInputs inputs;
  inputs.step = decider_.committed_step() + 1;
  inputs.generation = segments_->header()->generation.load();
  inputs.slots.resize(config_.slots());
  std::vector<uint32_t> absent(layout_.num_parameters(), 0);
  for (const auto& member : members_) {
    if (!member->live()) continue;
    std::copy(member->reports.begin(), member->reports.end(),
              inputs.slots.begin() + member->slots.lo);
    for (uint32_t p : member->absent) ++absent[p];
  }
  inputs.presence.assign((layout_.num_parameters() + 63) / 64, 0);
  for (size_t p = 0; p < absent.size(); ++p) {
    if (absent[p] < world_size_) inputs.presence[p / 64] |= uint64_t{1} << (p % 64);
  }
  inputs.groups = step_groups_;
  const double factor = LrFactor(running_.schedule(), decider_.applied() + 1);
  for (v1::Hyperparameters& group : inputs.groups) group.set_lr(group.lr() * factor);
  inputs.blob = std::move(step_blob_);
  inputs.sum_squares = sums_.SumSquares();
  inputs.nonfinite = sums_.nonfinite().what;
  if (span_ != nullptr && inputs.nonfinite.empty()) inputs.nonfinite = span_->nonfinite;
  inputs.unix_nanos = absl::ToUnixNanos(env_.now());
  return inputs;
}

void Job::SetTrustRatios(const StepInputs& inputs, float clip_factor,
                         std::span<contract::ParameterEntry> table) const {
  std::vector<kernels::Hyperparameters> groups;
  for (const v1::Hyperparameters& group : inputs.groups) groups.push_back(ToKernel(group));
  UpdateOrder order;
  order.clip_factor = clip_factor;
  order.presence = inputs.presence;
  updater_.SetTrustRatios(order, groups, table);
}

void Job::BeginDecision() {
  env_.failpoints->Reach("step.decide.before");
  if (optimizer_->has_trust_ratio() && updater_.owned().size() < layout_.num_chunks()) {
    return FailJob(absl::StrCat("optimizer ", config_.optimizer(),
                                " cannot be used by a job whose chunks daemons share"));
  }
  commit_.outcome = decider_.Decide(GatherInputs());
  commit_.phase = CommitPhase::kRecorded;
  env_.failpoints->Reach("step.decide.after_record");
  ForgetStep();
  MakeDurable();
}

void Job::FinishDecision() {
  const StepOutcome outcome = std::move(commit_.outcome);
  commit_ = PendingCommit();
  if (coordinates()) {
    env_.failpoints->Reach("peer.decision.before_send");
    for (const std::string& daemon : Participants()) {
      TellDecision(daemon, std::string(outcome.failure.message()));
    }
  }
  DecisionNews news;
  news.committed_step = outcome.record.step;
  news.applied = outcome.record.applied;
  news.result = outcome.record.result;
  news.loss = outcome.record.loss;
  news.grad_norm = outcome.record.grad_norm;
  news.loss_scale = outcome.next_loss_scale;
  news.clip_factor = outcome.clip_factor;
  news.skip_reason = outcome.record.reason;
  news.lr = decider_.lr();
  if (!outcome.apply) {
    env_.log(absl::StrCat("job ", name(), ": step ", news.committed_step,
                          " is skipped: ", news.skip_reason));
  }
  if (!outcome.failure.ok()) FailJob(std::string(outcome.failure.message()));
  board_.PublishDecision(news);
  env_.failpoints->Reach("step.update.before");
  if (outcome.apply) {
    UpdateOrder order;
    order.step = news.committed_step;
    order.applied = news.applied;
    order.clip_factor = outcome.clip_factor;
    order.table = decider_.table();
    order.presence = decider_.current().presence;
    updater_.Run(order, [this] { Wake(); });
    if (span_ != nullptr) WeightsUpdated();
  } else if (span_ != nullptr) {
    MarkReady({0, layout_.flat_elements()});
  } else {
    for (uint64_t b = 0; b < layout_.num_buckets(); ++b) {
      segments_->bucket_line(b)->ready_step.store(news.committed_step, std::memory_order_release);
    }
    Wake();
  }
  env_.failpoints->Reach("step.update.after");
  StartDueCopy();
  if (durability_ != nullptr) durability_->AtBoundary(decider_.committed_step());
}

void Job::ForgetStep() {
  sums_.Clear();
  unfolded_.clear();
  if (span_ != nullptr) ForgetSpanStep();
  for (const auto& member : members_) member->ForgetStep();
  step_groups_.clear();
  step_blob_.clear();
  step_started_ = absl::InfinitePast();
}

void Job::FailJob(const std::string& reason) {
  env_.log(absl::StrCat("job ", name(), " failed: ", reason));
  failed_ = true;
  failure_ = reason;
  contract::JobHeader* header = segments_->header();
  const size_t n = std::min(reason.size(), sizeof(header->failure) - 1);
  std::memcpy(header->failure, reason.data(), n);
  const bool news = header->failed.exchange(1, std::memory_order_release) == 0;
  board_.Fail(reason);
  if (durability_ != nullptr) durability_->OnFailure();
  if (span_ == nullptr || !news || epoll_ < 0) return;
  v1::PeerMessage message;
  message.mutable_failed()->set_reason(reason);
  TellOthers(message);
}

}  // namespace shardd::step

// What a job answers without changing.
#include <algorithm>
#include <cstring>
#include <future>

#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

v1::StepRecord Job::ToProto(const contract::StepRecordEntry& entry) {
  v1::StepRecord record;
  record.set_step(entry.step);
  record.set_applied(entry.applied);
  record.set_generation(entry.generation);
  record.set_result(static_cast<v1::StepResult>(entry.result));
  record.set_loss(entry.loss);
  record.set_grad_norm(entry.grad_norm);
  record.set_loss_scale(entry.loss_scale);
  record.set_lr(entry.lr);
  record.set_tokens(entry.tokens);
  record.set_reason(entry.reason);
  record.set_unix_nanos(entry.unix_nanos);
  return record;
}

absl::StatusOr<v1::FillWindowReply> Job::DoFillWindow(const Session* session,
                                                      const v1::FillWindowRequest& request) {
  Member* member = Find(session);
  if (member == nullptr || member->window == nullptr) {
    return absl::FailedPreconditionError("this session has no window; attach a ring first");
  }
  if (request.kind() == v1::STATE_FROZEN) {
    if (request.count() > member->window->bytes()) {
      return absl::InvalidArgumentError(absl::StrCat(request.count(), " bytes; a window takes ",
                                                     member->window->bytes(), " at a time"));
    }
    const std::span<std::byte> out(reinterpret_cast<std::byte*>(member->window->data()),
                                   request.count());
    absl::Status status = segments_->ReadFrozen(request.parameter(), request.offset(), out);
    if (!status.ok()) return status;
    v1::FillWindowReply reply;
    reply.set_committed_step(decider_.committed_step());
    return reply;
  }
  if (request.parameter() >= layout_.num_parameters()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", request.parameter(), " of ", layout_.num_parameters()));
  }
  const contract::Range range = layout_.parameter_range(request.parameter());
  if (request.offset() > range.size() || request.count() > range.size() - request.offset() ||
      request.count() > member->window->bytes() / sizeof(float)) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.count(), " elements at ", request.offset(), " of parameter '",
                     layout_.parameter(request.parameter()).name, "', which has ", range.size(),
                     "; a window takes ", member->window->bytes() / sizeof(float), " at a time"));
  }
  const int moment = request.kind() - v1::STATE_MOMENT_0;
  if (request.kind() < v1::STATE_MASTER || moment >= optimizer_->num_states()) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer ", config_.optimizer(), " has no state of kind ", request.kind()));
  }
  for (uint64_t at = 0; at < request.count();) {
    const uint64_t element = range.begin + request.offset() + at;
    const uint64_t inside = element % layout_.chunk_elements();
    const uint64_t part = std::min(request.count() - at, layout_.chunk_elements() - inside);
    const store::ChunkView view = segments_->chunk(element / layout_.chunk_elements());
    const auto array = static_cast<size_t>(request.kind() - v1::STATE_MASTER);
    view.Read(array, inside, part, member->window->data() + at);
    at += part;
  }
  v1::FillWindowReply reply;
  // The state that was copied: a decision that is pending has updated nothing yet.
  reply.set_committed_step(VisibleStep());
  reply.set_parameter_applied(VisibleTable()[request.parameter()].applied);
  return reply;
}

v1::SessionErrorReply Job::DoExplainWait(const Session* session) {
  v1::SessionErrorReply reply;
  absl::StatusOr<Member*> member = FindLive(session);
  if (!member.ok()) {
    reply.set_code(static_cast<int>(member.status().code()));
    reply.set_message(std::string(member.status().message()));
    return reply;
  }
  reply.set_code(static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  const uint64_t step = decider_.committed_step() + 1;
  if (!upload_.complete()) {
    reply.set_message(absl::StrCat("job '", name(), "': parameter '", upload_.FirstMissing(),
                                   "' has not been uploaded by any rank"));
  } else if (commit_.pending() && durability_ != nullptr) {
    reply.set_message(
        absl::StrCat("job '", name(), "': step ", step - 1,
                     " is computed and waits for its journal: ", durability_->Stall()));
  } else if (follows() || (span_ != nullptr && !OthersPrepared())) {
    reply.set_message(absl::StrCat("job '", name(), "': step ", step, " ", ExplainSpan(step)));
  } else if (!running_group_) {
    reply.set_message(
        absl::StrCat("job '", name(), "': the rank group is not formed: missing ",
                     MissingRanks([](const Member& m) { return m.joined || m.join != nullptr; })));
  } else {
    reply.set_message(absl::StrCat("job '", name(), "': step ", step, " waits for EndStep of ",
                                   MissingRanks([](const Member& m) { return m.ended; }),
                                   "; look at those processes"));
  }
  return reply;
}

void Job::PublishGroups(v1::JobStatus* status) const {
  for (size_t g = 0; g < group_sizes_.size(); ++g) {
    v1::GroupStatus* group = status->add_groups();
    group->set_name(config_.groups(static_cast<int>(g)).name());
    group->set_lr(decider_.current().groups[g].lr);
    group->set_weight_decay(decider_.current().groups[g].weight_decay);
    group->set_parameters(group_sizes_[g].parameters);
    group->set_elements(group_sizes_[g].elements);
  }
}

void Job::Publish() {
  v1::JobStatus s;
  s.set_name(name());
  s.set_job_id(job_id_);
  s.set_uid(uid_);
  s.set_failure(failure_);
  const uint64_t committed = VisibleStep();
  const auto records = log_.Records(committed, committed);
  s.set_committed_step(committed);
  s.set_applied(!commit_.pending() ? decider_.applied()
                : records.empty()  ? 0
                                   : records.back().applied);
  s.set_generation(segments_->header()->generation.load());
  s.set_world_size(world_size_);
  s.set_slots(config_.slots());
  *s.mutable_config() = running_;
  s.set_parameters(layout_.num_parameters());
  s.set_elements(layout_.trainable_elements());
  s.set_chunks(layout_.num_chunks());
  s.set_buckets(layout_.num_buckets());
  s.set_state_bytes(segments_->plan().state_bytes + segments_->plan().job_bytes);
  s.set_weights_bytes(segments_->plan().weights_bytes);
  s.set_reduced_bytes(segments_->plan().reduced_bytes);
  s.set_ring_bytes(ring_bytes_.load());
  s.set_skipped_steps(decider_.skipped_steps());
  s.set_consecutive_skips(decider_.consecutive_skips());
  s.set_recomputed_steps(segments_->header()->recomputed_steps.load());
  s.set_regroups(segments_->header()->regroups.load());
  s.set_loss_scale(decider_.loss_scale());
  if (committed > 0 && !records.empty()) *s.mutable_last() = ToProto(records.back());
  PublishGroups(&s);
  const absl::Time now = env_.now();
  bool any = false;
  for (const auto& member : members_) {
    if (!member->live()) continue;
    any = true;
    v1::SessionStatus* session = s.add_sessions();
    session->set_rank(member->rank);
    session->set_daemon(member->daemon);
    session->set_pid(member->session->pid);
    session->set_heartbeat_age_seconds(absl::ToDoubleSeconds(now - member->heartbeat_at));
    session->set_state(Lapsed(*member) ? "lapsed" : member->joined ? "running" : "joining");
  }
  if (!any) s.set_idle_seconds(absl::ToDoubleSeconds(now - idle_since_));
  s.set_state(failed_               ? "failed"
              : !upload_.complete() ? "initialising"
              : running_group_      ? "running"
              : any                 ? "forming"
                                    : "idle");
  if (running_.weights() == v1::shared && running_.stage() >= 2) {
    s.set_remark("with weights = shared, stages 2 and 3 do not differ on one node");
  }
  FillJournalStatus(&s);
  const double threads = static_cast<double>(env_.pool->threads());
  s.set_checkpoint_stall_seconds(past_stall_seconds_ + (copy_ ? copy_->stall_seconds() : 0));
  s.set_checkpoint_copy_seconds(past_copy_seconds_ + (copy_ ? copy_->copy_seconds() / threads : 0));
  if (span_ != nullptr) PublishSpan(&s);
  published_at_ = now;
  std::lock_guard lock(status_mutex_);
  if (span_ != nullptr) published_placement_ = span_->placement;
  FillCheckpointStatus(&s);
  status_ = std::move(s);
}

v1::JobStatus Job::Status() const {
  std::lock_guard lock(status_mutex_);
  return status_;
}

v1::JobStatus Job::FreshStatus(absl::Duration timeout) {
  auto published = std::make_shared<std::promise<void>>();
  std::future<void> done = published->get_future();
  Post([this, published] {
    Publish();
    published->set_value();
  });
  done.wait_for(absl::ToChronoMilliseconds(timeout));
  return Status();
}

v1::ListShardsReply Job::Shards() const {
  v1::ListShardsReply reply;
  const v1::JobStatus status = Status();
  const uint32_t world = std::max<uint32_t>(status.world_size(), 1);
  Placement placement;
  {
    std::lock_guard lock(status_mutex_);
    placement = published_placement_;
  }
  for (uint32_t rank = 0; rank < world; ++rank) {
    const contract::Range chunks = layout_.shard_chunks(rank, world);
    v1::Shard* shard = reply.add_shards();
    shard->set_rank(rank);
    shard->set_first_chunk(chunks.begin);
    shard->set_chunks(chunks.size());
    shard->set_bytes(chunks.size() * segments_->record_bytes());
    const std::vector<contract::Run> runs = layout_.runs(layout_.shard_range(rank, world));
    uint64_t elements = 0;
    for (const contract::Run& run : runs) elements += run.range.size();
    shard->set_elements(elements);
    if (!runs.empty()) {
      shard->set_first_parameter(layout_.parameter(runs.front().parameter).name);
      shard->set_last_parameter(layout_.parameter(runs.back().parameter).name);
    }
    if (!chunks.empty()) shard->set_daemon(placement.OwnerOf(chunks.begin));
    if (!status.daemon().empty() && shard->daemon() != status.daemon()) {
      shard->set_min_applied(status.applied());  // what its daemon is to carry
      shard->set_max_applied(status.applied());
      continue;
    }
    uint64_t low = ~uint64_t{0}, high = 0;
    for (uint64_t c = chunks.begin; c < chunks.end; ++c) {
      const uint64_t applied = segments_->chunk(c).header->applied.load(std::memory_order_acquire);
      low = std::min(low, applied);
      high = std::max(high, applied);
    }
    shard->set_min_applied(chunks.empty() ? 0 : low);
    shard->set_max_applied(high);
  }
  return reply;
}

}  // namespace shardd::step

// How jobs are made: by a client's Open, or from files.
#include <sys/random.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/control/job_registry.h"
#include "server/control/job_spec.h"

namespace shardd::control {

namespace {

uint64_t RandomU64() {
  uint64_t value = 0;
  while (value == 0 && getrandom(&value, sizeof(value), 0) < 0) {
  }
  return value;
}

}  // namespace

absl::StatusOr<std::shared_ptr<step::Job>> JobRegistry::Create(const step::Session& session,
                                                               const v1::OpenRequest& request,
                                                               const FoundJob* found) {
  absl::StatusOr<contract::Layout> layout = MakeLayout(request);
  if (!layout.ok()) return layout.status();
  store::JobSpec spec;
  spec.config = request.config();
  v1::OpenRequest parameters;
  *parameters.mutable_parameters() = request.parameters();
  *parameters.mutable_frozen() = request.frozen();
  spec.parameters = parameters.SerializeAsString();
  spec.uid = session.uid;
  spec.moments = kernels::FindOptimizer(request.config().optimizer())->num_states();
  absl::StatusOr<std::vector<uint64_t>> frozen = store::FrozenBytes(request);
  if (!frozen.ok()) return frozen.status();
  spec.frozen_bytes = *std::move(frozen);
  FillFunction fill;
  if (found != nullptr) {
    spec.config = found->said.config();
    spec.parameters = found->said.parameters();
    spec.uid = found->said.uid();
    std::copy(found->job_id.begin(), found->job_id.end(), spec.job_id.begin());
    spec.timeline = found->timeline;
  } else if (initial_state_) {
    absl::StatusOr<FillFunction> state =
        initial_state_(request.config().name(), parameters, *layout, session.uid);
    if (!state.ok()) return state.status();
    fill = *std::move(state);
  }
  return MakeJob(std::move(spec), *std::move(layout), fill, found);
}

absl::StatusOr<std::shared_ptr<step::Job>> JobRegistry::MakeJob(store::JobSpec spec,
                                                                contract::Layout layout,
                                                                const FillFunction& fill,
                                                                const FoundJob* found) {
  const std::string name = spec.config.name();
  {
    std::lock_guard lock(mutex_);
    if (jobs_.size() + busy_.size() > max_jobs_) {  // this one is among the busy
      return absl::ResourceExhaustedError(
          absl::StrCat("the daemon has ", jobs_.size(), " jobs (limits.jobs); delete some"));
    }
  }
  const std::vector<std::string> lying = directory_->JobNames();
  if (std::find(lying.begin(), lying.end(), name) != lying.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the state directory holds job '", name, "' of an earlier daemon at ",
                     directory_->JobPath(name),
                     "; choose another name, or remove that directory to give it up"));
  }
  if (absl::Status status = CheckNoJournal(name); !status.ok()) return status;
  if (absl::Status status = CheckMirror(spec.config); !status.ok()) return status;
  if (links_ != nullptr && kernels::FindOptimizer(spec.config.optimizer())->has_trust_ratio()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job '", name, "': optimizer ", spec.config.optimizer(),
        " needs the norm of each whole parameter before its update, which daemons with peers do "
        "not exchange; use a daemon without peers, or another optimizer"));
  }
  spec.config_hash = ConfigHash(spec.config);
  if (found == nullptr) {
    if (getrandom(spec.job_id.data(), spec.job_id.size(), 0) < 0) {
      return absl::InternalError("cannot make a job id");
    }
    spec.timeline = RandomU64();
  }
  // Of a job that daemons may share, each holds what its ranks make its own; one that begins with a
  // state has it here at first.
  spec.sparse = links_ != nullptr && !fill;
  const store::SegmentPlan plan = store::PlanSegments(layout, spec, directory_->page_bytes());
  const uint64_t later = spec.sparse ? store::ChunkBytes(layout, spec) * layout.num_chunks() : 0;
  const uint64_t bytes = plan.total() - std::min(plan.total(), later);
  absl::StatusOr<env::BudgetLease> lease =
      budget_->Reserve(bytes, absl::StrCat("job '", name, "'"));
  if (!lease.ok()) return lease.status();
  absl::StatusOr<std::unique_ptr<store::JobSegments>> segments = store::JobSegments::Create(
      *directory_, layout, spec, [&](store::JobSegments* built) -> absl::Status {
        if (fill) {
          if (absl::Status status = fill(built); !status.ok()) return status;
        }
        environment_.failpoints->Reach("job.create.before_rename");
        return absl::OkStatus();
      });
  if (!segments.ok()) return segments.status();
  const bool filled = (*segments)->header()->initialised.load() != 0;
  absl::Status status;
  std::unique_ptr<step::Span> span;
  if (spec.sparse) {
    v1::JobPeers peers;
    peers.set_coordinator(found != nullptr ? found->said.coordinator() : links_->self());
    peers.set_epoch(1);
    status = step::WriteJobPeers(directory_->JobPath(name), peers);
    span = MakeSpan(peers, layout.num_chunks(), &status);
  } else {
    span = MakeSpanAlone(**segments, layout.num_chunks(), nullptr, &*lease, &status);
  }
  const std::string id(reinterpret_cast<const char*>(spec.job_id.data()), spec.job_id.size());
  auto job = std::make_shared<step::Job>(environment_, std::move(layout), spec.config,
                                         *std::move(segments), *std::move(lease), spec.uid,
                                         absl::BytesToHexString(id));
  // The journal of a job that begins with a state begins with that state.
  if (span != nullptr) status = job->SpanWith(std::move(span));
  if (status.ok()) status = filled ? AdoptJournal(job.get()) : CreateJournal(job.get());
  if (status.ok() && filled) status = job->Recover();
  if (!status.ok()) {
    job.reset();
    RemoveJournal(name).IgnoreError();
    store::RemoveJobDirectory(directory_->JobPath(name)).IgnoreError();
    return status;
  }
  job->Start();
  KeepDescriptors(name);
  environment_.log(absl::StrCat("job ", name, ": created for uid ", spec.uid, ", ",
                                job->layout().trainable_elements(), " elements, ", bytes,
                                " bytes"));
  return job;
}

absl::Status JobRegistry::Make(store::JobSpec spec, const contract::Layout& layout,
                               const FillFunction& fill) {
  const std::string name = spec.config.name();
  if (BestDurability() != v1::node || !CheckMirror(spec.config).ok()) {
    spec.config.clear_durability();
  }
  if (absl::Status status = CompleteJobConfig(BestDurability(), &spec.config); !status.ok()) {
    return status;
  }
  if (draining_) return absl::UnavailableError("the daemon is being drained; ask its successor");
  {
    std::lock_guard lock(mutex_);
    if (jobs_.contains(name) || busy_.contains(name) || spilled_.contains(name)) {
      return absl::AlreadyExistsError(absl::StrCat(
          "job '", name, "' exists; delete it (shardctl job delete ", name, ") or replace it"));
    }
    busy_[name];
  }
  absl::StatusOr<std::shared_ptr<step::Job>> made = MakeJob(std::move(spec), layout, fill, nullptr);
  for (auto& task : EndBusy(name, made.ok() ? *made : nullptr)) tasks_.Post(std::move(task));
  return made.status();
}

}  // namespace shardd::control

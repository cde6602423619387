// Manager::Save.
#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/manager_parts.h"
#include "server/checkpoint/owner.h"

namespace shardd::checkpoint {

namespace {

constexpr uint64_t kDefaultFileBytes = uint64_t{4} << 30;

int Percent(const v1::CheckpointProgress& p) {
  return p.total_bytes() == 0 ? 0 : static_cast<int>(100 * p.done_bytes() / p.total_bytes());
}

}  // namespace

std::shared_ptr<Operation> Manager::Save(Caller caller, v1::SaveCheckpointRequest request,
                                         Report report, Done done) {
  // What is reported goes to the job's status too.
  auto job = options_.jobs->Find(request.job(), caller.uid, caller.privileged);
  const std::weak_ptr<step::Job> status_of = job.ok() ? *job : nullptr;
  const auto also_to_status = [report, status_of](const v1::CheckpointProgress& progress) {
    if (const auto job = status_of.lock(); job != nullptr && progress.stage() == "writing") {
      step::CheckpointReport of_job = job->LastCheckpoint();
      of_job.state = absl::StrCat("saving step ", progress.step(), ", ", Percent(progress), " %");
      if (!progress.finished()) job->ReportCheckpoint(std::move(of_job));
    }
    report(progress);
  };
  return Begin(request.job(), also_to_status, std::move(done),
               [this, caller, request](const auto& operation, const Done& early) {
                 return RunSave(caller, request, operation, early);
               });
}

absl::Status Manager::RunSave(Caller caller, const v1::SaveCheckpointRequest& request,
                              const std::shared_ptr<Operation>& operation, const Done& early) {
  if (absl::Status s = CheckConfigured(); !s.ok()) return s;
  absl::StatusOr<std::shared_ptr<step::Job>> job =
      options_.jobs->Find(request.job(), caller.uid, caller.privileged);
  if (!job.ok()) return job.status();
  absl::StatusOr<std::unique_ptr<Claim>> claim = Claim::Take(this, request.job(), operation);
  if (!claim.ok()) return claim.status();
  absl::Status status = SaveJob(*job, request, operation, early);
  if (operation->cancelled() && !status.ok()) status = operation->CancelledStatus();
  step::CheckpointReport report = (*job)->LastCheckpoint();
  report.state.clear();
  report.failure = status.ok() ? "" : std::string(status.message());
  if (status.ok()) {
    report.step = operation->progress().step();
    report.path = operation->progress().path();
  }
  (*job)->ReportCheckpoint(std::move(report));
  options_.log(status.ok()
                   ? absl::StrCat("job ", request.job(), ": step ", operation->progress().step(),
                                  " saved to ", operation->progress().path())
                   : absl::StrCat("job ", request.job(), ": not saved: ", status.message()));
  return status;
}

absl::Status Manager::PrepareDirectory(const step::Job& job) {
  const std::string directory = JobDirectory(job.name());
  absl::Status status = env::MakeDirectories(options_.files, directory);
  if (status.ok()) status = OpenDirectoryToAll(options_.config.directory());
  if (status.ok()) status = OpenDirectoryToAll(directory);
  if (!status.ok()) return status;
  absl::StatusOr<int> leftovers = RemoveLeftovers(options_.files, directory);
  if (!leftovers.ok()) return leftovers.status();
  if (*leftovers > 0) {
    options_.log(absl::StrCat("job ", job.name(), ": removed ", *leftovers,
                              " unfinished checkpoints of earlier saves"));
  }
  return absl::OkStatus();
}

// A job that is deleted meanwhile cancels its copy, and with it this.
absl::Status Manager::SaveJob(const std::shared_ptr<step::Job>& job,
                              const v1::SaveCheckpointRequest& request,
                              const std::shared_ptr<Operation>& operation, const Done& early) {
  if (absl::Status s = PrepareDirectory(*job); !s.ok()) return s;
  // Before anything is begun: what is too large is said at once.
  absl::Status status =
      CheckSpace(options_.files, JobDirectory(job->name()),
                 EstimateBytes(job->layout(), job->created_config(), job->parameters()));
  if (!status.ok()) return status;
  absl::StatusOr<Copy> copy =
      TakeCopy(job, request.at_step(), false, request.rate_bytes_per_second() != 0, operation);
  if (!copy.ok()) return copy.status();
  if (request.detach()) early(absl::OkStatus());
  WriteOptions write;
  write.files = options_.files;
  write.failpoints = options_.failpoints;
  write.job_directory = JobDirectory(job->name());
  write.writer = options_.version;
  write.file_bytes_max =
      options_.config.file_bytes_max() != 0 ? options_.config.file_bytes_max() : kDefaultFileBytes;
  write.rate_bytes_per_second = request.rate_bytes_per_second();
  write.read_frozen = [&](size_t index, uint64_t begin, std::span<std::byte> out) {
    return job->segments().ReadFrozen(index, begin, out);
  };
  absl::StatusOr<std::string> path = WriteCheckpoint(write, copy->copy.get(), operation.get());
  operation->Update([&](v1::CheckpointProgress* p) {
    p->set_stall_seconds(copy->copy->stall_seconds());
    if (path.ok()) p->set_path(*path);
  });
  if (!path.ok()) return path.status();
  return RemoveOldSteps(options_.files, write.job_directory, request.keep());
}

absl::StatusOr<Manager::Copy> Manager::TakeCopy(const std::shared_ptr<step::Job>& job,
                                                uint64_t at_step, bool masters_only, bool patient,
                                                const std::shared_ptr<Operation>& operation) {
  const int moments = job->moments();
  const uint64_t slot = step::StateCopy::SlotBytes(job->layout(), moments, masters_only);
  const uint64_t state = slot * std::max<uint64_t>(job->layout().num_chunks(), 1);
  const uint64_t staging = masters_only ? 0 : StagingBytes(job->created_config());
  const std::string what = absl::StrCat("the save of job '", job->name(), "'");
  Copy taken;
  uint64_t bytes = std::min(
      options_.config.pool_bytes() != 0 ? std::max(options_.config.pool_bytes(), slot) : state,
      state);
  if (options_.config.pool_bytes() == 0) {
    const uint64_t used = options_.budget->used() + staging, limit = options_.budget->limit();
    bytes = std::max(std::min(bytes, limit - std::min(used, limit)) / slot * slot, slot);
  }
  absl::StatusOr<env::BudgetLease> lease = options_.budget->Reserve(bytes + staging, what);
  if (!lease.ok()) return lease.status();
  taken.lease = *std::move(lease);
  step::StateCopy::Options options;
  absl::StatusOr<std::shared_ptr<step::CopyPool>> pool = step::CopyPool::Create(bytes);
  if (!pool.ok()) return pool.status();
  options.pool = *std::move(pool);
  if (patient) options.pool->Populate();
  options.lazy = !patient;
  options.masters_only = masters_only;
  Awaited<std::shared_ptr<step::StateCopy>> awaited;
  job->BeginCopy(options, at_step, awaited.Callback());
  const std::weak_ptr<step::Job> weak = job;
  operation->OnCancel([weak] {
    if (const auto alive = weak.lock()) alive->CancelDueCopy();
  });
  absl::StatusOr<std::shared_ptr<step::StateCopy>> copy = awaited.Wait();
  if (!copy.ok()) return copy.status();
  taken.job = job;
  taken.copy = *std::move(copy);
  // Each ends the other: a job that goes takes its copy along, and whoever waits to write it.
  const std::weak_ptr<step::StateCopy> weak_copy = taken.copy;
  operation->OnCancel([weak_copy] {
    if (const auto alive = weak_copy.lock()) alive->Cancel();
  });
  const std::weak_ptr<Operation> weak_operation = operation;
  taken.copy->OnCancel([weak_operation] {
    if (const auto alive = weak_operation.lock()) alive->Cancel();
  });
  operation->Update([&](v1::CheckpointProgress* p) {
    p->set_stage("copying");
    p->set_step(taken.copy->snapshot().decision.header.step);
    if (bytes < state) {
      p->add_remarks(absl::StrCat("the pool holds ", bytes, " of ", state,
                                  " bytes of state: steps may wait for the save (raise "
                                  "checkpoint.pool_bytes or memory.budget_bytes)"));
    }
  });
  return taken;
}

}  // namespace shardd::checkpoint

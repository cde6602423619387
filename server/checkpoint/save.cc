// Manager::Save.
#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/manager_parts.h"
#include "server/checkpoint/owner.h"

namespace shardd::checkpoint {

namespace {

constexpr uint64_t kDefaultFileBytes = uint64_t{4} << 30;
constexpr absl::Duration kStatusTime = absl::Seconds(10);

int Percent(const v1::CheckpointProgress& p) {
  return p.total_bytes() == 0 ? 0 : static_cast<int>(100 * p.done_bytes() / p.total_bytes());
}

using Writers = std::vector<std::unique_ptr<CheckpointWriter>>;

void EndCancelled(const std::shared_ptr<step::SpanSave>& save) {
  if (save != nullptr) save->End(absl::CancelledError("the save was cancelled"));
}

// Each ends the other.
void EndWith(const std::shared_ptr<Operation>& operation,
             const std::shared_ptr<step::SpanSave>& save) {
  operation->OnCancel([save] { EndCancelled(save); });
  const std::weak_ptr<Operation> weak = operation;
  save->OnEnd([weak] {
    if (const auto alive = weak.lock()) alive->Cancel();
  });
}

absl::Status WriteParts(const WriteOptions& write, step::StateCopy* copy, Operation* operation,
                        Writers* writers) {
  for (const step::StateSnapshot::Part& part : copy->snapshot().parts) {
    absl::StatusOr<std::unique_ptr<CheckpointWriter>> writer =
        CheckpointWriter::Create(write, copy, part, operation);
    if (!writer.ok()) return writer.status();
    writers->push_back(*std::move(writer));
    if (absl::Status status = writers->back()->Write(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PublishParts(const Writers& writers, Operation* operation) {
  for (const auto& writer : writers) {
    absl::StatusOr<std::string> path = writer->Publish();
    if (!path.ok()) return path.status();
    operation->Update([&](v1::CheckpointProgress* p) { p->set_path(*path); });
  }
  return absl::OkStatus();
}

}  // namespace

// What is reported goes to the job's status too.
Manager::Report Manager::AlsoToStatus(const std::shared_ptr<step::Job>& job, Report report) const {
  const std::weak_ptr<step::Job> status_of = job;
  return [report, status_of](const v1::CheckpointProgress& progress) {
    if (const auto job = status_of.lock(); job != nullptr && progress.stage() == "writing") {
      step::CheckpointReport of_job = job->LastCheckpoint();
      of_job.state = absl::StrCat("saving step ", progress.step(), ", ", Percent(progress), " %");
      if (!progress.finished()) job->ReportCheckpoint(std::move(of_job));
    }
    report(progress);
  };
}

std::shared_ptr<Operation> Manager::Save(Caller caller, v1::SaveCheckpointRequest request,
                                         Report report, Done done) {
  auto job = options_.jobs->Find(request.job(), caller.uid, caller.privileged);
  return Begin(request.job(), AlsoToStatus(job.ok() ? *job : nullptr, std::move(report)),
               std::move(done), [this, caller, request](const auto& operation, const Done& early) {
                 return RunSave(caller, request, operation, early);
               });
}

void Manager::ReportSave(step::Job* job, const absl::Status& status, const Operation& operation) {
  const v1::CheckpointProgress progress = operation.progress();
  step::CheckpointReport report = job->LastCheckpoint();
  report.state.clear();
  report.failure = status.ok() ? "" : std::string(status.message());
  if (status.ok()) {
    report.step = progress.step();
    report.path = progress.path();
  }
  job->ReportCheckpoint(std::move(report));
  options_.log(status.ok() ? absl::StrCat("job ", job->name(), ": step ", progress.step(),
                                          " saved to ", progress.path())
                           : absl::StrCat("job ", job->name(), ": not saved: ", status.message()));
}

absl::Status Manager::RunSave(Caller caller, const v1::SaveCheckpointRequest& request,
                              const std::shared_ptr<Operation>& operation, const Done& early) {
  if (absl::Status s = CheckConfigured(); !s.ok()) return s;
  absl::StatusOr<std::shared_ptr<step::Job>> job =
      options_.jobs->Find(request.job(), caller.uid, caller.privileged);
  if (!job.ok()) return job.status();
  absl::StatusOr<std::unique_ptr<Claim>> claim = Claim::Take(this, request.job(), operation);
  if (!claim.ok()) return claim.status();
  const absl::Status status = SaveJob(*job, request, operation, early);
  ReportSave(job->get(), status, *operation);
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

WriteOptions Manager::WriteOptionsOf(const step::Job& job, uint64_t rate_bytes_per_second) const {
  WriteOptions write;
  write.files = options_.files;
  write.failpoints = options_.failpoints;
  write.job_directory = JobDirectory(job.name());
  write.writer = options_.version;
  write.file_bytes_max =
      options_.config.file_bytes_max() != 0 ? options_.config.file_bytes_max() : kDefaultFileBytes;
  write.rate_bytes_per_second = rate_bytes_per_second;
  write.read_frozen = [&job](size_t index, uint64_t begin, std::span<std::byte> out) {
    return job.segments().ReadFrozen(index, begin, out);
  };
  return write;
}

absl::Status Manager::SaveJob(const std::shared_ptr<step::Job>& job,
                              const v1::SaveCheckpointRequest& request,
                              const std::shared_ptr<Operation>& operation, const Done& early) {
  if (absl::Status s = PrepareDirectory(*job); !s.ok()) return s;
  Awaited<std::shared_ptr<step::SpanSave>> begun;
  job->BeginSpanSave(request.rate_bytes_per_second(), request.keep(), begun.Callback());
  absl::StatusOr<std::shared_ptr<step::SpanSave>> save = begun.Wait();
  if (!save.ok()) return save.status();
  absl::Status status = SaveParts(job, request, *save, operation, early);
  if (*save != nullptr) {
    (*save)->OnEnd(nullptr);
    const absl::Status why = (*save)->ended();
    job->OrderSave(*save,
                   status.ok() ? v1::PeerMessage::Save::FINISH : v1::PeerMessage::Save::CANCEL);
    if (!status.ok() && !why.ok() && !absl::IsCancelled(why)) return why;
  }
  if (!status.ok()) return operation->cancelled() ? operation->CancelledStatus() : status;
  return RemoveOldSteps(options_.files, JobDirectory(job->name()), request.keep());
}

// A job that is deleted meanwhile cancels its copy, and with it this. Without `save`, all chunks
// are here or come here.
absl::Status Manager::SaveParts(const std::shared_ptr<step::Job>& job,
                                const v1::SaveCheckpointRequest& request,
                                const std::shared_ptr<step::SpanSave>& save,
                                const std::shared_ptr<Operation>& operation, const Done& early) {
  using Phase = v1::PeerMessage::Save;
  absl::Status status;
  if (save == nullptr) {
    // Before anything is begun: what is too large is said at once.
    status = CheckSpace(options_.files, JobDirectory(job->name()),
                        EstimateBytes(job->layout(), job->created_config(), job->parameters()));
  } else {
    EndWith(operation, save);
    status = save->AwaitAnswers(Phase::ARM);
  }
  if (!status.ok()) return status;
  absl::StatusOr<Copy> copy = TakeCopy(job, request.at_step(), false,
                                       request.rate_bytes_per_second() != 0, save, operation);
  if (!copy.ok()) return copy.status();
  if (request.detach()) early(absl::OkStatus());
  if (save != nullptr) {
    operation->Update([&](v1::CheckpointProgress* p) {
      p->add_remarks(absl::StrCat("its chunks lie with ", save->others().size() + 1,
                                  " daemons; each writes what it holds, and this is how far the "
                                  "one that was asked has come"));
    });
  }
  const WriteOptions write = WriteOptionsOf(*job, request.rate_bytes_per_second());
  Writers writers;
  status = WriteParts(write, copy->copy.get(), operation.get(), &writers);
  operation->Update([&](v1::CheckpointProgress* p) {
    p->set_path(write.job_directory);
    p->set_stall_seconds(copy->copy->stall_seconds());
  });
  if (status.ok() && save != nullptr) status = save->AwaitAnswers(Phase::COPY);
  if (!status.ok()) return status;
  // From here on the new one is complete; until the rename the old one is.
  options_.failpoints->Reach("checkpoint.before_rename");
  if (operation->cancelled()) return operation->CancelledStatus();
  if (save != nullptr) job->OrderSave(save, Phase::PUBLISH);
  status = PublishParts(writers, operation.get());
  if (status.ok() && save != nullptr) status = save->AwaitAnswers(Phase::PUBLISH);
  return status;
}

void Manager::SavePart(const std::string& job, std::shared_ptr<step::SpanSave> save,
                       const v1::PeerMessage::Save& arm) {
  auto found = options_.jobs->Find(job, 0, true);
  Begin(
      job, AlsoToStatus(found.ok() ? *found : nullptr, [](const v1::CheckpointProgress&) {}),
      [](const absl::Status&) {},
      [this, job, save, arm](const auto& operation, const Done&) {
        return RunSavePart(job, save, arm, operation);
      });
}

absl::Status Manager::RunSavePart(const std::string& name,
                                  const std::shared_ptr<step::SpanSave>& save,
                                  const v1::PeerMessage::Save& arm,
                                  const std::shared_ptr<Operation>& operation) {
  absl::StatusOr<std::shared_ptr<step::Job>> job = options_.jobs->Find(name, 0, true);
  if (!job.ok()) return job.status();
  absl::Status status = CheckConfigured();
  absl::StatusOr<std::unique_ptr<Claim>> claim = nullptr;
  if (status.ok()) {
    claim = Claim::Take(this, name, operation);
    status = claim.status();
  }
  if (status.ok()) status = SavePartOf(*job, save, arm, operation);
  save->OnEnd(nullptr);
  if (!status.ok()) {
    if (const absl::Status why = save->ended(); !why.ok()) status = why;
    (*job)->AnswerSave(save, v1::PeerMessage::Save::CANCEL, status);
  }
  ReportSave(job->get(), status, *operation);
  return status;
}

absl::Status Manager::SavePartOf(const std::shared_ptr<step::Job>& job,
                                 const std::shared_ptr<step::SpanSave>& save,
                                 const v1::PeerMessage::Save& arm,
                                 const std::shared_ptr<Operation>& operation) {
  using Phase = v1::PeerMessage::Save;
  if (absl::Status s = PrepareDirectory(*job); !s.ok()) return s;
  EndWith(operation, save);
  absl::StatusOr<Copy> copy =
      TakeCopy(job, 0, false, arm.rate_bytes_per_second() != 0, save, operation);
  if (!copy.ok()) return copy.status();
  const WriteOptions write = WriteOptionsOf(*job, arm.rate_bytes_per_second());
  Writers writers;
  absl::Status status = WriteParts(write, copy->copy.get(), operation.get(), &writers);
  if (!status.ok()) return status;
  job->AnswerSave(save, Phase::COPY, absl::OkStatus());
  status = save->AwaitOrder(Phase::PUBLISH);
  if (!status.ok()) return status;
  options_.failpoints->Reach("checkpoint.before_rename");
  status = PublishParts(writers, operation.get());
  if (!status.ok()) return status;
  job->AnswerSave(save, Phase::PUBLISH, absl::OkStatus());
  // Where the coordinator ends before it says so, the next save removes the old ones.
  status = save->AwaitOrder(Phase::FINISH);
  if (!status.ok()) return absl::OkStatus();
  return RemoveOldSteps(options_.files, write.job_directory, arm.keep());
}

absl::StatusOr<Manager::Copy> Manager::TakeCopy(const std::shared_ptr<step::Job>& job,
                                                uint64_t at_step, bool masters_only, bool patient,
                                                std::shared_ptr<step::SpanSave> save,
                                                const std::shared_ptr<Operation>& operation) {
  const int moments = job->moments();
  const uint64_t slot = step::StateCopy::SlotBytes(job->layout(), moments, masters_only);
  // Of a part, as many as the status knows of: it is asked for while chunks stay where they are.
  const uint64_t chunks =
      save != nullptr ? job->FreshStatus(kStatusTime).own_chunks() : job->layout().num_chunks();
  const uint64_t state = slot * std::max<uint64_t>(chunks, 1);
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
  job->BeginCopy(options, at_step, save, awaited.Callback());
  const std::weak_ptr<step::Job> weak = job;
  operation->OnCancel([weak, save] {
    if (const auto alive = weak.lock()) alive->CancelDueCopy();
    EndCancelled(save);
  });
  absl::StatusOr<std::shared_ptr<step::StateCopy>> copy = awaited.Wait();
  if (!copy.ok()) return copy.status();
  taken.job = job;
  taken.copy = *std::move(copy);
  // Each ends the other: a job that goes takes its copy along, and whoever waits to write it.
  const std::weak_ptr<step::StateCopy> weak_copy = taken.copy;
  operation->OnCancel([weak_copy, save] {
    if (const auto alive = weak_copy.lock()) alive->Cancel();
    EndCancelled(save);
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

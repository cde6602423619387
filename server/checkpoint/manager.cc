#include "server/checkpoint/manager.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/fill.h"
#include "server/checkpoint/manager_parts.h"
#include "server/control/job_spec.h"

namespace shardd::checkpoint {

namespace {

// Below the checkpoint directory; no job is called so.
constexpr char kImportsDirectory[] = ".imports";

}  // namespace

Manager::Manager(ManagerOptions options)
    : options_(std::move(options)),
      imports_(options_.files, env::JoinPath(options_.config.directory(), kImportsDirectory)) {}

Manager::~Manager() { Stop(); }

void Manager::Stop() {
  std::map<Operation*, std::shared_ptr<Operation>> running;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    running = running_;
  }
  for (const auto& [key, operation] : running) operation->Cancel();
  tasks_.Stop();
}

std::shared_ptr<Operation> Manager::Begin(
    const std::string& job, Report report, Done done,
    std::function<absl::Status(const std::shared_ptr<Operation>&, const Done& early)> run) {
  auto operation = std::make_shared<Operation>(std::move(report));
  operation->Update([&](v1::CheckpointProgress* p) {
    p->set_job(job);
    p->set_stage("waiting");
  });
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) {
      done(absl::UnavailableError("the daemon is going down; ask its successor"));
      return operation;
    }
    running_[operation.get()] = operation;
  }
  // Told by whoever comes first, and also when the task is dropped.
  const auto once = std::make_shared<OnceDone>(std::move(done));
  tasks_.Post([this, operation, run, once] {
    const absl::Status status =
        run(operation, [once](const absl::Status& early) { once->Tell(early); });
    if (status.ok()) {
      operation->Update([](v1::CheckpointProgress* p) { p->set_finished(true); });
    }
    {
      const std::lock_guard lock(mutex_);
      running_.erase(operation.get());
    }
    once->Tell(status);
  });
  return operation;
}

absl::Status Manager::CheckConfigured() const {
  if (!options_.config.directory().empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this daemon has no place for checkpoints; start it with --checkpoint.directory=DIR");
}

std::string Manager::JobDirectory(const std::string& job) const {
  return env::JoinPath(options_.config.directory(), job);
}

absl::StatusOr<std::vector<StepDirectory>> Manager::Directories(const std::string& job) const {
  if (absl::Status s = CheckConfigured(); !s.ok()) return s;
  if (absl::Status s = control::CheckJobName(job); !s.ok()) return s;
  absl::StatusOr<std::vector<std::string>> names = options_.files->List(JobDirectory(job));
  if (absl::IsNotFound(names.status())) return std::vector<StepDirectory>();
  if (!names.ok()) return names.status();
  return StepsAmong(*names);
}

absl::StatusOr<Reader> Manager::OpenReader(Caller caller, const std::string& job,
                                           const StepDirectory& directory) const {
  const std::string path = env::JoinPath(JobDirectory(job), DirectoryName(directory));
  absl::StatusOr<Reader> reader = Reader::Open(path, AccessThrough(options_.files));
  if (!reader.ok()) return reader.status();
  if (!caller.privileged && reader->manifest().uid != caller.uid) {
    return absl::NotFoundError(
        absl::StrCat("there is no checkpoint of job '", job, "' that you may see"));
  }
  const Manifest& m = reader->manifest();
  if (m.step != directory.step || m.member != directory.member || m.members != directory.members) {
    return absl::DataLossError(absl::StrCat(path, ": its manifest is of step ", m.step, ", member ",
                                            m.member, " of ", m.members,
                                            ": it was renamed; give it its name back"));
  }
  return reader;
}

absl::StatusOr<std::vector<Reader>> Manager::OpenStep(Caller caller, const std::string& job,
                                                      uint64_t step) const {
  absl::StatusOr<std::vector<StepDirectory>> directories = Directories(job);
  if (!directories.ok()) return directories.status();
  if (step == 0) {
    const std::optional<uint64_t> newest = NewestCompleteStep(*directories);
    if (!newest.has_value()) {
      return absl::NotFoundError(absl::StrCat("there is no complete checkpoint of job '", job,
                                              "' in ", JobDirectory(job),
                                              "; shardctl checkpoint list shows what there is"));
    }
    step = *newest;
  }
  std::vector<Reader> members;
  for (const StepDirectory& directory : *directories) {
    if (directory.step != step) continue;
    if (!members.empty() && members[0].manifest().members != directory.members) continue;
    absl::StatusOr<Reader> reader = OpenReader(caller, job, directory);
    if (!reader.ok()) return reader.status();
    members.push_back(*std::move(reader));
  }
  if (members.empty()) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint of job '", job, "' at step ",
                                            step, " in ", JobDirectory(job)));
  }
  return members;
}

absl::StatusOr<v1::ListCheckpointsReply> Manager::List(Caller caller,
                                                       const v1::ListCheckpointsRequest& request) {
  absl::StatusOr<std::vector<StepDirectory>> directories = Directories(request.job());
  if (!directories.ok()) return directories.status();
  v1::ListCheckpointsReply reply;
  reply.set_directory(JobDirectory(request.job()));
  for (const StepDirectory& directory : *directories) {
    absl::StatusOr<Reader> reader = OpenReader(caller, request.job(), directory);
    if (absl::IsNotFound(reader.status())) continue;  // another user's, or gone meanwhile
    v1::Checkpoint* last = reply.checkpoints().empty()
                               ? nullptr
                               : reply.mutable_checkpoints(reply.checkpoints_size() - 1);
    if (last == nullptr || last->step() != directory.step || last->members() != directory.members) {
      last = reply.add_checkpoints();
      last->set_step(directory.step);
      last->set_members(directory.members);
      last->set_path(env::JoinPath(reply.directory(), DirectoryName(directory)));
    }
    last->add_present(directory.member);
    if (!reader.ok()) {
      last->set_problem(std::string(reader.status().message()));
      continue;
    }
    last->set_bytes(last->bytes() + reader->manifest().bytes());
    last->set_created_unix_nanos(reader->manifest().created_unix_nanos);
    last->set_applied(reader->manifest().applied);
  }
  for (v1::Checkpoint& c : *reply.mutable_checkpoints()) {
    if (c.problem().empty() && static_cast<uint32_t>(c.present_size()) < c.members()) {
      c.set_problem(absl::StrCat("only ", c.present_size(), " of ", c.members(),
                                 " members of its set lie here"));
    }
  }
  return reply;
}

std::shared_ptr<Operation> Manager::Verify(Caller caller, v1::VerifyCheckpointRequest request,
                                           Report report, Done done) {
  return Begin(request.job(), std::move(report), std::move(done),
               [this, caller, request](const auto& operation, const Done&) {
                 return RunVerify(caller, request, operation.get());
               });
}

absl::Status Manager::RunVerify(Caller caller, const v1::VerifyCheckpointRequest& request,
                                Operation* operation) {
  absl::StatusOr<std::vector<Reader>> members = OpenStep(caller, request.job(), request.step());
  if (!members.ok()) return members.status();
  operation->Update([&](v1::CheckpointProgress* p) {
    p->set_stage("verifying");
    p->set_step((*members)[0].manifest().step);
    p->set_path((*members)[0].directory());
    for (const Reader& reader : *members) {
      p->set_total_bytes(p->total_bytes() + DataBytes(reader.manifest()));
    }
  });
  for (const Reader& reader : *members) {
    absl::Status status = reader.Verify(
        [operation](uint64_t bytes) { return operation->Advance(bytes); }, options_.threads);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::CancelCheckpointReply> Manager::Cancel(
    Caller caller, const v1::CancelCheckpointRequest& request) {
  // Whoever may see the job may cancel its save.
  absl::StatusOr<std::shared_ptr<step::Job>> job =
      options_.jobs->Find(request.job(), caller.uid, caller.privileged);
  if (!job.ok()) return job.status();
  v1::CancelCheckpointReply reply;
  std::shared_ptr<Operation> operation;
  {
    const std::lock_guard lock(mutex_);
    const auto it = claims_.find(request.job());
    if (it == claims_.end()) return reply;
    operation = it->second;
  }
  operation->Cancel();
  reply.set_was_running(true);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    const auto it = claims_.find(request.job());
    return it == claims_.end() || it->second != operation;
  });
  return reply;
}

absl::StatusOr<v1::ImportWeightsReply> Manager::Import(Caller caller,
                                                       const v1::ImportWeightsRequest& request) {
  if (absl::Status s = CheckConfigured(); !s.ok()) return s;
  if (absl::Status s = control::CheckJobName(request.job()); !s.ok()) return s;
  absl::StatusOr<std::optional<PendingImport>> pending = imports_.Find(request.job());
  if (pending.ok() && pending->has_value() && !caller.privileged && (*pending)->uid != caller.uid) {
    return absl::PermissionDeniedError(absl::StrCat("weights of another user wait for job '",
                                                    request.job(), "'; choose another name"));
  }
  v1::ImportWeightsReply reply;
  if (request.cancel()) {
    if (absl::Status s = imports_.Remove(request.job()); !s.ok()) return s;
    return reply;
  }
  if (options_.jobs->Find(request.job(), 0, true).ok()) {
    return absl::AlreadyExistsError(
        absl::StrCat("job '", request.job(),
                     "' exists and has its weights; delete it (shardctl "
                     "job delete ",
                     request.job(), "), or import for another name"));
  }
  absl::StatusOr<std::string> path = ResolveBelow(options_.config.directory(), request.path());
  if (!path.ok()) return path.status();
  if (!caller.privileged) {
    absl::Status readable = CheckMayRead(options_.config.directory(), *path, caller.uid);
    if (!readable.ok()) return readable;
  }
  absl::StatusOr<ImportSummary> summary = CheckImport(*path);
  if (!summary.ok()) return summary.status();
  absl::StatusOr<env::FileInfo> info = options_.files->Stat(*path);
  if (!info.ok()) return info.status();
  absl::Status status = imports_.Put(request.job(), {*path, caller.uid, info->bytes});
  if (!status.ok()) return status;
  reply.set_path(*path);
  reply.set_tensors(summary->tensors);
  reply.set_bytes(summary->bytes);
  return reply;
}

absl::StatusOr<control::JobRegistry::FillFunction> Manager::InitialState(
    const std::string& job, const v1::OpenRequest& request, const contract::Layout& layout,
    uint32_t uid) {
  if (options_.config.directory().empty()) return control::JobRegistry::FillFunction();
  absl::StatusOr<std::optional<PendingImport>> found = imports_.Find(job);
  if (!found.ok()) return found.status();
  if (!found->has_value()) return control::JobRegistry::FillFunction();
  const PendingImport import = **found;
  if (import.uid != uid && uid != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("weights of another user wait for job '", job, "'; choose another name"));
  }
  // What lies under that name now may be another file than was looked at.
  if (import.uid != 0 && import.uid != geteuid()) {
    absl::Status readable = CheckMayRead(options_.config.directory(), import.path, import.uid);
    if (!readable.ok()) return readable;
  }
  absl::StatusOr<env::FileInfo> info = options_.files->Stat(import.path);
  if (!info.ok() || info->bytes != import.bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(import.path, ", imported for job '", job,
                     "', is gone or has changed; import it again, or "
                     "give it up: shardctl checkpoint import ",
                     job, " --cancel"));
  }
  return [this, job, request, layout, import](store::JobSegments* segments) -> absl::Status {
    absl::Status status = FillFromImport(import.path, layout, request, segments);
    if (!status.ok()) return status;
    segments->header()->initialised.store(1, std::memory_order_release);
    options_.log(absl::StrCat("job ", job, ": begins with the weights of ", import.path));
    return imports_.Remove(job);
  };
}

}  // namespace shardd::checkpoint

#include "server/control/job_registry.h"

#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/control/job_spec.h"

namespace shardd::control {

namespace {

absl::Status CheckPlace(const v1::OpenRequest& request) {
  if (request.world_size() == 0 || request.rank() >= request.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", request.rank(), " of world_size ",
                                                   request.world_size(),
                                                   "; ranks are 0 to world_size - 1"));
  }
  if (request.world_size() > request.config().slots()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "job '", request.config().name(), "' has world_size ", request.world_size(), " but ",
        request.config().slots(), " slots; every rank computes at least one: raise slots"));
  }
  return absl::OkStatus();
}

absl::Status OpenedBefore() {
  return absl::FailedPreconditionError("this session has opened a job before");
}

uint64_t RandomU64() {
  uint64_t value = 0;
  while (value == 0 && getrandom(&value, sizeof(value), 0) < 0) {
  }
  return value;
}

}  // namespace

JobRegistry::JobRegistry(const step::JobEnvironment& environment,
                         const store::StateDirectory* directory, env::Budget* budget,
                         size_t max_jobs)
    : environment_(environment), directory_(directory), budget_(budget), max_jobs_(max_jobs) {
  environment_.on_abandoned = [this](const std::string& name) {
    Delete(name, false, [](absl::StatusOr<v1::DeleteJobReply>) {});
  };
}

JobRegistry::~JobRegistry() {
  tasks_.Stop();
  heavy_.Stop();
  StopAll();
}

void JobRegistry::AdoptAll() {
  for (const std::string& name : directory_->JobNames()) {
    const absl::Status status = Adopt(name);
    if (status.ok()) continue;
    environment_.log(absl::StrCat("job ", name,
                                  " of an earlier daemon cannot be adopted and is left "
                                  "untouched in ",
                                  directory_->JobPath(name), ": ", status.message()));
  }
}

absl::Status JobRegistry::Adopt(const std::string& name) {
  absl::StatusOr<store::AdoptedJob> adopted = store::JobSegments::Open(*directory_, name);
  if (!adopted.ok()) return adopted.status();
  contract::JobHeader* header = adopted->segments->header();
  if (header->initialised.load() == 0) {
    // Its trainers had not finished uploading; they begin anew.
    adopted->segments.reset();
    environment_.log(absl::StrCat("job ", name, ": never had all of its weights; given back"));
    return store::RemoveJobDirectory(directory_->JobPath(name));
  }
  absl::StatusOr<env::BudgetLease> lease =
      budget_->Reserve(adopted->segments->plan().total(), absl::StrCat("job '", name, "'"));
  if (!lease.ok()) return lease.status();
  const std::string id(reinterpret_cast<const char*>(header->job_id), sizeof(header->job_id));
  const uint32_t uid = header->uid;
  auto job = std::make_shared<step::Job>(environment_, std::move(adopted->layout), adopted->config,
                                         std::move(adopted->segments), *std::move(lease), uid,
                                         absl::BytesToHexString(id));
  if (absl::Status status = job->Recover(); !status.ok()) return status;
  job->Start();
  std::lock_guard lock(mutex_);
  jobs_[name] = std::move(job);
  return absl::OkStatus();
}

std::shared_ptr<step::Job> JobRegistry::Lookup(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto it = jobs_.find(name);
  return it == jobs_.end() ? nullptr : it->second;
}

void JobRegistry::Open(std::shared_ptr<step::Session> session, v1::OpenRequest request,
                       OpenCallback done) {
  auto shared = std::make_shared<v1::OpenRequest>(std::move(request));
  tasks_.Post([this, session, shared, done] { TryOpen(session, shared, done); });
}

void JobRegistry::TryOpen(const std::shared_ptr<step::Session>& session,
                          const std::shared_ptr<v1::OpenRequest>& request,
                          const OpenCallback& done) {
  if (session->GetJob() != nullptr) return done(OpenedBefore());
  if (absl::Status status = CompleteJobConfig(request->mutable_config()); !status.ok()) {
    return done(status);
  }
  if (absl::Status status = CheckPlace(*request); !status.ok()) return done(status);
  absl::StatusOr<contract::Layout> layout = MakeLayout(*request);
  if (!layout.ok()) return done(layout.status());
  request->mutable_config()->set_chunk_elements(layout->chunk_elements());
  request->mutable_config()->set_bucket_elements(layout->bucket_elements());
  const std::string name = request->config().name();
  std::shared_ptr<step::Job> job;
  {
    std::lock_guard lock(mutex_);
    if (const auto busy = busy_.find(name); busy != busy_.end()) {
      busy->second.push_back([=, this] { TryOpen(session, request, done); });
      return;
    }
    if (const auto it = jobs_.find(name); it != jobs_.end()) job = it->second;
    if (job == nullptr && request->resume() != v1::RESUME_MUST) busy_[name];
  }
  if (job != nullptr) {
    absl::Status status = CheckAttach(*job, *session, request.get(), *layout);
    return status.ok() ? Attach(job, session, request, false, done) : done(status);
  }
  if (request->resume() == v1::RESUME_MUST) {
    return done(absl::NotFoundError(
        absl::StrCat("there is no job '", name,
                     "' to resume; check the name, or allow a fresh start (resume = auto)")));
  }
  auto shared_layout = std::make_shared<contract::Layout>(*std::move(layout));
  heavy_.Post([this, session, request, done, name, shared_layout] {
    absl::StatusOr<std::shared_ptr<step::Job>> made =
        Create(*session, *request, std::move(*shared_layout));
    std::deque<std::function<void()>> waiting = EndBusy(name, made.ok() ? *made : nullptr);
    if (made.ok()) {
      Attach(*made, session, request, true, done);
    } else {
      done(made.status());
    }
    for (auto& task : waiting) tasks_.Post(std::move(task));
  });
}

std::deque<std::function<void()>> JobRegistry::EndBusy(const std::string& name,
                                                       std::shared_ptr<step::Job> job) {
  std::lock_guard lock(mutex_);
  std::deque<std::function<void()>> waiting = std::move(busy_[name]);
  busy_.erase(name);
  if (job != nullptr) jobs_[name] = std::move(job);
  return waiting;
}

void JobRegistry::Attach(const std::shared_ptr<step::Job>& job,
                         const std::shared_ptr<step::Session>& session,
                         const std::shared_ptr<v1::OpenRequest>& request, bool created,
                         const OpenCallback& done) {
  bool opened_before = false;
  {
    std::lock_guard lock(session->mutex);
    opened_before = session->job.lock() != nullptr;
    if (!opened_before) session->job = job;
  }
  if (opened_before) {
    if (created) Delete(job->name(), false, [](absl::StatusOr<v1::DeleteJobReply>) {});
    return done(OpenedBefore());
  }
  job->Open(session, request->rank(), request->world_size(), request->config(), created,
            request->restarted(),
            [this, session, request, done](absl::StatusOr<v1::OpenReply> reply) {
              if (reply.ok()) return done(std::move(reply));
              DetachFromJob(session);
              // The job was deleted meanwhile (abandoned by others that had not finished
              // uploading, or by an operator). Its name is busy or free by now.
              if (absl::IsNotFound(reply.status())) {
                return tasks_.Post([=, this] { TryOpen(session, request, done); });
              }
              done(std::move(reply));
            });
}

// After an Open that failed: the attach socket minds the session again, unless
// it hung up meanwhile.
void JobRegistry::DetachFromJob(const std::shared_ptr<step::Session>& session) {
  {
    std::lock_guard lock(session->mutex);
    session->job.reset();
  }
  pollfd connection{session->socket.get(), POLLRDHUP, 0};
  if (poll(&connection, 1, 0) == 1) environment_.on_session_end(session);
}

absl::Status JobRegistry::CheckAttach(const step::Job& job, const step::Session& session,
                                      v1::OpenRequest* request,
                                      const contract::Layout& layout) const {
  const std::string& name = request->config().name();
  if (job.uid() != session.uid && session.uid != 0 && session.uid != geteuid()) {
    return absl::PermissionDeniedError(
        absl::StrCat("job '", name, "' belongs to another user; choose another name"));
  }
  // Ranks of the run that is being started all say `never`: the job is theirs while
  // it has not taken a step and the others are just joining.
  if (request->resume() == v1::RESUME_NEVER) {
    const v1::JobStatus status = job.Status();
    if (status.committed_step() > 0 || status.state() == "idle") {
      return absl::AlreadyExistsError(absl::StrCat(
          "job '", name, "' exists at step ", status.committed_step(),
          "; delete it (shardctl job delete ", name, "), or resume it (resume = auto)"));
    }
  }
  std::vector<std::string> lines = ConfigDifferences(job.created_config(), request->config());
  for (std::string& line : LayoutDifferences(job.layout(), layout))
    lines.push_back(std::move(line));
  if (lines.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job '", name, "' exists with another configuration: ", absl::StrJoin(lines, "; "),
      ". Start it as it was, delete it, or choose another name"));
}

absl::StatusOr<std::shared_ptr<step::Job>> JobRegistry::Create(const step::Session& session,
                                                               const v1::OpenRequest& request,
                                                               contract::Layout layout) {
  const std::string& name = request.config().name();
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
  store::JobSpec spec;
  spec.config = request.config();
  v1::OpenRequest parameters;
  *parameters.mutable_parameters() = request.parameters();
  spec.parameters = parameters.SerializeAsString();
  spec.config_hash = ConfigHash(request.config());
  spec.uid = session.uid;
  spec.moments = kernels::FindOptimizer(request.config().optimizer())->num_states();
  if (getrandom(spec.job_id.data(), spec.job_id.size(), 0) < 0) {
    return absl::InternalError("cannot make a job id");
  }
  spec.timeline = RandomU64();
  const uint64_t bytes = store::PlanSegments(layout, spec, directory_->page_bytes()).total();
  absl::StatusOr<env::BudgetLease> lease =
      budget_->Reserve(bytes, absl::StrCat("job '", name, "'"));
  if (!lease.ok()) return lease.status();
  absl::StatusOr<std::unique_ptr<store::JobSegments>> segments = store::JobSegments::Create(
      *directory_, layout, spec,
      [this] { environment_.failpoints->Reach("job.create.before_rename"); });
  if (!segments.ok()) return segments.status();
  const std::string id(reinterpret_cast<const char*>(spec.job_id.data()), spec.job_id.size());
  auto job = std::make_shared<step::Job>(environment_, std::move(layout), spec.config,
                                         *std::move(segments), *std::move(lease), session.uid,
                                         absl::BytesToHexString(id));
  job->Start();
  environment_.log(absl::StrCat("job ", name, ": created for uid ", session.uid, ", ",
                                job->layout().trainable_elements(), " elements, ", bytes,
                                " bytes"));
  return job;
}

void JobRegistry::Delete(const std::string& name, bool force,
                         std::function<void(absl::StatusOr<v1::DeleteJobReply>)> done) {
  std::shared_ptr<step::Job> job = Lookup(name);
  if (job == nullptr)
    return done(absl::NotFoundError(absl::StrCat("there is no job '", name, "'")));
  job->PrepareDelete(force, [this, name, done](absl::StatusOr<v1::DeleteJobReply> reply) {
    if (!reply.ok()) return done(std::move(reply));
    tasks_.Post([this, name, done, reply] {
      std::shared_ptr<step::Job> job;
      {
        std::lock_guard lock(mutex_);
        const auto it = jobs_.find(name);
        if (it == jobs_.end()) return done(reply);
        job = std::move(it->second);
        jobs_.erase(it);
        busy_[name];
      }
      heavy_.Post([this, name, done, reply, job = std::move(job)]() mutable {
        job->Stop();
        const absl::Status removed = store::RemoveJobDirectory(directory_->JobPath(name));
        job.reset();  // its memory is free when this is told
        environment_.log(absl::StrCat("job ", name, ": deleted"));
        for (auto& task : EndBusy(name, nullptr)) tasks_.Post(std::move(task));
        if (!removed.ok()) return done(removed);
        done(reply);
      });
    });
  });
}

absl::StatusOr<std::shared_ptr<step::Job>> JobRegistry::Find(const std::string& name, uid_t uid,
                                                             bool privileged) const {
  std::vector<std::string> names;
  for (const auto& job : Visible(uid, privileged)) {
    if (job->name() == name) return job;
    names.push_back(job->name());
  }
  return absl::NotFoundError(absl::StrCat(
      "there is no job '", name, "'; ",
      names.empty() ? "there are no jobs" : "there are: " + absl::StrJoin(names, ", ")));
}

std::vector<std::shared_ptr<step::Job>> JobRegistry::Visible(uid_t uid, bool privileged) const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<step::Job>> visible;
  for (const auto& [name, job] : jobs_) {
    if (privileged || job->uid() == uid) visible.push_back(job);
  }
  return visible;
}

void JobRegistry::StopAll() {
  std::map<std::string, std::shared_ptr<step::Job>> jobs;
  {
    std::lock_guard lock(mutex_);
    jobs.swap(jobs_);
  }
  for (const auto& [name, job] : jobs) job->Stop();
}

}  // namespace shardd::control

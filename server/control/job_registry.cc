#include "server/control/job_registry.h"

#include <poll.h>
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

}  // namespace

JobRegistry::JobRegistry(const step::JobEnvironment& environment,
                         const store::StateDirectory* directory,
                         store::DescriptorStore* descriptors, const store::SpillDirectory* spill,
                         env::Budget* budget, size_t max_jobs)
    : environment_(environment),
      directory_(directory),
      descriptors_(descriptors),
      spill_(spill),
      budget_(budget),
      max_jobs_(max_jobs) {
  environment_.on_abandoned = [this](const std::string& name) {
    Delete(name, false, [](absl::StatusOr<v1::DeleteJobReply>) {});
  };
  environment_.on_deleted = [this](const std::string& name) {
    Delete(name, true, [](absl::StatusOr<v1::DeleteJobReply>) {});
  };
}

JobRegistry::~JobRegistry() {
  if (finder_ != nullptr) finder_->Stop();
  tasks_.Stop();
  heavy_.Stop();
  StopAll();
}

AdoptedJobs JobRegistry::AdoptAll() {
  AdoptedJobs adopted;
  const absl::Time begun = environment_.now();
  if (journals_ != nullptr) {
    absl::Status status = step::FinishJournalSwitches(environment_.files, journals_->path());
    if (!status.ok()) environment_.log(absl::StrCat("journals: ", status.message()));
  }
  for (const std::string& name : directory_->JobNames()) {
    const absl::Status status = Adopt(name);
    if (status.ok()) continue;
    if (absl::IsOutOfRange(status) && journals_ != nullptr && journals_->Holds(name)) {
      Recover(name, true);
      continue;
    }
    environment_.log(absl::StrCat("job ", name,
                                  " of an earlier daemon cannot be adopted and is left "
                                  "untouched in ",
                                  directory_->JobPath(name), ": ", status.message()));
  }
  for (const std::string& name : descriptors_->Jobs()) {
    if (descriptors_->HoldsFilesOf(name, directory_->JobPath(name))) continue;
    const absl::Status status = AdoptKept(name);
    if (status.ok()) continue;
    environment_.log(absl::StrCat("job ", name,
                                  " in the service manager's descriptor store is left "
                                  "untouched: ",
                                  status.message()));
  }
  FindSpilled();
  RecoverAll();
  const absl::Time now = environment_.now();
  {
    std::lock_guard lock(mutex_);
    adopted.jobs = static_cast<uint32_t>(jobs_.size());
  }
  adopted.took = now - begun;
  const absl::Time drained = directory_->TakeDrainNote();
  if (drained != absl::InfinitePast()) adopted.since_drain = now - drained;
  if (adopted.jobs > 0) {
    environment_.log(absl::StrCat(
        adopted.jobs, adopted.jobs == 1 ? " job" : " jobs", " taken up in ",
        absl::FormatDuration(absl::Trunc(adopted.took, absl::Milliseconds(1))),
        drained == absl::InfinitePast()
            ? ""
            : absl::StrCat(
                  ", ",
                  absl::FormatDuration(absl::Trunc(adopted.since_drain, absl::Milliseconds(1))),
                  " after the daemon before was drained")));
  }
  return adopted;
}

void JobRegistry::Drain(absl::Time deadline,
                        std::function<void(absl::StatusOr<v1::DrainReply>)> done) {
  if (draining_.exchange(true)) {
    return done(absl::FailedPreconditionError("the daemon is being drained already"));
  }
  environment_.log("the daemon is being drained: jobs stand still at the end of their step");
  struct Gathered {
    std::mutex mutex;
    v1::DrainReply reply;
    size_t left = 1;  // under mutex; one for whoever hands them out
  };
  auto gathered = std::make_shared<Gathered>();
  const absl::Time begun = environment_.now();
  const auto one_done = [this, gathered, begun, done](absl::StatusOr<v1::DrainedJob> job) {
    {
      std::lock_guard lock(gathered->mutex);
      if (job.ok() && !job->name().empty()) *gathered->reply.add_jobs() = *std::move(job);
      if (--gathered->left > 0) return;
    }
    const absl::Time now = environment_.now();
    gathered->reply.set_seconds(absl::ToDoubleSeconds(now - begun));
    if (absl::Status status = directory_->LeaveDrainNote(now); !status.ok()) {
      environment_.log(absl::StrCat("draining: ", status.message()));
    }
    done(std::move(gathered->reply));
  };
  for (const auto& job : Visible(0, true)) {
    {
      std::lock_guard lock(gathered->mutex);
      ++gathered->left;
    }
    job->Drain(deadline, one_done);
  }
  one_done(v1::DrainedJob());
}

absl::Status JobRegistry::Adopt(const std::string& name) {
  absl::StatusOr<v1::JobPeers> peers = step::ReadJobPeers(directory_->JobPath(name));
  std::vector<contract::Range> held;
  if (peers.ok()) {
    for (const auto& range : peers->owners()) {
      if (links_ != nullptr && range.daemon() == links_->self()) {
        held.push_back({range.first_chunk(), range.first_chunk() + range.chunks()});
      }
    }
    if (links_ == nullptr) {
      return absl::FailedPreconditionError(
          "it may span several daemons: give this one its peer section (peer.name, peer.peers)");
    }
  } else if (!absl::IsNotFound(peers.status())) {
    return peers.status();
  }
  absl::StatusOr<store::AdoptedJob> adopted =
      store::JobSegments::Open(*directory_, name, peers.ok() ? &held : nullptr);
  if (!adopted.ok()) return adopted.status();
  if (GaveBack(name, &*adopted)) return store::RemoveJobDirectory(directory_->JobPath(name));
  const uint64_t total = adopted->segments->plan().total();
  const uint64_t later =
      links_ == nullptr ? 0 : adopted->segments->ChunkBytes(adopted->layout.num_chunks());
  absl::StatusOr<env::BudgetLease> lease =
      budget_->Reserve(total - std::min(total, later), absl::StrCat("job '", name, "'"));
  if (!lease.ok()) return lease.status();
  absl::Status status =
      TakeUp(name, *std::move(adopted), *std::move(lease), peers.ok() ? &*peers : nullptr);
  if (status.ok() && Lookup(name) != nullptr &&
      !descriptors_->HoldsFilesOf(name, directory_->JobPath(name))) {
    KeepDescriptors(name);
  }
  return status;
}

// A job whose files are gone, but not its memory.
absl::Status JobRegistry::AdoptKept(const std::string& name) {
  if (Lookup(name) != nullptr) {
    return absl::AlreadyExistsError(
        "the state directory holds a job of that name with other files");
  }
  absl::StatusOr<store::KeptSegments> kept = descriptors_->Take(name);
  if (!kept.ok()) return kept.status();
  absl::StatusOr<store::AdoptedJob> adopted =
      store::JobSegments::OpenKept(*directory_, name, *std::move(kept));
  if (!adopted.ok()) return adopted.status();
  environment_.log(absl::StrCat("job ", name, ": its files are gone from ",
                                directory_->JobPath(name),
                                "; the service manager's descriptors of them are taken instead"));
  if (GaveBack(name, &*adopted)) return absl::OkStatus();
  absl::StatusOr<env::BudgetLease> lease =
      budget_->Reserve(adopted->segments->plan().total(), absl::StrCat("job '", name, "'"));
  if (!lease.ok()) return lease.status();
  return TakeUp(name, *std::move(adopted), *std::move(lease), nullptr);
}

// A job whose trainers had not finished uploading: they begin anew.
bool JobRegistry::GaveBack(const std::string& name, store::AdoptedJob* adopted) {
  if (adopted->segments->header()->initialised.load() != 0) return false;
  adopted->segments.reset();
  descriptors_->Drop(name);
  environment_.log(absl::StrCat("job ", name, ": never had all of its weights; given back"));
  const absl::Status removed = RemoveJournal(name);
  if (!removed.ok()) environment_.log(absl::StrCat("job ", name, ": ", removed.message()));
  return true;
}

void JobRegistry::KeepDescriptors(const std::string& name) {
  const absl::Status status = descriptors_->Keep(name, directory_->JobPath(name));
  if (!status.ok()) {
    environment_.log(absl::StrCat(
        "job ", name, ": the service manager does not keep its descriptors: ", status.message(),
        "; its files are all that is kept"));
  }
}

absl::Status JobRegistry::TakeUp(const std::string& name, store::AdoptedJob adopted,
                                 env::BudgetLease lease, const v1::JobPeers* peers) {
  const contract::JobHeader* header = adopted.segments->header();
  absl::Status status;
  std::unique_ptr<step::Span> span =
      MakeSpanAlone(*adopted.segments, adopted.layout.num_chunks(), peers, &lease, &status);
  if (!status.ok()) return status;
  const std::string id(reinterpret_cast<const char*>(header->job_id), sizeof(header->job_id));
  const uint32_t uid = header->uid;
  auto job = std::make_shared<step::Job>(environment_, std::move(adopted.layout), adopted.config,
                                         std::move(adopted.segments), std::move(lease), uid,
                                         absl::BytesToHexString(id));
  if (span != nullptr) status = job->SpanWith(std::move(span));
  if (status.ok()) status = AdoptJournal(job.get());
  if (status.ok()) status = job->Recover();
  if (!status.ok()) return status;
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
  tasks_.Post(
      [this, session, shared, done] { TryOpen(session, shared, done, environment_.now()); });
}

void JobRegistry::TryOpen(const std::shared_ptr<step::Session>& session,
                          const std::shared_ptr<v1::OpenRequest>& request, const OpenCallback& done,
                          absl::Time begun) {
  if (draining_) {
    return done(
        absl::UnavailableError("the daemon is being drained; open the job at its successor"));
  }
  if (session->GetJob() != nullptr) return done(OpenedBefore());
  if (absl::Status status = CompleteJobConfig(BestDurability(), request->mutable_config());
      !status.ok()) {
    return done(status);
  }
  if (absl::Status status = CheckPlace(*request); !status.ok()) return done(status);
  absl::StatusOr<contract::Layout> layout = MakeLayout(*request);
  if (!layout.ok()) return done(layout.status());
  request->mutable_config()->set_chunk_elements(layout->chunk_elements());
  request->mutable_config()->set_bucket_elements(layout->bucket_elements());
  const std::string name = request->config().name();
  std::shared_ptr<step::Job> job;
  bool spilled = false;
  {
    std::lock_guard lock(mutex_);
    if (const auto busy = busy_.find(name); busy != busy_.end()) {
      busy->second.push_back([=, this] { TryOpen(session, request, done, begun); });
      return;
    }
    if (const auto it = jobs_.find(name); it != jobs_.end()) job = it->second;
    spilled = job == nullptr && spilled_.contains(name);
    if (spilled || (job == nullptr && links_ == nullptr && request->resume() != v1::RESUME_MUST)) {
      busy_[name];
    }
  }
  if (spilled) {
    heavy_.Post([=, this] {
      const absl::Status taken = Unspill(name);
      std::deque<std::function<void()>> waiting = EndBusy(name, nullptr);
      if (taken.ok()) {
        tasks_.Post([=, this] { TryOpen(session, request, done, begun); });
      } else {
        done(taken);
      }
      for (auto& task : waiting) tasks_.Post(std::move(task));
    });
    return;
  }
  if (job != nullptr) {
    absl::Status status = CheckAttach(*job, *session, request.get(), *layout);
    return status.ok() ? Attach(job, session, request, false, done) : done(status);
  }
  if (AwaitMirrors(session, request, done, begun)) return;
  if (links_ != nullptr) return SearchPeers(session, request, done, begun);
  if (request->resume() == v1::RESUME_MUST) {
    return done(absl::NotFoundError(
        absl::StrCat("there is no job '", name,
                     "' to resume; check the name, or allow a fresh start (resume = auto)")));
  }
  Make(session, request, done, std::nullopt);
}

void JobRegistry::Make(const std::shared_ptr<step::Session>& session,
                       const std::shared_ptr<v1::OpenRequest>& request, const OpenCallback& done,
                       std::optional<FoundJob> found) {
  heavy_.Post([this, session, request, done, found = std::move(found)] {
    const std::string& name = request->config().name();
    absl::StatusOr<std::shared_ptr<step::Job>> made =
        Create(*session, *request, found.has_value() ? &*found : nullptr);
    std::deque<std::function<void()>> waiting = EndBusy(name, made.ok() ? *made : nullptr);
    if (made.ok()) {
      (*made)->Introduce();
      Attach(*made, session, request, !found.has_value(), done);
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
  job->Open(
      session, request->rank(), request->world_size(), request->config(), created,
      request->restarted(), [this, session, request, done](absl::StatusOr<v1::OpenReply> reply) {
        if (reply.ok()) return done(std::move(reply));
        DetachFromJob(session);
        // The job was deleted meanwhile (abandoned by others that had not finished
        // uploading, or by an operator). Its name is busy or free by now.
        if (absl::IsNotFound(reply.status())) {
          return tasks_.Post([=, this] { TryOpen(session, request, done, environment_.now()); });
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
  // It is the job's from its beginning on.
  request->mutable_config()->set_durability(job.created_config().durability());
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
  v1::OpenRequest there = job.parameters(), here;
  there.clear_parameters();
  *here.mutable_frozen() = request->frozen();
  if (there.SerializeAsString() != here.SerializeAsString()) {
    lines.push_back(absl::StrCat("frozen parameters: ", there.frozen_size(), " there, ",
                                 here.frozen_size(), " here, or with other names, shapes, dtypes"));
  }
  if (lines.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job '", name, "' exists with another configuration: ", absl::StrJoin(lines, "; "),
      ". Start it as it was, delete it, or choose another name"));
}

void JobRegistry::Delete(const std::string& name, bool force, DeleteCallback done) {
  bool spilled = false;
  {
    std::lock_guard lock(mutex_);
    if (const auto busy = busy_.find(name); busy != busy_.end()) {
      busy->second.push_back([=, this] { Delete(name, force, done); });
      return;
    }
    spilled = spilled_.contains(name);
    if (spilled) busy_[name];
  }
  if (spilled) return DeleteSpilled(name, done);
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
        absl::Status removed = RemoveJournal(name);
        removed.Update(store::RemoveJobDirectory(directory_->JobPath(name)));
        job.reset();  // its memory is free when this is told
        descriptors_->Drop(name);
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

// Jobs that nobody has used for long go to disk, and come back when they are opened.
#include "absl/strings/str_cat.h"
#include "server/control/job_registry.h"

namespace shardd::control {

namespace {

// After a spill that failed: a full disk is not made better by trying at once.
constexpr absl::Duration kSpillRetry = absl::Minutes(10);

std::string AskedToDelete(const std::string& name) {
  return absl::StrCat("; shardctl job delete ", name, " gives it up");
}

}  // namespace

// What lies on disk from earlier. A job that is in memory too was being spilled or taken back when
// the daemon ended: memory counts.
void JobRegistry::FindSpilled() {
  if (spill_ == nullptr) return;
  for (auto& [name, status] : spill_->Jobs()) {
    const std::shared_ptr<step::Job> job = Lookup(name);
    if (job == nullptr) {
      if (!status.failure().empty()) {
        environment_.log(absl::StrCat("spilled job ", name, ": ", status.failure()));
      }
      std::lock_guard lock(mutex_);
      spilled_[name] = std::move(status);
      continue;
    }
    if (status.job_id() != job->Status().job_id()) {
      environment_.log(absl::StrCat("spilled job ", name, " at ", spill_->path(),
                                    " is another one than that in memory; it is left untouched"));
      continue;
    }
    if (absl::Status removed = spill_->Remove(name); !removed.ok()) {
      environment_.log(absl::StrCat("job ", name, ": ", removed.message()));
    }
  }
}

void JobRegistry::SpillIdle(absl::Duration idle) {
  if (spill_ == nullptr || draining_) return;
  const absl::Time now = environment_.now();
  for (const auto& job : Visible(0, true)) {
    const v1::JobStatus status = job->Status();
    if (status.idle_seconds() <= 0) continue;
    // What other daemons share stays where they find it.
    if (!status.daemon().empty() &&
        (status.own_chunks() < status.chunks() || status.coordinator() != status.daemon())) {
      continue;
    }
    {
      std::lock_guard lock(mutex_);
      if (now < spill_after_[job->name()] || busy_.contains(job->name())) continue;
      busy_[job->name()];
    }
    job->RetireIdle(idle, [this, job](absl::StatusOr<v1::JobStatus> status) {
      heavy_.Post([this, job, status = std::move(status)]() mutable {
        Spill(std::move(job), std::move(status));
      });
    });
  }
}

// The job is busy, and retired unless `status` says otherwise.
void JobRegistry::Spill(std::shared_ptr<step::Job> job, absl::StatusOr<v1::JobStatus> status) {
  const std::string name = job->name();
  const auto free_name = [&](std::shared_ptr<step::Job> held) {
    for (auto& task : EndBusy(name, std::move(held))) tasks_.Post(std::move(task));
  };
  if (!status.ok()) return free_name(job);  // in use again
  const uint64_t held = job->segments().plan().total();
  status->set_state("spilled");
  status->set_needed_bytes(held);
  status->set_spilled_bytes(job->segments().job_image().size() +
                            job->segments().state_image(job->layout()).size() +
                            job->segments().weights_image().size());
  status->set_state_bytes(0);
  status->set_weights_bytes(0);
  status->set_reduced_bytes(0);
  status->set_ring_bytes(0);
  const absl::Status written = spill_->Spill(job->segments(), job->layout(), *status);
  if (!written.ok()) {
    environment_.log(
        absl::StrCat("job ", name, " cannot be spilled and stays in memory: ", written.message()));
    job->UndoRetire();
    {
      std::lock_guard lock(mutex_);
      spill_after_[name] = environment_.now() + kSpillRetry;
    }
    return free_name(job);
  }
  environment_.failpoints->Reach("spill.before_free");
  {
    std::lock_guard lock(mutex_);
    jobs_.erase(name);
    spilled_[name] = *std::move(status);
    spill_after_.erase(name);
  }
  job->Stop();
  const absl::Status removed = store::RemoveJobDirectory(directory_->JobPath(name));
  if (!removed.ok()) environment_.log(absl::StrCat("job ", name, ": ", removed.message()));
  job.reset();
  descriptors_->Drop(name);
  environment_.log(absl::StrCat("job ", name, ": unused for job_ttl_seconds, spilled to ",
                                spill_->path(), "; ", held, " bytes of memory are free"));
  free_name(nullptr);
}

// The name is busy.
absl::Status JobRegistry::Unspill(const std::string& name) {
  v1::JobStatus status;
  {
    std::lock_guard lock(mutex_);
    status = spilled_[name];
  }
  if (!status.failure().empty() && status.needed_bytes() == 0) {
    return absl::DataLossError(absl::StrCat(status.failure(), AskedToDelete(name)));
  }
  absl::StatusOr<env::BudgetLease> lease =
      budget_->Reserve(status.needed_bytes(), absl::StrCat("the spilled job '", name, "'"));
  if (!lease.ok()) return lease.status();
  absl::StatusOr<store::AdoptedJob> adopted = spill_->Restore(*directory_, name);
  if (!adopted.ok()) {
    return absl::Status(adopted.status().code(),
                        absl::StrCat(adopted.status().message(), AskedToDelete(name)));
  }
  if (absl::Status s = TakeUp(name, *std::move(adopted), *std::move(lease), nullptr); !s.ok())
    return s;
  KeepDescriptors(name);
  environment_.failpoints->Reach("unspill.before_remove");
  {
    std::lock_guard lock(mutex_);
    spilled_.erase(name);
  }
  return spill_->Remove(name);
}

std::vector<v1::JobStatus> JobRegistry::Spilled(uid_t uid, bool privileged) const {
  std::lock_guard lock(mutex_);
  std::vector<v1::JobStatus> jobs;
  for (const auto& [name, status] : spilled_) {
    // Whose an unreadable one is cannot be known.
    const bool readable = !status.job_id().empty();
    if (privileged || (readable && status.uid() == uid)) jobs.push_back(status);
  }
  return jobs;
}

void JobRegistry::DeleteSpilled(const std::string& name, const DeleteCallback& done) {
  heavy_.Post([this, name, done] {
    absl::Status removed = RemoveJournal(name);
    removed.Update(spill_->Remove(name));
    {
      std::lock_guard lock(mutex_);
      if (removed.ok()) spilled_.erase(name);
    }
    environment_.log(absl::StrCat("job ", name, ": its spill was deleted"));
    for (auto& task : EndBusy(name, nullptr)) tasks_.Post(std::move(task));
    if (!removed.ok()) return done(removed);
    done(v1::DeleteJobReply());
  });
}

}  // namespace shardd::control

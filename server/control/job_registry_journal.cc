// Jobs with durability = node or peer: their journals, and their recovery after the machine's
// death.
#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/control/job_registry.h"
#include "server/step/journal_redo.h"

namespace shardd::control {

namespace {

std::string Rate(uint64_t bytes, double seconds) {
  if (seconds <= 0) return absl::StrCat(bytes, " bytes");
  return absl::StrCat(bytes, " bytes at ",
                      static_cast<int64_t>(static_cast<double>(bytes) / seconds / 1e6), " MB/s");
}

}  // namespace

void JobRegistry::UseJournals(const journal::JournalDirectory* journals,
                              v1::DaemonConfig::Journal config) {
  journals_ = journals;
  journal_config_ = std::move(config);
}

v1::Durability JobRegistry::BestDurability() const {
  return journals_ == nullptr ? v1::process : v1::node;
}

bool JobRegistry::HasJournal(const step::Job& job) const {
  return journals_ != nullptr && job.created_config().durability() != v1::process;
}

step::JournalSetup JobRegistry::SetupFor(const step::Job& job) const {
  const std::string& name = job.name();
  step::JournalSetup setup;
  setup.files = environment_.files;
  setup.failpoints = environment_.failpoints;
  setup.directory = journals_->JobPath(name);
  setup.config = journal_config_;
  setup.log = environment_.log;
  if (job.created_config().durability() != v1::peer) return setup;
  if (!HasMirrors()) {
    environment_.log(absl::StrCat("job ", name,
                                  ": has durability = peer and no mirror, since this daemon has no "
                                  "peers; the loss of the machine with its disk would cost all of "
                                  "it"));
    return setup;
  }
  setup.mirror = mirrors_->MirrorOf(name, job.segments().job_tag(), setup.directory);
  setup.files = setup.mirror->files();
  return setup;
}

absl::Status JobRegistry::CheckNoJournal(const std::string& name) const {
  if (journals_ == nullptr || !journals_->Holds(name)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the journal directory holds job '", name, "' of an earlier daemon at ",
      journals_->JobPath(name),
      ", which could not be recovered (see the daemon's log); choose another name, or remove that "
      "directory to give it up"));
}

absl::Status JobRegistry::CreateJournal(step::Job* job) {
  if (!HasJournal(*job)) return absl::OkStatus();
  return job->CreateJournal(SetupFor(*job));
}

absl::Status JobRegistry::AdoptJournal(step::Job* job) {
  if (!HasJournal(*job)) {
    if (job->created_config().durability() != v1::process) {
      environment_.log(absl::StrCat("job ", job->name(), ": has durability = ",
                                    v1::Durability_Name(job->created_config().durability()),
                                    " and no journal, since "
                                    "journal.directory is not set; the loss of the machine would "
                                    "cost all of it"));
    }
    return absl::OkStatus();
  }
  return job->AdoptJournal(SetupFor(*job));
}

absl::Status JobRegistry::RemoveJournal(const std::string& name) {
  if (journals_ == nullptr) return absl::OkStatus();
  const absl::Status status = DeleteMirror(name);
  return status.ok() ? journals_->Remove(name) : status;
}

void JobRegistry::RecoverAll() {
  if (journals_ == nullptr) return;
  absl::StatusOr<std::vector<std::string>> names = journals_->JobNames();
  if (!names.ok()) {
    environment_.log(absl::StrCat("jobs are not recovered: ", names.status().message()));
    return;
  }
  for (const std::string& name : *names) {
    if (Lookup(name) != nullptr || directory_->Holds(name)) continue;
    if (SpillIsAsNew(name)) continue;
    Recover(name, false);
    if (Lookup(name) == nullptr) continue;
    std::lock_guard lock(mutex_);
    if (spilled_.erase(name) == 0) continue;
    const absl::Status removed = spill_->Remove(name);
    if (!removed.ok()) environment_.log(absl::StrCat("job ", name, ": ", removed.message()));
  }
}

step::RedoEnvironment JobRegistry::EnvironmentOfRedo() const {
  step::RedoEnvironment environment;
  environment.files = environment_.files;
  environment.failpoints = environment_.failpoints;
  environment.pool = environment_.pool;
  environment.isa = environment_.isa;
  environment.log = environment_.log;
  return environment;
}

// Whether the job is spilled, and its journal leads no further: a daemon that did not look at
// spills may have taken it up from there.
bool JobRegistry::SpillIsAsNew(const std::string& name) const {
  v1::JobStatus spilled;
  {
    std::lock_guard lock(mutex_);
    const auto it = spilled_.find(name);
    if (it == spilled_.end()) return false;
    spilled = it->second;
  }
  const auto redo = step::JournalRedo::Open(EnvironmentOfRedo(), journals_->JobPath(name));
  if (!redo.ok()) {
    environment_.log(absl::StrCat("job ", name, ": its spill counts, since its journal ",
                                  journals_->JobPath(name),
                                  " cannot be read: ", redo.status().message()));
    return true;
  }
  const std::string id((*redo)->spec().job_id.begin(), (*redo)->spec().job_id.end());
  if (absl::BytesToHexString(id) != spilled.job_id()) return true;
  const uint64_t step = (*redo)->last_step();
  if (step <= spilled.committed_step()) return true;
  environment_.log(absl::StrCat("job ", name, ": its journal leads to step ", step,
                                " and counts, not its spill of step ", spilled.committed_step()));
  return false;
}

void JobRegistry::Recover(const std::string& name, bool replace) {
  RecoveryAttempt attempt;
  absl::Status status = RecoverFromJournal(name, replace, &attempt);
  while (attempt.skip_next > 0) {
    environment_.log(
        absl::StrCat("job ", name, ": ", status.message(), "; the snapshot before it is taken"));
    attempt = {.skip = attempt.skip_next};
    status = RecoverFromJournal(name, replace, &attempt);
  }
  if (status.ok()) return;
  if (attempt.nothing_committed) {
    environment_.log(absl::StrCat("job ", name, ": ", status.message(), "; it is given back"));
    // Its mirror may be whole.
    const absl::Status removed = journals_->Remove(name);
    if (!removed.ok()) environment_.log(std::string(removed.message()));
    return;
  }
  environment_.log(absl::StrCat("job ", name,
                                " cannot be recovered from its journal, which is left untouched "
                                "in ",
                                journals_->JobPath(name), ": ", status.message()));
}

absl::Status JobRegistry::RecoverFromJournal(const std::string& name, bool replace,
                                             RecoveryAttempt* attempt) {
  absl::StatusOr<std::unique_ptr<step::JournalRedo>> redo =
      step::JournalRedo::Open(EnvironmentOfRedo(), journals_->JobPath(name), attempt->skip);
  attempt->nothing_committed = absl::IsNotFound(redo.status());
  if (!redo.ok()) return redo.status();
  const store::JobSpec& spec = (*redo)->spec();
  if (spec.config.name() != name) {
    return absl::DataLossError(
        absl::StrCat(journals_->JobPath(name), " holds job '", spec.config.name(), "'"));
  }
  const contract::Layout& layout = (*redo)->layout();
  const std::optional<v1::JobPeers>& peers = (*redo)->peers();
  if (peers.has_value() && links_ == nullptr) {
    return absl::FailedPreconditionError(
        "it may span several daemons: give this one its peer section (peer.name, peer.peers)");
  }
  if (peers.has_value() && peers->daemon() != links_->self()) {
    return absl::FailedPreconditionError(absl::StrCat("it is the journal of daemon '",
                                                      peers->daemon(), "', and this one is '",
                                                      links_->self(), "' (peer.name)"));
  }
  // Chunks are counted with the others of the job that this daemon holds.
  const uint64_t total = store::PlanSegments(layout, spec, directory_->page_bytes()).total();
  const uint64_t later =
      peers.has_value() ? layout.num_chunks() * store::ChunkBytes(layout, spec) : 0;
  absl::StatusOr<env::BudgetLease> lease =
      budget_->Reserve(total - std::min(total, later), absl::StrCat("job '", name, "'"));
  if (!lease.ok()) return lease.status();
  environment_.log(absl::StrCat("job ", name, ": being recovered from its journal in ",
                                journals_->JobPath(name)));
  step::RedoReport report;
  absl::StatusOr<std::unique_ptr<store::JobSegments>> segments = store::JobSegments::Create(
      *directory_, layout, spec, [&](store::JobSegments* built) -> absl::Status {
        absl::StatusOr<step::RedoReport> filled = (*redo)->Fill(built);
        if (!filled.ok()) return filled.status();
        report = *filled;
        if (peers.has_value()) {
          absl::Status stored = step::WriteJobPeers(directory_->NewJobPath(name), *peers);
          if (!stored.ok()) return stored;
        }
        environment_.failpoints->Reach("recover.journal.before_rename");
        return replace ? store::RemoveJobDirectory(directory_->JobPath(name)) : absl::OkStatus();
      });
  if (!segments.ok()) {
    attempt->skip_next = (*redo)->skip_for_older();
    return segments.status();
  }
  const std::string id(spec.job_id.begin(), spec.job_id.end());
  absl::Status status;
  std::unique_ptr<step::Span> span = MakeSpanAlone(
      **segments, layout.num_chunks(), peers.has_value() ? &*peers : nullptr, &*lease, &status);
  if (!status.ok()) return status;
  auto job = std::make_shared<step::Job>(environment_, layout, spec.config, *std::move(segments),
                                         *std::move(lease), spec.uid, absl::BytesToHexString(id));
  if (span != nullptr) status = job->SpanWith(std::move(span));
  if (status.ok())
    status = job->ContinueJournal(SetupFor(*job), (*redo)->TakeEnd(), (*redo)->manifest());
  if (status.ok()) status = job->Recover();
  if (!status.ok()) return status;
  environment_.log(absl::StrCat(
      "job ", name, ": recovered from its journal: the snapshot of step ", report.snapshot_step,
      " (", Rate(report.snapshot_bytes, report.snapshot_seconds), "), then ", report.redone_steps,
      " steps (", Rate(report.log_bytes, report.log_seconds), ") up to step ",
      report.committed_step,
      report.prepared_step > 0
          ? absl::StrCat("; step ", report.prepared_step, " is complete and not decided")
          : "",
      report.cut.empty() ? "" : absl::StrCat("; a torn tail was cut: ", report.cut)));
  job->Start();
  KeepDescriptors(name);
  std::lock_guard lock(mutex_);
  jobs_[name] = std::move(job);
  return absl::OkStatus();
}

}  // namespace shardd::control

// The daemon's jobs: creation, attaching, deletion.
#ifndef SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_
#define SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/control.pb.h"
#include "proto/daemon_config.pb.h"
#include "server/control/job_finder.h"
#include "server/env/budget.h"
#include "server/env/task_queue.h"
#include "server/journal/journal_directory.h"
#include "server/peer/mirrors.h"
#include "server/step/job.h"
#include "server/step/journal_redo.h"
#include "server/store/descriptor_store.h"
#include "server/store/spill.h"
#include "server/store/state_directory.h"

namespace shardd::control {

// What a daemon took up at its start.
struct AdoptedJobs {
  uint32_t jobs = 0;
  absl::Duration took;
  // Since the daemon before was drained; zero: it was not.
  absl::Duration since_drain;
};

// Thread-safe. Creation and deletion touch much memory: they run on threads of their own, so
// that nobody's attaching waits for another's. While a name is made or removed, what else is
// wanted of it waits.
class JobRegistry {
 public:
  using OpenCallback = std::function<void(absl::StatusOr<v1::OpenReply>)>;
  using DeleteCallback = std::function<void(absl::StatusOr<v1::DeleteJobReply>)>;

  JobRegistry(const step::JobEnvironment& environment, const store::StateDirectory* directory,
              store::DescriptorStore* descriptors, const store::SpillDirectory* spill,
              env::Budget* budget, size_t max_jobs);
  ~JobRegistry();

  // Keeps journals of jobs with durability = node or peer in `journals`, as `config` says. Before
  // AdoptAll.
  void UseJournals(const journal::JournalDirectory* journals, v1::DaemonConfig::Journal config);
  // From now on jobs may span these daemons. Before AdoptAll; `links`, which is not started yet,
  // outlives this.
  void ShareWith(peer::Links* links);
  // Mirrors the journals of jobs with durability = peer. Before AdoptAll; outlives this.
  void UseMirrors(peer::Mirrors* mirrors);
  // What the peer mirrors for this daemon: jobs that are not here are fetched and recovered. Any
  // thread; never blocks.
  void OnMirrorList(v1::PeerMessage::MirrorList list);
  // What the links bring. Any thread; never blocks.
  void OnPeerMessage(const std::string& peer, peer::Message message);
  void OnPeerProcess(const std::string& peer);

  // Takes up the jobs that an earlier daemon left in the state directory, before anybody can
  // connect. One that cannot be is left untouched and said in the log; its name is not free.
  AdoptedJobs AdoptAll();
  // Spills the jobs that nobody has used for `idle`; returns at once. Nothing without a
  // spill directory.
  void SpillIdle(absl::Duration idle);
  // Serves Control.Open. The callback may come from any thread.
  void Open(std::shared_ptr<step::Session> session, v1::OpenRequest request, OpenCallback done);
  // Deletes a job and all of its state. The caller has checked that it may.
  void Delete(const std::string& name, bool force, DeleteCallback done);
  // Gives a new job its state before anybody sees it, and marks it as initialised; or leaves that
  // to the trainers' upload.
  using FillFunction = std::function<absl::Status(store::JobSegments*)>;
  // Makes the job of `spec`, on a new timeline, with what `fill` gives. AlreadyExists: it is there,
  // or is being made or removed. Takes as long as that takes; not from an RPC's thread.
  absl::Status Make(store::JobSpec spec, const contract::Layout& layout, const FillFunction& fill);
  // What a job that a client is about to create begins with; an empty function: nothing. An error
  // refuses the Open.
  using InitialState = std::function<absl::StatusOr<FillFunction>(
      const std::string& job, const v1::OpenRequest& parameters, const contract::Layout& layout,
      uint32_t uid)>;
  // Before the first Open.
  void SetInitialState(InitialState state) { initial_state_ = std::move(state); }
  // NotFound lists what there is to see for `uid` (all, if privileged).
  absl::StatusOr<std::shared_ptr<step::Job>> Find(const std::string& name, uid_t uid,
                                                  bool privileged) const;
  // Those that `uid` may see, by name.
  std::vector<std::shared_ptr<step::Job>> Visible(uid_t uid, bool privileged) const;
  // Lets every job come to the end of its step and stand still (at `deadline` wherever it is), and
  // leaves a note of it for the next daemon. From now on nobody can open a job.
  void Drain(absl::Time deadline, std::function<void(absl::StatusOr<v1::DrainReply>)> done);
  // Those of them that lie on disk.
  std::vector<v1::JobStatus> Spilled(uid_t uid, bool privileged) const;
  // Stops all jobs' threads; their state stays in the directory.
  void StopAll();

 private:
  void TryOpen(const std::shared_ptr<step::Session>& session,
               const std::shared_ptr<v1::OpenRequest>& request, const OpenCallback& done,
               absl::Time begun);
  void SearchPeers(const std::shared_ptr<step::Session>& session,
                   const std::shared_ptr<v1::OpenRequest>& request, const OpenCallback& done,
                   absl::Time begun);
  void OnSearched(const std::shared_ptr<step::Session>& session,
                  const std::shared_ptr<v1::OpenRequest>& request, const OpenCallback& done,
                  absl::Time begun, std::optional<FoundJob> found);
  // The name is busy: makes its job and attaches the session.
  void Make(const std::shared_ptr<step::Session>& session,
            const std::shared_ptr<v1::OpenRequest>& request, const OpenCallback& done,
            std::optional<FoundJob> found);
  absl::Status CheckFound(const FoundJob& found, const v1::OpenRequest& request,
                          const step::Session& session) const;
  void AnswerFind(const std::string& peer, const v1::PeerMessage& asked);
  // Of a job that lies here alone, as before this daemon knew others; `lease` keeps what is not
  // of chunks.
  std::unique_ptr<step::Span> MakeSpanAlone(const store::JobSegments& segments, uint64_t num_chunks,
                                            const v1::JobPeers* peers, env::BudgetLease* lease,
                                            absl::Status* status) const;
  std::unique_ptr<step::Span> MakeSpan(const v1::JobPeers& peers, uint64_t num_chunks,
                                       absl::Status* status) const;
  void Attach(const std::shared_ptr<step::Job>& job, const std::shared_ptr<step::Session>& session,
              const std::shared_ptr<v1::OpenRequest>& request, bool created,
              const OpenCallback& done);
  // The name is free again, or that of `job`; returns what waited for it.
  std::deque<std::function<void()>> EndBusy(const std::string& name,
                                            std::shared_ptr<step::Job> job);
  absl::StatusOr<std::shared_ptr<step::Job>> Create(const step::Session& session,
                                                    const v1::OpenRequest& request,
                                                    const FoundJob* found);
  // `spec` lacks its job_id and timeline, unless a peer has told them (`found`).
  absl::StatusOr<std::shared_ptr<step::Job>> MakeJob(store::JobSpec spec, contract::Layout layout,
                                                     const FillFunction& fill,
                                                     const FoundJob* found);
  absl::Status Adopt(const std::string& name);
  // job_registry_journal.cc: journals. Without them, nothing is done.
  v1::Durability BestDurability() const;
  bool HasJournal(const step::Job& job) const;
  step::JournalSetup SetupFor(const step::Job& job) const;
  absl::Status CheckNoJournal(const std::string& name) const;
  absl::Status CreateJournal(step::Job* job);
  absl::Status AdoptJournal(step::Job* job);
  absl::Status RemoveJournal(const std::string& name);
  void RecoverAll();
  // `replace`: segments of an earlier boot are in the way.
  void Recover(const std::string& name, bool replace);
  step::RedoEnvironment EnvironmentOfRedo() const;
  bool SpillIsAsNew(const std::string& name) const;
  struct RecoveryAttempt {
    size_t skip = 0;                 // of the newest snapshots
    size_t skip_next = 0;            // > 0: worth another attempt, with the snapshot before
    bool nothing_committed = false;  // the journal never had a step
  };
  absl::Status RecoverFromJournal(const std::string& name, bool replace, RecoveryAttempt* attempt);
  // job_registry_mirror.cc: mirrors. Without them, nothing is done.
  bool HasMirrors() const;
  absl::Status CheckMirror(const v1::JobConfig& config) const;
  absl::Status DeleteMirror(const std::string& name);
  void TakeMirrored(const v1::PeerMessage::MirrorList& list);
  void FetchMirrored(const v1::PeerMessage::MirroredJob& job);
  bool AwaitMirrors(const std::shared_ptr<step::Session>& session,
                    const std::shared_ptr<v1::OpenRequest>& request, const OpenCallback& done,
                    absl::Time begun);
  absl::Status AdoptKept(const std::string& name);
  bool GaveBack(const std::string& name, store::AdoptedJob* adopted);
  // `peers`: of a job that daemons share; null: it lies here alone.
  absl::Status TakeUp(const std::string& name, store::AdoptedJob adopted, env::BudgetLease lease,
                      const v1::JobPeers* peers);
  void KeepDescriptors(const std::string& name);
  // job_spill.cc
  void FindSpilled();
  void Spill(std::shared_ptr<step::Job> job, absl::StatusOr<v1::JobStatus> status);
  absl::Status Unspill(const std::string& name);
  void DeleteSpilled(const std::string& name, const DeleteCallback& done);
  absl::Status CheckAttach(const step::Job& job, const step::Session& session,
                           v1::OpenRequest* request, const contract::Layout& layout) const;
  void DetachFromJob(const std::shared_ptr<step::Session>& session);
  std::shared_ptr<step::Job> Lookup(const std::string& name) const;

  step::JobEnvironment environment_;
  const store::StateDirectory* directory_;
  store::DescriptorStore* descriptors_;
  const store::SpillDirectory* spill_;  // nullptr: jobs are never spilled
  env::Budget* budget_;
  const journal::JournalDirectory* journals_ = nullptr;
  v1::DaemonConfig::Journal journal_config_;
  const size_t max_jobs_;
  InitialState initial_state_;
  std::atomic<bool> draining_{false};
  peer::Links* links_ = nullptr;  // null: jobs are of this daemon alone
  peer::Mirrors* mirrors_ = nullptr;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<step::Job>> jobs_;  // under mutex_
  std::map<std::string, v1::JobStatus> spilled_;            // under mutex_
  bool mirror_listed_ = false;                              // the peer has said; under mutex_
  std::map<std::string, std::string> unfetched_;            // and why not; under mutex_
  std::map<std::string, absl::Time> spill_after_;           // not before; under mutex_
  // Names whose job is being made or removed, and what waits for that; under mutex_.
  std::map<std::string, std::deque<std::function<void()>>> busy_;
  env::TaskQueue heavy_{4};  // creation and removal
  std::unique_ptr<JobFinder> finder_;
  env::TaskQueue tasks_{1};  // all else; last: its thread uses the rest
};

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_

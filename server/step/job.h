// A training job: its state, its rank group and the thread that runs its steps.
//
// All of a job's state belongs to its thread. The public calls post to it and give
// their answer to a callback, from that thread; they may be made from any thread.
#ifndef SHARDD_SERVER_STEP_JOB_H_
#define SHARDD_SERVER_STEP_JOB_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/isa.h"
#include "kernels/optimizer.h"
#include "proto/contract/layout.h"
#include "proto/control.pb.h"
#include "server/env/budget.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/env/thread_pool.h"
#include "server/step/board.h"
#include "server/step/bucket_sums.h"
#include "server/step/commit.h"
#include "server/step/decider.h"
#include "server/step/durability.h"
#include "server/step/member.h"
#include "server/step/span.h"
#include "server/step/span_save.h"
#include "server/step/state_copy.h"
#include "server/step/updater.h"
#include "server/step/upload.h"
#include "server/store/decision_log.h"
#include "server/store/job_segments.h"

namespace shardd::step {

// Counters of the daemon that jobs add to.
struct Counters {
  std::atomic<uint64_t> refused_descriptors{0};
  std::atomic<uint64_t> refused_calls{0};
};

// What a job uses of its daemon; all of it outlives the job.
struct JobEnvironment {
  env::Failpoints* failpoints = nullptr;
  env::FileSystem* files = nullptr;  // of what outlives the machine
  env::ThreadPool* pool = nullptr;
  kernels::Isa isa = kernels::Isa::kScalar;
  absl::Duration spin = absl::Microseconds(20);
  Counters* counters = nullptr;
  std::function<absl::Time()> now;
  std::function<void(const std::string&)> log;
  // A session's connection has gone; called from the job's thread.
  std::function<void(const std::shared_ptr<Session>&)> on_session_end;
  // The last session has gone before every element was uploaded.
  std::function<void(const std::string& job)> on_abandoned;
  // It is to be deleted whoever uses it: the coordinator says so.
  std::function<void(const std::string& job)> on_deleted;
  // This daemon's part of it is to be saved, with what the ARM order says.
  std::function<void(const std::string& job, std::shared_ptr<SpanSave> save,
                     const v1::PeerMessage::Save& arm)>
      on_save;
};

// A ring that was attached, and what its owner is given for it.
struct AttachedRing {
  contract::UniqueFd weights;
  contract::UniqueFd window;
};

// What the job's status says of its checkpoints.
struct CheckpointReport {
  std::string state;    // of the save that runs: "saving step 100, 42 %"
  uint64_t step = 0;    // the newest complete one of this daemon's
  std::string path;     // of that
  std::string failure;  // of the last save
};

class Job : public std::enable_shared_from_this<Job> {
 public:
  template <typename T>
  using Callback = std::function<void(absl::StatusOr<T>)>;

  Job(const JobEnvironment& environment, contract::Layout layout, v1::JobConfig config,
      std::unique_ptr<store::JobSegments> segments, env::BudgetLease lease, uint32_t uid,
      std::string job_id);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  // For a job that an earlier daemon left, before Start: finishes the update that it was in, drops
  // its sessions and begins a new generation. DataLoss: the state does not fit its decision;
  // Start must not be called then.
  absl::Status Recover();
  // Gives the job its journal, before Recover and Start: of a new job, of one that an earlier
  // daemon left, of one that was built from it. Errors as Durability's.
  absl::Status CreateJournal(const JournalSetup& setup);
  absl::Status AdoptJournal(const JournalSetup& setup);
  absl::Status ContinueJournal(const JournalSetup& setup, journal::LogEnd end,
                               journal::Manifest manifest);
  // Of a job that other daemons may share; before Recover and Start. DataLoss: what is stored of
  // the others does not fit the job. ResourceExhausted: the budget.
  absl::Status SpanWith(std::unique_ptr<Span> span);
  // Starts the thread. Once.
  void Start();
  // Ends the thread and drops what was posted and not run, with its callbacks: their owners
  // answer when they are destroyed. Sessions are not told.
  void Stop();

  const std::string& name() const { return config_.name(); }
  uint32_t uid() const { return uid_; }
  const v1::JobConfig& created_config() const { return config_; }
  const contract::Layout& layout() const { return layout_; }
  const store::JobSegments& segments() const { return *segments_; }
  int moments() const { return optimizer_->num_states(); }
  // As registered: `parameters` and `frozen` only.
  v1::OpenRequest parameters() const;
  uint64_t ring_bytes() const { return ring_bytes_.load(); }

  // Places a session at a rank. AlreadyExists: a live process holds the rank.
  // `config` gives the fields that may differ from one run to the next.
  void Open(std::shared_ptr<Session> session, uint32_t rank, uint32_t world_size,
            const v1::JobConfig& config, bool created, bool restarted,
            Callback<v1::OpenReply> done);
  void AttachRing(std::shared_ptr<Session> session, std::unique_ptr<Ring> ring,
                  Callback<AttachedRing> done);
  void Join(std::shared_ptr<Session> session, absl::Duration timeout, JoinCallback done);
  void EndStep(std::shared_ptr<Session> session, v1::EndStepRequest request,
               Callback<v1::EndStepReply> done);
  void StepRecords(uint64_t first_step, Callback<v1::StepRecordsReply> done);
  void FillWindow(std::shared_ptr<Session> session, v1::FillWindowRequest request,
                  Callback<v1::FillWindowReply> done);
  // Why a session was refused, or what the current step waits for.
  void ExplainWait(std::shared_ptr<Session> session, Callback<v1::SessionErrorReply> done);
  void Close(std::shared_ptr<Session> session, Callback<v1::CloseReply> done);
  // Tells all sessions that the job is gone. FailedPrecondition: sessions are
  // attached and not force.
  void PrepareDelete(bool force, Callback<v1::DeleteJobReply> done);

  // Has nobody open the job any more, if nobody has used it for `idle`: later Opens are answered
  // NotFound. FailedPrecondition: it is in use. UndoRetire takes it back.
  void RetireIdle(absl::Duration idle, Callback<v1::JobStatus> done);
  void UndoRetire();
  // Lets the step that is being taken end, then stands still: no gradient is read and nobody
  // joins. At `deadline` it stands still wherever it is. Answers with where that was.
  void Drain(absl::Time deadline, Callback<v1::DrainedJob> done);

  // Begins a copy of the state between two steps: now (at_step 0), or as soon as that step is
  // committed. AlreadyExists: another one is not ended. The owner of the copy ends it.
  // With `save`: of this daemon's chunks, at the step of which all daemons take their copy, which
  // the coordinator chooses.
  void BeginCopy(StateCopy::Options options, uint64_t at_step, std::shared_ptr<SpanSave> save,
                 Callback<std::shared_ptr<StateCopy>> done);
  void EndCopy(std::shared_ptr<StateCopy> copy);
  // A copy that waits for its step is begun no more: its callback is told Cancelled.
  void CancelDueCopy();
  // At the coordinator of a job whose chunks lie with several daemons and whose ranks are attached:
  // has the others make ready for a copy. Null: the job is not such a one, or its chunks can come
  // here. The caller orders FINISH or CANCEL at the end.
  void BeginSpanSave(uint64_t rate_bytes_per_second, uint32_t keep,
                     Callback<std::shared_ptr<SpanSave>> done);
  void OrderSave(std::shared_ptr<SpanSave> save, SpanSave::Phase phase);
  // Elsewhere: that an order was carried out, or why not.
  void AnswerSave(std::shared_ptr<SpanSave> save, SpanSave::Phase phase, absl::Status status);
  // Any thread, at once.
  void ReportCheckpoint(CheckpointReport report);
  CheckpointReport LastCheckpoint() const;
  // Says to the other daemons of this job where it stands; once their answers would reach it.
  void Introduce();
  // What another daemon says of this job, and that another one's process is new.
  void OnPeerMessage(const std::string& peer, peer::Message message);
  void OnPeerProcess(const std::string& peer);
  // Makes another daemon that takes part the coordinator. FailedPrecondition: this one is not.
  void HandOver(const std::string& to, Callback<v1::HandOverReply> done);

  // The newest snapshot. Any thread; never waits for the job's thread.
  v1::JobStatus Status() const;
  // Asks the job's thread for a new snapshot and waits for it, for up to `timeout` (it may be
  // in a long update), then returns the newest there is. Not from the job's thread.
  v1::JobStatus FreshStatus(absl::Duration timeout);
  // With `timeout`, also what other daemons that take part say, as far as they answer in time.
  v1::JobStatus WholeStatus(absl::Duration timeout);
  v1::ListShardsReply Shards() const;

 private:
  using Members = std::vector<std::unique_ptr<Member>>;

  // job.cc: the thread.
  void Post(std::function<void()> command);
  void Main();
  bool RunCommands();
  bool PollRings();
  void Sleep();
  void OnEvents(int timeout_ms);
  void CheckClocks();
  void ExpireJoins(absl::Time now);
  absl::Time NextClock() const;
  void Wake() { board_.Wake(); }
  DecisionNews CurrentNews() const;
  absl::StatusOr<uint64_t> RedoDecision();
  // The last step that ranks may know to be committed.
  uint64_t VisibleStep() const { return decider_.committed_step() - (commit_.pending() ? 1 : 0); }
  // Of that step.
  std::span<const contract::ParameterEntry> VisibleTable() const {
    return log_.table(decider_.current().header.sequence - (commit_.pending() ? 1 : 0));
  }

  // job_drain.cc: standing still before the daemon ends.
  void DoDrain(absl::Time deadline, Callback<v1::DrainedJob> done);
  bool BetweenSteps() const;
  void CheckDrain();
  absl::Status Draining() const;

  // job_membership.cc: who takes part.
  Member* Find(const Session* session);
  absl::StatusOr<Member*> FindLive(const Session* session);
  Member* AtRank(uint32_t rank);
  absl::StatusOr<uint32_t> TakeLine(const Session& session);
  // "died", "hung up", or "" while its process has its connection.
  static std::string HowItEnded(const Session& session);
  absl::Status MakeRoom(uint32_t rank, uint32_t world_size);
  absl::StatusOr<v1::OpenReply> DoOpen(const std::shared_ptr<Session>& session, uint32_t rank,
                                       uint32_t world_size, const v1::JobConfig& config,
                                       bool created, bool restarted);
  absl::StatusOr<AttachedRing> DoAttachRing(const Session* session, std::unique_ptr<Ring> ring);
  void DoJoin(const Session* session, absl::Duration timeout, JoinCallback done);
  void TryForm();
  std::string MissingRanks(const std::function<bool(const Member&)>& has) const;
  void Watch(int operation, int fd, uint64_t key, uint32_t events);
  void BeginRun(uint32_t world_size, const v1::JobConfig& config, bool restarted);
  void Refuse(Member* member, absl::Status why);
  void Leave(Member* member, const std::string& how);
  void Remove(Member* member);
  void BreakGroup(const std::string& why);
  void EnterGeneration(uint64_t generation, const std::string& why);
  bool Lapsed(const Member& member) const;
  bool SomeRankHasClosed() const;  // of the running group
  // Keeps finished_ for a daemon that takes the job up, and takes it from the one before.
  void StoreFinished();
  void LoadFinished();

  // job_step.cc: the step.
  void OnDescriptor(Member* member, const contract::Descriptor& d);
  absl::Status CheckGradient(const Member& member, const contract::Descriptor& d) const;
  void OnGradient(Member* member, const contract::Descriptor& d);
  void OnInit(Member* member, const contract::Descriptor& d);
  // job_moments.cc
  void OnMoment(Member* member, const contract::Descriptor& d);
  // That a parameter, the one of `element`, begins with so many steps applied.
  void NoteApplied(uint64_t element, uint64_t applied);
  void OnFrozen(Member* member, const contract::Descriptor& d);  // job_checkpoint.cc
  void FinishInitialisation();
  void PollRing(Member* member);
  void ReleaseDescriptor(Member* member, uint64_t index);
  void FoldBucket(uint64_t bucket);
  absl::Status DoEndStep(const Session* session, v1::EndStepRequest* request);
  absl::Status CheckEndStep(const Member& member, const v1::EndStepRequest& request) const;
  void AcceptEndStep(Member* member, v1::EndStepRequest* request);
  bool Advance();
  StepInputs GatherInputs();
  void SetTrustRatios(const StepInputs& inputs, float clip_factor,
                      std::span<contract::ParameterEntry> table) const;
  void BeginDecision();
  void FinishDecision();
  void ForgetStep();
  void FailJob(const std::string& reason);

  // job_checkpoint.cc: copies of the state.
  void DoBeginCopy(const StateCopy::Options& options, uint64_t at_step,
                   const std::shared_ptr<SpanSave>& save,
                   const Callback<std::shared_ptr<StateCopy>>& done);
  void StartDueCopy();
  bool LiesElsewhere() const;
  absl::Status CanCopy() const;
  absl::Status CanGather() const;
  void Gather();
  StateSnapshot Snapshot() const;
  void SetCopy(std::shared_ptr<StateCopy> copy);
  void CancelCopy();  // any thread
  void DropCopy();
  void FillCheckpointStatus(v1::JobStatus* status) const;

  // job_durability.cc: the journal.
  void StartJournal();
  void MakeDurable();
  void TellJournalOfGeneration();
  void FillJournalStatus(v1::JobStatus* status) const;

  // job_span_journal.cc: journals of parts.
  bool KeepsPart() const;
  bool AwaitsOwners() const;
  v1::JobPeers PeersOf(const Placement& placement, uint64_t version) const;
  Durability::Parts DurabilityParts();
  Durability::Parts DurabilityParts(const Placement& placement, uint64_t version);
  void Prepare();
  bool AwaitsJournal() const;
  void TellStall();
  void MoveWaiting();
  void AfterDecision();
  bool SumsInUse() const;
  void FoldWaiting();
  absl::Status MakeNextJournal(const Placement& placement, uint64_t version);
  absl::Status TakeJournal(bool same_chunks);
  void DropJournal();
  absl::Status KeepJournal();

  // job_queries.cc: answers.
  absl::StatusOr<v1::FillWindowReply> DoFillWindow(const Session* session,
                                                   const v1::FillWindowRequest& request);
  v1::SessionErrorReply DoExplainWait(const Session* session);
  void Publish();  // the snapshot
  void PublishGroups(v1::JobStatus* status) const;
  static v1::StepRecord ToProto(const contract::StepRecordEntry& entry);

  // job_span.cc: what daemons tell each other, and where they stand.
  bool follows() const { return span_ != nullptr && span_->follows(); }
  bool coordinates() const { return span_ != nullptr && !span_->follows(); }
  void Tell(const std::string& daemon, v1::PeerMessage header, std::string bytes = {});
  void TellOthers(const v1::PeerMessage& header);
  std::set<std::string> Participants() const;
  void OnMessage(const std::string& from, peer::Message message);
  bool Fenced(const std::string& from, const v1::PeerMessage& header);
  void Dispatch(const std::string& from, peer::Message message);
  void RefuseMessage(const std::string& from, const std::string& why);
  void TellState(const std::string& to, bool answer);
  void OnState(const std::string& from, const v1::PeerMessage& header);
  void Synchronise(const std::string& with, const v1::PeerMessage::State& state, bool was_synced);
  void OnUnknown(const std::string& from, const v1::PeerMessage::Unknown& unknown);
  void DoHandOver(const std::string& to, Callback<v1::HandOverReply> done);
  void OnHandover(const std::string& from, const v1::PeerMessage& header);
  void OnHandoverAccepted(const std::string& from, const v1::PeerMessage& header);
  absl::Status StorePeersHere();
  absl::Status StorePeers();  // in the journal too
  std::string Silence(const std::string& daemon) const;

  // job_span_members.cc: ranks that are attached to other daemons.
  void ForwardOpen(const std::shared_ptr<Session>& session, uint32_t rank, uint32_t world_size,
                   const v1::JobConfig& config, bool restarted, Callback<v1::OpenReply> done);
  Member* FindRemote(const std::string& daemon, uint64_t session);
  absl::Status Admit(const std::string& daemon, const v1::PeerMessage::Member& member);
  void AnswerMember(const std::string& daemon, v1::PeerMessage::MemberAnswer::Call call,
                    uint64_t session, const absl::Status& status);
  void OnMemberAnswer(const v1::PeerMessage::MemberAnswer& answer);
  void OnMemberJoin(const std::string& from, const v1::PeerMessage::MemberJoin& join);
  void OnMemberEnd(const std::string& from, v1::PeerMessage::MemberEnd* end);
  void OnMemberGone(const std::string& from, const v1::PeerMessage& header);
  void TellGone(const Member& member, const std::string& how, bool amid_step);
  void TellJoin(const Member& member);
  void TellFormed(const v1::JoinReply& reply);
  void OnFormed(const v1::PeerMessage& header);
  void OnNewGeneration(const v1::PeerMessage& header);
  v1::PeerMessage::Member Describe(const Member& member) const;
  void DropEndedOpens(uint32_t rank);
  void ExpireOpens(absl::Time now);
  std::vector<std::string> DaemonsOfRanks();

  // job_span_step.cc: a step whose parts lie with several daemons.
  uint32_t LocalSlots() const;
  void OnLocalNodes(uint64_t bucket);
  void TellPartials(uint64_t bucket);
  void TellNode(uint64_t bucket, kernels::SlotRange node, const OwnedChunks& owned);
  void OnPartial(const std::string& from, peer::Message message);
  void RetryEarly();
  void TellPrepared();
  void OnPrepared(const std::string& from, const peer::Message& message);
  bool OthersPrepared() const;
  void TellDecision(const std::string& to, const std::string& failure);
  void OnDecided(const std::string& from, const v1::PeerMessage& header);
  absl::Status CheckReduced(uint64_t step) const;
  void ForgetSpanStep();
  void WeightsUpdated();
  void TellWeights(const std::string& to);
  void OnWeights(const std::string& from, const peer::Message& message);
  bool OthersComplete(uint64_t bucket) const;
  void MarkReady(contract::Range range);
  void ExpectWeights();
  bool WeightsThere(uint64_t bucket) const;

  // job_span_move.cc: chunks that move, initial values, reads from elsewhere.
  void TakePlacement();
  bool ReadyToForm();
  void StartReshard(const Placement& target);
  void DoReshard(const v1::PeerMessage& header);
  absl::Status GrowLease(uint64_t chunks);
  std::string StallOf(const std::string& daemon) const;
  absl::Status MakeRoomForChunks(const std::vector<contract::Range>& incoming, bool fresh);
  void TellChunk(uint64_t chunk, const std::string& to);
  void OnChunk(const std::string& from, const peer::Message& message);
  void ReshardPieceDone();
  void OnReshardStored(const std::string& from, const v1::PeerMessage& header);
  void AbandonReshard(const absl::Status& why);
  void CommitReshard();
  void OnOwners(const v1::PeerMessage& header);
  absl::Status TakeOwners(Placement placement, uint64_t version);
  void StoreInit(uint64_t begin, uint64_t count, const float* values);
  void OnInitPiece(const std::string& from, const peer::Message& message);
  void NoteStored(uint64_t begin, uint64_t count);
  void OnInitialised();
  bool ReadsElsewhere(const v1::FillWindowRequest& request) const;
  void StartRead(const std::shared_ptr<Session>& session, const v1::FillWindowRequest& request,
                 Callback<v1::FillWindowReply> done);
  void OnReadState(const std::string& from, peer::Message message);
  void OnStateData(const peer::Message& message);
  void ExpireReads(absl::Time now);
  void AskAgain();
  void CopyState(uint32_t kind, uint64_t begin, uint64_t count, float* out) const;
  void PublishSpan(v1::JobStatus* status) const;
  std::string ExplainSpan(uint64_t step) const;

  // job_span_save.cc: checkpoints of all parts.
  void DoBeginSpanSave(v1::PeerMessage::Save arm, const Callback<std::shared_ptr<SpanSave>>& done);
  absl::Status OthersReached() const;
  void TellSave(const SpanSave& save, v1::PeerMessage::Save order);
  void TellSaveAnswer(uint64_t save, SpanSave::Phase phase, const absl::Status& status);
  void OnSave(const v1::PeerMessage& header);
  void OnSaveAnswer(const std::string& from, const v1::PeerMessage::SaveAnswer& answer);
  void EndSpanSave(const absl::Status& why);
  void EndSpanSaveWith(const std::string& daemon, const std::string& why);
  void CheckSpanSave(absl::Time now);
  void StartPart();

  const JobEnvironment env_;
  const contract::Layout layout_;
  const v1::JobConfig config_;  // as created
  v1::JobConfig running_;       // with the fields that the current run gave
  std::unique_ptr<store::JobSegments> segments_;
  const env::BudgetLease lease_;  // of the segments
  const uint32_t uid_;
  const std::string job_id_;
  const kernels::Optimizer* optimizer_;
  struct GroupSize {
    uint64_t parameters = 0;
    uint64_t elements = 0;
  };
  std::vector<GroupSize> group_sizes_;  // of each parameter group
  store::DecisionLog log_;
  Decider decider_;
  BoardWriter board_;
  BucketSums sums_;
  Updater updater_;
  Upload upload_;
  std::unique_ptr<Span> span_;  // null: no other daemon can share the job

  Members members_;
  uint32_t world_size_ = 0;        // of the group; 0: nobody
  uint32_t group_world_size_ = 0;  // of the last group
  bool running_group_ = false;
  // Ranks that closed in good order at the committed step while others had not: one that dies
  // after them can come back and find the group complete.
  std::set<uint32_t> finished_;
  std::vector<v1::Hyperparameters> step_groups_;  // from rank 0, this step
  std::string step_blob_;
  absl::Time step_started_ = absl::InfinitePast();
  PendingCommit commit_;
  std::unique_ptr<Durability> durability_;     // null: durability = process
  std::optional<JournalSetup> journal_setup_;  // of a job whose parts have journals
  uint64_t journals_ = 0;                      // that were dropped
  uint32_t journal_reading_ = 0;               // generations that it may still read gradients of
  std::vector<uint64_t> unfolded_;             // buckets whose sums wait for that
  bool failed_ = false;
  bool deleted_ = false;
  bool begins_anew_ = false;  // a deletion that its ranks are not told of: they make it again
  std::string failure_;
  Callback<v1::DrainedJob> draining_;  // set: stand still at the end of the step
  absl::Time drain_began_;
  absl::Time drain_deadline_;
  bool drained_ = false;
  absl::Time idle_since_;
  absl::Time last_progress_;
  absl::Time published_at_ = absl::InfinitePast();

  // A copy that is to begin when a step is committed, and the one that has begun.
  struct DueCopy {
    StateCopy::Options options;
    uint64_t step = 0;
    std::shared_ptr<SpanSave> save;  // of which it is a part; null: of none
    Callback<std::shared_ptr<StateCopy>> done;
  };
  std::optional<DueCopy> due_copy_;
  std::shared_ptr<StateCopy> copy_;  // set by the job's thread, under mutex_
  double past_stall_seconds_ = 0;    // of copies that have ended
  double past_copy_seconds_ = 0;

  int epoll_ = -1;
  int event_ = -1;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> sleeping_{false};
  std::mutex mutex_;
  std::deque<std::function<void()>> commands_;  // under mutex_
  bool ended_ = false;                          // under mutex_
  std::atomic<uint64_t> ring_bytes_{0};
  mutable std::mutex status_mutex_;
  v1::JobStatus status_;                // under status_mutex_
  CheckpointReport checkpoint_report_;  // under status_mutex_
  Placement published_placement_;       // under status_mutex_
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_JOB_H_

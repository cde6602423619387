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
#include "server/env/thread_pool.h"
#include "server/step/board.h"
#include "server/step/bucket_sums.h"
#include "server/step/decider.h"
#include "server/step/member.h"
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
};

// A ring that was attached, and what its owner is given for it.
struct AttachedRing {
  contract::UniqueFd weights;
  contract::UniqueFd window;
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

  // The newest snapshot. Any thread; never waits for the job's thread.
  v1::JobStatus Status() const;
  // Asks the job's thread for a new snapshot and waits for it, for up to `timeout` (it may be
  // in a long update), then returns the newest there is. Not from the job's thread.
  v1::JobStatus FreshStatus(absl::Duration timeout);
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

  // job_membership.cc: who takes part.
  Member* Find(const Session* session);
  absl::StatusOr<Member*> FindLive(const Session* session);
  Member* AtRank(uint32_t rank);
  absl::StatusOr<uint32_t> TakeLine(const Session& session);
  absl::Status MakeRoom(uint32_t rank, uint32_t world_size);
  absl::StatusOr<v1::OpenReply> DoOpen(const std::shared_ptr<Session>& session, uint32_t rank,
                                       uint32_t world_size, const v1::JobConfig& config,
                                       bool created, bool restarted);
  absl::StatusOr<AttachedRing> DoAttachRing(const Session* session, std::unique_ptr<Ring> ring);
  void DoJoin(const Session* session, absl::Duration timeout, JoinCallback done);
  void TryForm();
  std::string MissingRanks(const std::function<bool(const Member&)>& has) const;
  void Watch(int operation, int fd, uint64_t key, uint32_t events);
  void Refuse(Member* member, absl::Status why);
  void Leave(Member* member, const std::string& how);
  void Remove(Member* member);
  void BreakGroup(const std::string& why);
  bool Lapsed(const Member& member) const;
  bool SomeRankHasClosed() const;  // of the running group

  // job_step.cc: the step.
  void OnDescriptor(Member* member, const contract::Descriptor& d);
  absl::Status CheckGradient(const Member& member, const contract::Descriptor& d) const;
  void OnGradient(Member* member, const contract::Descriptor& d);
  void OnInit(Member* member, const contract::Descriptor& d);
  void FinishInitialisation();
  void PollRing(Member* member);
  void ReleaseDescriptor(Member* member, uint64_t index);
  void FoldBucket(uint64_t bucket);
  absl::Status DoEndStep(const Session* session, v1::EndStepRequest* request);
  absl::Status CheckEndStep(const Member& member, const v1::EndStepRequest& request) const;
  bool Advance();
  void DecideStep();
  void ForgetStep();
  void FailJob(const std::string& reason);

  // job_queries.cc: answers.
  absl::StatusOr<v1::FillWindowReply> DoFillWindow(const Session* session,
                                                   const v1::FillWindowRequest& request);
  v1::SessionErrorReply DoExplainWait(const Session* session);
  void Publish();  // the snapshot
  static v1::StepRecord ToProto(const contract::StepRecordEntry& entry);

  const JobEnvironment env_;
  const contract::Layout layout_;
  const v1::JobConfig config_;  // as created
  v1::JobConfig running_;       // with the fields that the current run gave
  std::unique_ptr<store::JobSegments> segments_;
  const env::BudgetLease lease_;  // of the segments
  const uint32_t uid_;
  const std::string job_id_;
  const kernels::Optimizer* optimizer_;
  store::DecisionLog log_;
  Decider decider_;
  BoardWriter board_;
  BucketSums sums_;
  Updater updater_;
  Upload upload_;

  Members members_;
  uint32_t world_size_ = 0;        // of the group; 0: nobody
  uint32_t group_world_size_ = 0;  // of the last group
  bool running_group_ = false;
  // Ranks that closed in good order at the committed step while others had not: one that dies
  // after them can come back and find the group complete.
  std::set<uint32_t> finished_;
  // All of them did, and only one that was killed before its process ended can come back.
  bool all_finished_ = false;
  std::vector<v1::Hyperparameters> step_groups_;  // from rank 0, this step
  std::string step_blob_;
  absl::Time step_started_ = absl::InfinitePast();
  bool failed_ = false;
  bool deleted_ = false;
  std::string failure_;
  absl::Time idle_since_;
  absl::Time last_progress_;
  absl::Time published_at_ = absl::InfinitePast();

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
  v1::JobStatus status_;  // under status_mutex_
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_JOB_H_

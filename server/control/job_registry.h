// The daemon's jobs: creation, attaching, deletion.
#ifndef SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_
#define SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/control.pb.h"
#include "server/env/budget.h"
#include "server/env/task_queue.h"
#include "server/step/job.h"
#include "server/store/state_directory.h"

namespace shardd::control {

// Thread-safe. Creation and deletion touch much memory: they run on threads of their own, so
// that nobody's attaching waits for another's. While a name is made or removed, what else is
// wanted of it waits.
class JobRegistry {
 public:
  using OpenCallback = std::function<void(absl::StatusOr<v1::OpenReply>)>;

  JobRegistry(const step::JobEnvironment& environment, const store::StateDirectory* directory,
              env::Budget* budget, size_t max_jobs);
  ~JobRegistry();

  // Takes up the jobs that an earlier daemon left in the state directory, before anybody can
  // connect. One that cannot be is left untouched and said in the log; its name is not free.
  void AdoptAll();
  // Serves Control.Open. The callback may come from any thread.
  void Open(std::shared_ptr<step::Session> session, v1::OpenRequest request, OpenCallback done);
  // Deletes a job and all of its state. The caller has checked that it may.
  void Delete(const std::string& name, bool force,
              std::function<void(absl::StatusOr<v1::DeleteJobReply>)> done);
  // NotFound lists what there is to see for `uid` (all, if privileged).
  absl::StatusOr<std::shared_ptr<step::Job>> Find(const std::string& name, uid_t uid,
                                                  bool privileged) const;
  // Those that `uid` may see, by name.
  std::vector<std::shared_ptr<step::Job>> Visible(uid_t uid, bool privileged) const;
  // Stops all jobs' threads; their state stays in the directory.
  void StopAll();

 private:
  void TryOpen(const std::shared_ptr<step::Session>& session,
               const std::shared_ptr<v1::OpenRequest>& request, const OpenCallback& done);
  void Attach(const std::shared_ptr<step::Job>& job, const std::shared_ptr<step::Session>& session,
              const std::shared_ptr<v1::OpenRequest>& request, bool created,
              const OpenCallback& done);
  // The name is free again, or that of `job`; returns what waited for it.
  std::deque<std::function<void()>> EndBusy(const std::string& name,
                                            std::shared_ptr<step::Job> job);
  absl::StatusOr<std::shared_ptr<step::Job>> Create(const step::Session& session,
                                                    const v1::OpenRequest& request,
                                                    contract::Layout layout);
  absl::Status Adopt(const std::string& name);
  absl::Status CheckAttach(const step::Job& job, const step::Session& session,
                           v1::OpenRequest* request, const contract::Layout& layout) const;
  void DetachFromJob(const std::shared_ptr<step::Session>& session);
  std::shared_ptr<step::Job> Lookup(const std::string& name) const;

  step::JobEnvironment environment_;
  const store::StateDirectory* directory_;
  env::Budget* budget_;
  const size_t max_jobs_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<step::Job>> jobs_;  // under mutex_
  // Names whose job is being made or removed, and what waits for that; under mutex_.
  std::map<std::string, std::deque<std::function<void()>>> busy_;
  env::TaskQueue heavy_{4};  // creation and removal
  env::TaskQueue tasks_{1};  // all else; last: its thread uses the rest
};

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_

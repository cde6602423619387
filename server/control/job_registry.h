// The daemon's jobs: creation, attaching, deletion.
#ifndef SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_
#define SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_

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

// Thread-safe. Creation and deletion touch much memory and run one after the
// other on a thread of their own.
class JobRegistry {
 public:
  JobRegistry(const step::JobEnvironment& environment, const store::StateDirectory* directory,
              env::Budget* budget, size_t max_jobs);
  ~JobRegistry();

  // Takes up the jobs that an earlier daemon left in the state directory, before anybody can
  // connect. One that cannot be is left untouched and said in the log; its name is not free.
  void AdoptAll();
  // Serves Control.Open. The callback may come from any thread.
  void Open(std::shared_ptr<step::Session> session, v1::OpenRequest request,
            std::function<void(absl::StatusOr<v1::OpenReply>)> done);
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
  absl::StatusOr<std::shared_ptr<step::Job>> FindOrCreate(const step::Session& session,
                                                          v1::OpenRequest* request, bool* created);
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
  env::TaskQueue tasks_{1};                                 // last: its thread uses the rest
};

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_JOB_REGISTRY_H_

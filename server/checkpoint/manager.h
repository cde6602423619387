// Saves, lists, verifies, restores, exports and imports: what the Admin service offers for
// checkpoints (docs/checkpoints.md).
#ifndef SHARDD_SERVER_CHECKPOINT_MANAGER_H_
#define SHARDD_SERVER_CHECKPOINT_MANAGER_H_

#include <sys/types.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/checkpoint/directory.h"
#include "proto/checkpoint/reader.h"
#include "proto/control.pb.h"
#include "proto/daemon_config.pb.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/imports.h"
#include "server/checkpoint/operation.h"
#include "server/control/job_registry.h"
#include "server/env/budget.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/env/task_queue.h"

namespace shardd::checkpoint {

// All outlive the manager.
struct ManagerOptions {
  v1::DaemonConfig::Checkpoint config;
  std::string version;
  size_t threads = 1;  // for reading and converting
  env::FileSystem* files = nullptr;
  env::Failpoints* failpoints = nullptr;
  env::Budget* budget = nullptr;
  control::JobRegistry* jobs = nullptr;
  std::function<void(const std::string&)> log;
};

// Who asks. Others than the owner of a job's checkpoints and the privileged are told NotFound.
struct Caller {
  uid_t uid = 0;
  bool privileged = false;
};

// Thread-safe. Nothing blocks its caller but where that is said.
class Manager {
 public:
  using Report = std::function<void(const v1::CheckpointProgress&)>;
  // Once, when all is over; a detached save's, when its copy is taken.
  using Done = std::function<void(const absl::Status&)>;

  explicit Manager(ManagerOptions options);
  ~Manager();
  // Cancels all that runs and waits for it; later calls are told that the daemon goes down.
  void Stop();

  // Each begins on a thread of the manager's and can be cancelled by what is returned.
  std::shared_ptr<Operation> Save(Caller caller, v1::SaveCheckpointRequest request, Report report,
                                  Done done);
  std::shared_ptr<Operation> Verify(Caller caller, v1::VerifyCheckpointRequest request,
                                    Report report, Done done);
  std::shared_ptr<Operation> Restore(Caller caller, v1::RestoreCheckpointRequest request,
                                     Report report, Done done);
  std::shared_ptr<Operation> Export(Caller caller, v1::ExportWeightsRequest request, Report report,
                                    Done done);
  // The part that lies with this daemon of a job that another one saves.
  void SavePart(const std::string& job, std::shared_ptr<step::SpanSave> save,
                const v1::PeerMessage::Save& arm);
  // These three block.
  absl::StatusOr<v1::CancelCheckpointReply> Cancel(Caller caller,
                                                   const v1::CancelCheckpointRequest& request);
  absl::StatusOr<v1::ListCheckpointsReply> List(Caller caller,
                                                const v1::ListCheckpointsRequest& request);
  absl::StatusOr<v1::ImportWeightsReply> Import(Caller caller,
                                                const v1::ImportWeightsRequest& request);

  // What a job begins with that a client creates: what was imported for its name.
  absl::StatusOr<control::JobRegistry::FillFunction> InitialState(const std::string& job,
                                                                  const v1::OpenRequest& request,
                                                                  const contract::Layout& layout,
                                                                  uint32_t uid);

 private:
  class Claim;
  struct Copy;
  std::shared_ptr<Operation> Begin(
      const std::string& job, Report report, Done done,
      std::function<absl::Status(const std::shared_ptr<Operation>&, const Done& early)> run);
  absl::Status CheckConfigured() const;
  std::string JobDirectory(const std::string& job) const;
  // NotFound unless the caller may see it.
  absl::StatusOr<std::vector<StepDirectory>> Directories(const std::string& job) const;
  absl::StatusOr<Reader> OpenReader(Caller caller, const std::string& job,
                                    const StepDirectory& directory) const;
  // All members of one step; 0: of the newest that is complete.
  absl::StatusOr<std::vector<Reader>> OpenStep(Caller caller, const std::string& job,
                                               uint64_t step) const;
  // `patient`: the copy begins when its memory is all there, so that updates wait least.
  absl::StatusOr<Copy> TakeCopy(const std::shared_ptr<step::Job>& job, uint64_t at_step,
                                bool masters_only, bool patient,
                                std::shared_ptr<step::SpanSave> save,
                                const std::shared_ptr<Operation>& operation);
  absl::Status PrepareDirectory(const step::Job& job);

  absl::Status RunSave(Caller caller, const v1::SaveCheckpointRequest& request,
                       const std::shared_ptr<Operation>& operation, const Done& early);
  absl::Status SaveJob(const std::shared_ptr<step::Job>& job,
                       const v1::SaveCheckpointRequest& request,
                       const std::shared_ptr<Operation>& operation, const Done& early);
  absl::Status SaveParts(const std::shared_ptr<step::Job>& job,
                         const v1::SaveCheckpointRequest& request,
                         const std::shared_ptr<step::SpanSave>& save,
                         const std::shared_ptr<Operation>& operation, const Done& early);
  absl::Status RunSavePart(const std::string& job, const std::shared_ptr<step::SpanSave>& save,
                           const v1::PeerMessage::Save& arm,
                           const std::shared_ptr<Operation>& operation);
  absl::Status SavePartOf(const std::shared_ptr<step::Job>& job,
                          const std::shared_ptr<step::SpanSave>& save,
                          const v1::PeerMessage::Save& arm,
                          const std::shared_ptr<Operation>& operation);
  WriteOptions WriteOptionsOf(const step::Job& job, uint64_t rate_bytes_per_second) const;
  void ReportSave(step::Job* job, const absl::Status& status, const Operation& operation);
  Report AlsoToStatus(const std::shared_ptr<step::Job>& job, Report report) const;
  absl::Status RunVerify(Caller caller, const v1::VerifyCheckpointRequest& request,
                         Operation* operation);
  absl::Status RunRestore(Caller caller, const v1::RestoreCheckpointRequest& request,
                          Operation* operation);
  absl::Status RunExport(Caller caller, const v1::ExportWeightsRequest& request,
                         const std::shared_ptr<Operation>& operation);

  const ManagerOptions options_;
  Imports imports_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Saves and exports by job: one at a time of each; under mutex_.
  std::map<std::string, std::shared_ptr<Operation>> claims_;
  std::map<Operation*, std::shared_ptr<Operation>> running_;  // under mutex_
  bool stopped_ = false;                                      // under mutex_
  env::TaskQueue tasks_{8};
};

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_MANAGER_H_

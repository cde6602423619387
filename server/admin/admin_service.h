// Admin: what shardctl calls (proto/control.proto). It reads snapshots, so that
// a job whose thread is busy can still be looked at.
#ifndef SHARDD_SERVER_ADMIN_ADMIN_SERVICE_H_
#define SHARDD_SERVER_ADMIN_ADMIN_SERVICE_H_

#include "proto/control.grpc.pb.h"
#include "server/admin/progress_stream.h"
#include "server/checkpoint/manager.h"
#include "server/control/job_registry.h"
#include "server/control/session_registry.h"
#include "server/control/unary_call.h"
#include "server/env/failpoints.h"
#include "server/env/task_queue.h"

namespace shardd::admin {

// What ServerInfo tells that does not change.
struct ServerFacts {
  std::string version;
  std::string isa;
  uint32_t threads = 0;
  absl::Time started;
  bool failpoints = false;
  control::AdoptedJobs adopted;
};

// Thread-safe.
class AdminService final : public v1::Admin::CallbackService {
 public:
  AdminService(ServerFacts facts, control::SessionRegistry* sessions, control::JobRegistry* jobs,
               const store::StateDirectory* directory, env::Budget* budget,
               env::Failpoints* failpoints, step::Counters* counters,
               checkpoint::Manager* checkpoints, std::function<void()> on_drained,
               peer::Links* links);

  grpc::ServerUnaryReactor* ServerInfo(grpc::CallbackServerContext* context,
                                       const v1::ServerInfoRequest* request,
                                       v1::ServerInfoReply* reply) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const v1::ListJobsRequest* request,
                                     v1::ListJobsReply* reply) override;
  grpc::ServerUnaryReactor* ListShards(grpc::CallbackServerContext* context,
                                       const v1::ListShardsRequest* request,
                                       v1::ListShardsReply* reply) override;
  grpc::ServerUnaryReactor* DeleteJob(grpc::CallbackServerContext* context,
                                      const v1::DeleteJobRequest* request,
                                      v1::DeleteJobReply* reply) override;
  grpc::ServerUnaryReactor* ArmFailpoint(grpc::CallbackServerContext* context,
                                         const v1::ArmFailpointRequest* request,
                                         v1::ArmFailpointReply* reply) override;
  grpc::ServerUnaryReactor* WaitFailpoint(grpc::CallbackServerContext* context,
                                          const v1::WaitFailpointRequest* request,
                                          v1::WaitFailpointReply* reply) override;
  grpc::ServerUnaryReactor* ReleaseFailpoint(grpc::CallbackServerContext* context,
                                             const v1::ReleaseFailpointRequest* request,
                                             v1::ReleaseFailpointReply* reply) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request, v1::DrainReply* reply) override;
  // admin_checkpoints.cc
  using Progress = grpc::ServerWriteReactor<v1::CheckpointProgress>;
  Progress* SaveCheckpoint(grpc::CallbackServerContext* context,
                           const v1::SaveCheckpointRequest* request) override;
  Progress* VerifyCheckpoint(grpc::CallbackServerContext* context,
                             const v1::VerifyCheckpointRequest* request) override;
  Progress* RestoreCheckpoint(grpc::CallbackServerContext* context,
                              const v1::RestoreCheckpointRequest* request) override;
  Progress* ExportWeights(grpc::CallbackServerContext* context,
                          const v1::ExportWeightsRequest* request) override;
  grpc::ServerUnaryReactor* CancelCheckpoint(grpc::CallbackServerContext* context,
                                             const v1::CancelCheckpointRequest* request,
                                             v1::CancelCheckpointReply* reply) override;
  grpc::ServerUnaryReactor* ListCheckpoints(grpc::CallbackServerContext* context,
                                            const v1::ListCheckpointsRequest* request,
                                            v1::ListCheckpointsReply* reply) override;
  grpc::ServerUnaryReactor* ImportWeights(grpc::CallbackServerContext* context,
                                          const v1::ImportWeightsRequest* request,
                                          v1::ImportWeightsReply* reply) override;
  grpc::ServerUnaryReactor* HandOver(grpc::CallbackServerContext* context,
                                     const v1::HandOverRequest* request,
                                     v1::HandOverReply* reply) override;

 private:
  struct Caller {
    uid_t uid = 0;
    bool privileged = false;
  };
  absl::StatusOr<Caller> FindCaller(const std::string& token) const;
  template <typename Request, typename Reply, typename Serve>
  grpc::ServerUnaryReactor* ForCaller(grpc::CallbackServerContext* context, const Request* request,
                                      Reply* reply, const Serve& serve);
  absl::Status CheckFailpoints(const std::string& token) const;
  template <typename Request>
  using Begin = std::shared_ptr<checkpoint::Operation> (checkpoint::Manager::*)(
      checkpoint::Caller, Request, checkpoint::Manager::Report, checkpoint::Manager::Done);
  template <typename Request>
  Progress* Stream(const Request& request, Begin<Request> begin);
  template <typename Request, typename Reply>
  grpc::ServerUnaryReactor* Ask(
      grpc::CallbackServerContext* context, const Request* request, Reply* reply,
      absl::StatusOr<Reply> (checkpoint::Manager::*ask)(checkpoint::Caller, const Request&));

  const ServerFacts facts_;
  control::SessionRegistry* sessions_;
  control::JobRegistry* jobs_;
  const store::StateDirectory* directory_;
  env::Budget* budget_;
  env::Failpoints* failpoints_;
  step::Counters* counters_;
  checkpoint::Manager* checkpoints_;
  const std::function<void()> on_drained_;
  peer::Links* links_;         // null: no others are known
  env::TaskQueue waiters_{4};  // for what waits: failpoints, snapshots
};

// Finds who calls, or answers that nobody may.
template <typename Request, typename Reply, typename Serve>
grpc::ServerUnaryReactor* AdminService::ForCaller(grpc::CallbackServerContext* context,
                                                  const Request* request, Reply* reply,
                                                  const Serve& serve) {
  auto call = control::MakeCall(context, reply);
  absl::StatusOr<Caller> caller = FindCaller(request->token());
  if (caller.ok()) {
    serve(*caller, call);
  } else {
    call->Finish(caller.status());
  }
  return call->reactor();
}

}  // namespace shardd::admin

#endif  // SHARDD_SERVER_ADMIN_ADMIN_SERVICE_H_

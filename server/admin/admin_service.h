// Admin: what shardctl calls (proto/control.proto). It reads snapshots, so that
// a job whose thread is busy can still be looked at.
#ifndef SHARDD_SERVER_ADMIN_ADMIN_SERVICE_H_
#define SHARDD_SERVER_ADMIN_ADMIN_SERVICE_H_

#include "proto/control.grpc.pb.h"
#include "server/control/job_registry.h"
#include "server/control/session_registry.h"
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
};

// Thread-safe.
class AdminService final : public v1::Admin::CallbackService {
 public:
  AdminService(ServerFacts facts, control::SessionRegistry* sessions, control::JobRegistry* jobs,
               const store::StateDirectory* directory, env::Budget* budget,
               env::Failpoints* failpoints, step::Counters* counters);

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

  const ServerFacts facts_;
  control::SessionRegistry* sessions_;
  control::JobRegistry* jobs_;
  const store::StateDirectory* directory_;
  env::Budget* budget_;
  env::Failpoints* failpoints_;
  step::Counters* counters_;
  env::TaskQueue waiters_{4};  // for what waits: failpoints, snapshots
};

}  // namespace shardd::admin

#endif  // SHARDD_SERVER_ADMIN_ADMIN_SERVICE_H_

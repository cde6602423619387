// Control: what workers call (proto/control.proto).
#ifndef SHARDD_SERVER_CONTROL_CONTROL_SERVICE_H_
#define SHARDD_SERVER_CONTROL_CONTROL_SERVICE_H_

#include "proto/control.grpc.pb.h"
#include "server/control/job_registry.h"
#include "server/control/session_registry.h"

namespace shardd::control {

// Thread-safe; no call blocks a gRPC thread.
class ControlService final : public v1::Control::CallbackService {
 public:
  ControlService(SessionRegistry* sessions, JobRegistry* jobs, step::Counters* counters)
      : sessions_(sessions), jobs_(jobs), counters_(counters) {}

  grpc::ServerUnaryReactor* Open(grpc::CallbackServerContext* context,
                                 const v1::OpenRequest* request, v1::OpenReply* reply) override;
  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context,
                                 const v1::JoinRequest* request, v1::JoinReply* reply) override;
  grpc::ServerUnaryReactor* EndStep(grpc::CallbackServerContext* context,
                                    const v1::EndStepRequest* request,
                                    v1::EndStepReply* reply) override;
  grpc::ServerUnaryReactor* StepRecords(grpc::CallbackServerContext* context,
                                        const v1::StepRecordsRequest* request,
                                        v1::StepRecordsReply* reply) override;
  grpc::ServerUnaryReactor* FillWindow(grpc::CallbackServerContext* context,
                                       const v1::FillWindowRequest* request,
                                       v1::FillWindowReply* reply) override;
  grpc::ServerUnaryReactor* SessionError(grpc::CallbackServerContext* context,
                                         const v1::SessionErrorRequest* request,
                                         v1::SessionErrorReply* reply) override;
  grpc::ServerUnaryReactor* Close(grpc::CallbackServerContext* context,
                                  const v1::CloseRequest* request, v1::CloseReply* reply) override;

 private:
  // The session of a token, and the job that it is in.
  struct Caller {
    std::shared_ptr<step::Session> session;
    std::shared_ptr<step::Job> job;
  };
  absl::StatusOr<Caller> FindCaller(const std::string& token);
  template <typename Request, typename Reply, typename Serve>
  grpc::ServerUnaryReactor* InJob(grpc::CallbackServerContext* context, const Request* request,
                                  Reply* reply, const Serve& serve);

  SessionRegistry* sessions_;
  JobRegistry* jobs_;
  step::Counters* counters_;
};

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_CONTROL_SERVICE_H_

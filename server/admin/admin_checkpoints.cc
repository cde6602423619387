// The Admin calls for checkpoints: who asks, and what the manager says.
#include "server/admin/admin_service.h"
#include "server/control/unary_call.h"

namespace shardd::admin {

template <typename Request>
AdminService::Progress* AdminService::Stream(const Request& request, Begin<Request> begin) {
  const std::shared_ptr<ProgressStream> stream = ProgressStream::Create();
  absl::StatusOr<Caller> caller = FindCaller(request.token());
  if (!caller.ok()) {
    stream->Finish(caller.status());
    return stream.get();  // its own until gRPC is done with it
  }
  stream->Cancels((checkpoints_->*begin)(
      {caller->uid, caller->privileged}, request,
      [stream](const v1::CheckpointProgress& progress) { stream->Report(progress); },
      [stream](const absl::Status& status) { stream->Finish(status); }));
  return stream.get();
}

AdminService::Progress* AdminService::SaveCheckpoint(grpc::CallbackServerContext*,
                                                     const v1::SaveCheckpointRequest* request) {
  return Stream(*request, &checkpoint::Manager::Save);
}

AdminService::Progress* AdminService::VerifyCheckpoint(grpc::CallbackServerContext*,
                                                       const v1::VerifyCheckpointRequest* request) {
  return Stream(*request, &checkpoint::Manager::Verify);
}

AdminService::Progress* AdminService::RestoreCheckpoint(
    grpc::CallbackServerContext*, const v1::RestoreCheckpointRequest* request) {
  return Stream(*request, &checkpoint::Manager::Restore);
}

AdminService::Progress* AdminService::ExportWeights(grpc::CallbackServerContext*,
                                                    const v1::ExportWeightsRequest* request) {
  return Stream(*request, &checkpoint::Manager::Export);
}

// Asks on a thread that may wait.
template <typename Request, typename Reply>
grpc::ServerUnaryReactor* AdminService::Ask(
    grpc::CallbackServerContext* context, const Request* request, Reply* reply,
    absl::StatusOr<Reply> (checkpoint::Manager::*ask)(checkpoint::Caller, const Request&)) {
  return ForCaller(context, request, reply, [&](const Caller& caller, auto call) {
    waiters_.Post([this, call, ask, asker = checkpoint::Caller{caller.uid, caller.privileged},
                   asked = *request] { call->Finish((checkpoints_->*ask)(asker, asked)); });
  });
}

grpc::ServerUnaryReactor* AdminService::CancelCheckpoint(grpc::CallbackServerContext* context,
                                                         const v1::CancelCheckpointRequest* request,
                                                         v1::CancelCheckpointReply* reply) {
  return Ask(context, request, reply, &checkpoint::Manager::Cancel);
}

grpc::ServerUnaryReactor* AdminService::ListCheckpoints(grpc::CallbackServerContext* context,
                                                        const v1::ListCheckpointsRequest* request,
                                                        v1::ListCheckpointsReply* reply) {
  return Ask(context, request, reply, &checkpoint::Manager::List);
}

grpc::ServerUnaryReactor* AdminService::ImportWeights(grpc::CallbackServerContext* context,
                                                      const v1::ImportWeightsRequest* request,
                                                      v1::ImportWeightsReply* reply) {
  return Ask(context, request, reply, &checkpoint::Manager::Import);
}

}  // namespace shardd::admin

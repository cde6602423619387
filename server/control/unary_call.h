// One asynchronous unary RPC: answered exactly once, from any thread.
#ifndef SHARDD_SERVER_CONTROL_UNARY_CALL_H_
#define SHARDD_SERVER_CONTROL_UNARY_CALL_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardd::control {

// absl and gRPC number their codes alike.
inline grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

// Shared by whoever may still answer; when the last of them goes without an
// answer (a job that ended dropped its queue), the caller is told Unavailable.
template <typename Reply>
class UnaryCall {
 public:
  UnaryCall(grpc::CallbackServerContext* context, Reply* reply)
      : reactor_(context->DefaultReactor()), reply_(reply) {}
  ~UnaryCall() { Finish(absl::UnavailableError("the job or the daemon is going down; try again")); }
  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  grpc::ServerUnaryReactor* reactor() const { return reactor_; }
  void Finish(const absl::Status& status) {
    if (!finished_.exchange(true)) reactor_->Finish(ToGrpc(status));
  }
  void Finish(absl::StatusOr<Reply> reply) {
    if (finished_.exchange(true)) return;
    if (reply.ok()) *reply_ = *std::move(reply);
    reactor_->Finish(ToGrpc(reply.status()));
  }

 private:
  grpc::ServerUnaryReactor* reactor_;
  Reply* reply_;
  std::atomic<bool> finished_{false};
};

template <typename Reply>
std::shared_ptr<UnaryCall<Reply>> MakeCall(grpc::CallbackServerContext* context, Reply* reply) {
  return std::make_shared<UnaryCall<Reply>>(context, reply);
}

// The callback that answers `call`.
template <typename Reply>
auto Answering(std::shared_ptr<UnaryCall<Reply>> call) {
  return [call](absl::StatusOr<Reply> reply) { call->Finish(std::move(reply)); };
}

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_UNARY_CALL_H_

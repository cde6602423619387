// Calls of the daemon's Admin service.
#ifndef SHARDD_CLIENT_CLI_ADMIN_CHANNEL_H_
#define SHARDD_CLIENT_CLI_ADMIN_CHANNEL_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attach_connection.h"
#include "proto/control.grpc.pb.h"

namespace shardd::cli {

// One connection to a daemon; ends with the object. Not for several threads.
class AdminChannel {
 public:
  // `socket` is the path of the gRPC socket. Errors as of
  // AttachConnection::Connect.
  static absl::StatusOr<std::unique_ptr<AdminChannel>> Connect(const std::string& socket,
                                                               absl::Duration timeout);

  const std::string& daemon_version() const { return attachment_->version(); }

  // Waits until the daemon's process has ended, for up to `timeout`. False: it has not, or it is
  // in another pid namespace and cannot be watched.
  bool AwaitEnd(absl::Duration timeout) const;

  // One call, with this connection's token. The daemon's status is passed on;
  // Unavailable when it is gone.
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Call(grpc::Status (v1::Admin::StubInterface::*method)(grpc::ClientContext*,
                                                                              const Request&,
                                                                              Reply*),
                             Request request, absl::Duration deadline = absl::Seconds(30)) {
    request.set_token(attachment_->token());
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(deadline));
    Reply reply;
    absl::Status status = ToAbsl(((*stub_).*method)(&context, request, &reply));
    if (!status.ok()) return status;
    return reply;
  }

  // One call that streams; `on_message` gets each message. No deadline: it ends with the daemon,
  // or with this process, which cancels it.
  template <typename Request>
  using StreamMethod = std::unique_ptr<grpc::ClientReaderInterface<v1::CheckpointProgress>> (
      v1::Admin::StubInterface::*)(grpc::ClientContext*, const Request&);
  template <typename Request>
  absl::Status Stream(StreamMethod<Request> method, Request request,
                      const std::function<void(const v1::CheckpointProgress&)>& on_message) {
    request.set_token(attachment_->token());
    grpc::ClientContext context;
    const auto reader = ((*stub_).*method)(&context, request);
    v1::CheckpointProgress progress;
    while (reader->Read(&progress)) on_message(progress);
    return ToAbsl(reader->Finish());
  }

 private:
  AdminChannel(std::unique_ptr<AttachConnection> attachment,
               std::unique_ptr<v1::Admin::StubInterface> stub)
      : attachment_(std::move(attachment)), stub_(std::move(stub)) {}
  static absl::Status ToAbsl(const grpc::Status& status);

  std::unique_ptr<AttachConnection> attachment_;
  std::unique_ptr<v1::Admin::StubInterface> stub_;
};

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_ADMIN_CHANNEL_H_

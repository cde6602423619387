#include "client/control_channel.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace shardd {

namespace {

// For calls that the daemon answers at once.
constexpr absl::Duration kPrompt = absl::Seconds(30);

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& socket_path) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Sessions of one process must not share a connection or its back-off.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // Despite its name also what one attempt gets, hand-shake included: a busy daemon
  // needs more than the back-off.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 20'000);
  return grpc::CreateCustomChannel(absl::StrCat("unix:", socket_path),
                                   grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

ControlChannel::ControlChannel(const std::string& socket_path, std::string token)
    : socket_path_(socket_path), token_(std::move(token)) {
  const std::shared_ptr<grpc::Channel> channel = MakeChannel(socket_path);
  control_ = v1::Control::NewStub(channel);
  admin_ = v1::Admin::NewStub(channel);
}

template <typename Stub, typename Request, typename Reply>
absl::StatusOr<Reply> ControlChannel::Call(Stub* stub, Method<Stub, Request, Reply> method,
                                           Request request, absl::Duration timeout) {
  request.set_token(token_);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  Reply reply;
  const grpc::Status status = (stub->*method)(&context, request, &reply);
  if (status.ok()) return reply;
  return ToAbsl(status);
}

absl::Status ControlChannel::ToAbsl(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  // gRPC's codes are absl's. Its own words about a lost connection help nobody.
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return absl::UnavailableError(absl::StrCat("the daemon at ", socket_path_, " is gone (",
                                               status.error_message(),
                                               "); start it and open the job again"));
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::StatusOr<v1::OpenReply> ControlChannel::Open(v1::OpenRequest request,
                                                   absl::Duration timeout) {
  return Call(control_.get(), &v1::Control::Stub::Open, std::move(request), timeout);
}

absl::StatusOr<v1::JoinReply> ControlChannel::Join(v1::JoinRequest request,
                                                   absl::Duration timeout) {
  return Call(control_.get(), &v1::Control::Stub::Join, std::move(request), timeout);
}

absl::Status ControlChannel::EndStep(v1::EndStepRequest request, absl::Duration timeout) {
  return Call(control_.get(), &v1::Control::Stub::EndStep, std::move(request), timeout).status();
}

absl::StatusOr<v1::StepRecordsReply> ControlChannel::StepRecords(v1::StepRecordsRequest request) {
  return Call(control_.get(), &v1::Control::Stub::StepRecords, std::move(request), kPrompt);
}

absl::StatusOr<v1::FillWindowReply> ControlChannel::FillWindow(v1::FillWindowRequest request) {
  return Call(control_.get(), &v1::Control::Stub::FillWindow, std::move(request), kPrompt);
}

absl::Status ControlChannel::SessionError() {
  absl::StatusOr<v1::SessionErrorReply> reply =
      Call(control_.get(), &v1::Control::Stub::SessionError, v1::SessionErrorRequest(), kPrompt);
  if (!reply.ok()) return reply.status();
  const auto code = static_cast<absl::StatusCode>(reply->code());
  return absl::Status(code == absl::StatusCode::kOk ? absl::StatusCode::kFailedPrecondition : code,
                      reply->message());
}

absl::Status ControlChannel::Close() {
  return Call(control_.get(), &v1::Control::Stub::Close, v1::CloseRequest(), kPrompt).status();
}

absl::StatusOr<v1::ServerInfoReply> ControlChannel::ServerInfo() {
  return Call(admin_.get(), &v1::Admin::Stub::ServerInfo, v1::ServerInfoRequest(), kPrompt);
}

absl::StatusOr<v1::CheckpointProgress> ControlChannel::SaveCheckpoint(
    v1::SaveCheckpointRequest request) {
  request.set_token(token_);
  grpc::ClientContext context;
  const auto reader = admin_->SaveCheckpoint(&context, request);
  v1::CheckpointProgress progress;
  while (reader->Read(&progress)) {
  }
  if (absl::Status status = ToAbsl(reader->Finish()); !status.ok()) return status;
  return progress;
}

absl::Status ControlChannel::DeleteJob(const std::string& job) {
  v1::DeleteJobRequest request;
  request.set_job(job);
  request.set_force(true);
  return Call(admin_.get(), &v1::Admin::Stub::DeleteJob, std::move(request), kPrompt).status();
}

}  // namespace shardd

#include "server/control/control_service.h"

#include "absl/strings/str_cat.h"
#include "proto/contract/segments.h"
#include "server/control/unary_call.h"

namespace shardd::control {

absl::StatusOr<ControlService::Caller> ControlService::FindCaller(const std::string& token) {
  absl::StatusOr<std::shared_ptr<step::Session>> session = sessions_->Find(token);
  if (!session.ok()) {
    counters_->refused_calls += 1;
    return session.status();
  }
  std::shared_ptr<step::Job> job = (*session)->GetJob();
  if (job == nullptr) {
    return absl::FailedPreconditionError("this session is in no job; call Open first");
  }
  return Caller{*std::move(session), std::move(job)};
}

grpc::ServerUnaryReactor* ControlService::Open(grpc::CallbackServerContext* context,
                                               const v1::OpenRequest* request,
                                               v1::OpenReply* reply) {
  auto call = MakeCall(context, reply);
  absl::StatusOr<std::shared_ptr<step::Session>> session = sessions_->Find(request->token());
  if (!session.ok()) {
    counters_->refused_calls += 1;
    call->Finish(session.status());
  } else if (request->protocol_version() < contract::kOldestProtocolVersion ||
             request->protocol_version() > contract::kProtocolVersion) {
    counters_->refused_calls += 1;
    call->Finish(absl::FailedPreconditionError(
        absl::StrCat("Open speaks protocol ", request->protocol_version(), ", this daemon ",
                     contract::kOldestProtocolVersion, " to ", contract::kProtocolVersion)));
  } else {
    jobs_->Open(*std::move(session), *request, [this, call](absl::StatusOr<v1::OpenReply> answer) {
      if (!answer.ok()) counters_->refused_calls += 1;
      call->Finish(std::move(answer));
    });
  }
  return call->reactor();
}

// Most calls are of a session in a job: finds both, or answers why not.
template <typename Request, typename Reply, typename Serve>
grpc::ServerUnaryReactor* ControlService::InJob(grpc::CallbackServerContext* context,
                                                const Request* request, Reply* reply,
                                                const Serve& serve) {
  auto call = MakeCall(context, reply);
  absl::StatusOr<Caller> caller = FindCaller(request->token());
  if (caller.ok()) {
    serve(*caller, Answering(call));
  } else {
    call->Finish(caller.status());
  }
  return call->reactor();
}

grpc::ServerUnaryReactor* ControlService::Join(grpc::CallbackServerContext* context,
                                               const v1::JoinRequest* request,
                                               v1::JoinReply* reply) {
  const double seconds = request->deadline_seconds();
  const absl::Duration timeout = seconds > 0 ? absl::Seconds(seconds) : absl::InfiniteDuration();
  return InJob(context, request, reply, [&](const Caller& caller, auto answer) {
    caller.job->Join(caller.session, timeout, answer);
  });
}

grpc::ServerUnaryReactor* ControlService::EndStep(grpc::CallbackServerContext* context,
                                                  const v1::EndStepRequest* request,
                                                  v1::EndStepReply* reply) {
  return InJob(context, request, reply, [&](const Caller& caller, auto answer) {
    caller.job->EndStep(caller.session, *request, answer);
  });
}

grpc::ServerUnaryReactor* ControlService::StepRecords(grpc::CallbackServerContext* context,
                                                      const v1::StepRecordsRequest* request,
                                                      v1::StepRecordsReply* reply) {
  return InJob(context, request, reply, [&](const Caller& caller, auto answer) {
    caller.job->StepRecords(request->first_step(), answer);
  });
}

grpc::ServerUnaryReactor* ControlService::FillWindow(grpc::CallbackServerContext* context,
                                                     const v1::FillWindowRequest* request,
                                                     v1::FillWindowReply* reply) {
  return InJob(context, request, reply, [&](const Caller& caller, auto answer) {
    caller.job->FillWindow(caller.session, *request, answer);
  });
}

grpc::ServerUnaryReactor* ControlService::SessionError(grpc::CallbackServerContext* context,
                                                       const v1::SessionErrorRequest* request,
                                                       v1::SessionErrorReply* reply) {
  return InJob(context, request, reply, [&](const Caller& caller, auto answer) {
    caller.job->ExplainWait(caller.session, answer);
  });
}

grpc::ServerUnaryReactor* ControlService::Close(grpc::CallbackServerContext* context,
                                                const v1::CloseRequest* request,
                                                v1::CloseReply* reply) {
  return InJob(context, request, reply, [&](const Caller& caller, auto answer) {
    caller.job->Close(caller.session, answer);
  });
}

}  // namespace shardd::control

#include "server/admin/admin_service.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "proto/contract/segments.h"
#include "server/control/unary_call.h"

namespace shardd::admin {

namespace {

template <typename Reply>
std::shared_ptr<control::UnaryCall<Reply>> MakeCall(grpc::CallbackServerContext* context,
                                                    Reply* reply) {
  return std::make_shared<control::UnaryCall<Reply>>(context, reply);
}

// How long a snapshot may take before the last one is shown instead.
constexpr absl::Duration kFreshStatus = absl::Milliseconds(500);

}  // namespace

AdminService::AdminService(ServerFacts facts, control::SessionRegistry* sessions,
                           control::JobRegistry* jobs, const store::StateDirectory* directory,
                           env::Budget* budget, env::Failpoints* failpoints,
                           step::Counters* counters)
    : facts_(std::move(facts)),
      sessions_(sessions),
      jobs_(jobs),
      directory_(directory),
      budget_(budget),
      failpoints_(failpoints),
      counters_(counters) {}

absl::StatusOr<AdminService::Caller> AdminService::FindCaller(const std::string& token) const {
  absl::StatusOr<std::shared_ptr<step::Session>> session = sessions_->Find(token);
  if (!session.ok()) {
    counters_->refused_calls += 1;
    return session.status();
  }
  const uid_t uid = (*session)->uid;
  return Caller{uid, uid == 0 || uid == geteuid()};
}

// Finds who calls, or answers that nobody may.
template <typename Request, typename Reply, typename Serve>
grpc::ServerUnaryReactor* AdminService::ForCaller(grpc::CallbackServerContext* context,
                                                  const Request* request, Reply* reply,
                                                  const Serve& serve) {
  auto call = MakeCall(context, reply);
  absl::StatusOr<Caller> caller = FindCaller(request->token());
  if (caller.ok()) {
    serve(*caller, call);
  } else {
    call->Finish(caller.status());
  }
  return call->reactor();
}

grpc::ServerUnaryReactor* AdminService::ServerInfo(grpc::CallbackServerContext* context,
                                                   const v1::ServerInfoRequest* request,
                                                   v1::ServerInfoReply* reply) {
  return ForCaller(context, request, reply, [&](const Caller&, auto call) {
    v1::ServerInfoReply info;
    info.set_version(facts_.version);
    info.set_protocol_version(contract::kProtocolVersion);
    info.set_pid(getpid());
    info.set_uptime_seconds(absl::ToInt64Seconds(absl::Now() - facts_.started));
    info.set_isa(facts_.isa);
    info.set_threads(facts_.threads);
    info.set_budget_bytes(budget_->limit());
    info.set_planned_bytes(budget_->used());
    info.set_state_directory(directory_->path());
    info.set_page_bytes(directory_->page_bytes());
    info.set_sessions(static_cast<uint32_t>(sessions_->size()));
    info.set_refused_descriptors(counters_->refused_descriptors);
    info.set_refused_calls(counters_->refused_calls);
    call->Finish(std::move(info));
  });
}

grpc::ServerUnaryReactor* AdminService::ListJobs(grpc::CallbackServerContext* context,
                                                 const v1::ListJobsRequest* request,
                                                 v1::ListJobsReply* reply) {
  return ForCaller(context, request, reply, [&](const Caller& caller, auto call) {
    std::vector<std::shared_ptr<step::Job>> jobs;
    if (request->name().empty()) {
      jobs = jobs_->Visible(caller.uid, caller.privileged);
    } else {
      absl::StatusOr<std::shared_ptr<step::Job>> job =
          jobs_->Find(request->name(), caller.uid, caller.privileged);
      if (!job.ok()) return call->Finish(job.status());
      jobs.push_back(*std::move(job));
    }
    waiters_.Post([call, jobs = std::move(jobs)] {
      v1::ListJobsReply list;
      for (const auto& job : jobs) *list.add_jobs() = job->FreshStatus(kFreshStatus);
      call->Finish(std::move(list));
    });
  });
}

grpc::ServerUnaryReactor* AdminService::ListShards(grpc::CallbackServerContext* context,
                                                   const v1::ListShardsRequest* request,
                                                   v1::ListShardsReply* reply) {
  return ForCaller(context, request, reply, [&](const Caller& caller, auto call) {
    absl::StatusOr<std::shared_ptr<step::Job>> job =
        jobs_->Find(request->job(), caller.uid, caller.privileged);
    if (!job.ok()) return call->Finish(job.status());
    call->Finish((*job)->Shards());
  });
}

grpc::ServerUnaryReactor* AdminService::DeleteJob(grpc::CallbackServerContext* context,
                                                  const v1::DeleteJobRequest* request,
                                                  v1::DeleteJobReply* reply) {
  return ForCaller(context, request, reply, [&](const Caller& caller, auto call) {
    absl::StatusOr<std::shared_ptr<step::Job>> job =
        jobs_->Find(request->job(), caller.uid, caller.privileged);
    if (!job.ok()) return call->Finish(job.status());
    jobs_->Delete(request->job(), request->force(), control::Answering(call));
  });
}

absl::Status AdminService::CheckFailpoints(const std::string& token) const {
  absl::StatusOr<Caller> caller = FindCaller(token);
  if (!caller.ok()) return caller.status();
  if (!facts_.failpoints) {
    return absl::FailedPreconditionError(
        "failpoints are off; they are for tests: start the daemon with --failpoints=true");
  }
  if (!caller->privileged) {
    return absl::PermissionDeniedError("failpoints are for the daemon's own user");
  }
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* AdminService::ArmFailpoint(grpc::CallbackServerContext* context,
                                                     const v1::ArmFailpointRequest* request,
                                                     v1::ArmFailpointReply* reply) {
  auto call = MakeCall(context, reply);
  absl::Status status = CheckFailpoints(request->token());
  absl::StatusOr<env::FailpointAction> action = env::ParseFailpointAction(request->action());
  if (status.ok()) status = action.status();
  if (status.ok()) status = failpoints_->Arm(request->name(), *action, request->skip());
  call->Finish(status);
  return call->reactor();
}

grpc::ServerUnaryReactor* AdminService::WaitFailpoint(grpc::CallbackServerContext* context,
                                                      const v1::WaitFailpointRequest* request,
                                                      v1::WaitFailpointReply* reply) {
  auto call = MakeCall(context, reply);
  if (absl::Status status = CheckFailpoints(request->token()); !status.ok()) {
    call->Finish(status);
    return call->reactor();
  }
  const std::string name = request->name();
  const absl::Duration timeout = absl::Seconds(std::clamp(request->deadline_seconds(), 0.0, 600.0));
  waiters_.Post([this, call, name, timeout] {
    absl::StatusOr<uint64_t> hits = failpoints_->AwaitHit(name, timeout);
    if (!hits.ok()) return call->Finish(hits.status());
    v1::WaitFailpointReply answer;
    answer.set_hits(*hits);
    call->Finish(std::move(answer));
  });
  return call->reactor();
}

grpc::ServerUnaryReactor* AdminService::ReleaseFailpoint(grpc::CallbackServerContext* context,
                                                         const v1::ReleaseFailpointRequest* request,
                                                         v1::ReleaseFailpointReply* reply) {
  auto call = MakeCall(context, reply);
  absl::Status status = CheckFailpoints(request->token());
  if (status.ok()) status = failpoints_->Release(request->name());
  call->Finish(status);
  return call->reactor();
}

}  // namespace shardd::admin

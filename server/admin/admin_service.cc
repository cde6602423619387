#include "server/admin/admin_service.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/contract/segments.h"
#include "server/control/unary_call.h"

namespace shardd::admin {

namespace {

// How long a snapshot may take before the last one is shown instead.
constexpr absl::Duration kFreshStatus = absl::Milliseconds(500);

void DescribePeers(peer::Links* links, v1::ServerInfoReply* info) {
  info->set_peer_name(links->self());
  info->set_peer_port(links->port());
  info->set_refused_peer_connections(links->counters()->connections);
  info->set_refused_peers(links->counters()->peers);
  info->set_refused_peer_messages(links->counters()->messages);
  info->set_fenced_peer_messages(links->counters()->fenced);
  const absl::Time now = absl::Now();
  for (const std::string& name : links->peers()) {
    const peer::LinkState state = links->State(name);
    v1::PeerStatus* peer = info->add_peers();
    peer->set_name(name);
    peer->set_connected(state.connected);
    peer->set_silent_seconds(
        state.heard == absl::InfinitePast() ? -1 : absl::ToDoubleSeconds(now - state.heard));
    peer->set_queued_bytes(state.queued_bytes);
    peer->set_error(state.last_error);
  }
}

}  // namespace

AdminService::AdminService(ServerFacts facts, control::SessionRegistry* sessions,
                           control::JobRegistry* jobs, const store::StateDirectory* directory,
                           env::Budget* budget, env::Failpoints* failpoints,
                           step::Counters* counters, checkpoint::Manager* checkpoints,
                           std::function<void()> on_drained, peer::Links* links)
    : facts_(std::move(facts)),
      sessions_(sessions),
      jobs_(jobs),
      directory_(directory),
      budget_(budget),
      failpoints_(failpoints),
      counters_(counters),
      checkpoints_(checkpoints),
      on_drained_(std::move(on_drained)),
      links_(links) {}

absl::StatusOr<AdminService::Caller> AdminService::FindCaller(const std::string& token) const {
  absl::StatusOr<std::shared_ptr<step::Session>> session = sessions_->Find(token);
  if (!session.ok()) {
    counters_->refused_calls += 1;
    return session.status();
  }
  const uid_t uid = (*session)->uid;
  return Caller{uid, uid == 0 || uid == geteuid()};
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
    if (links_ != nullptr) DescribePeers(links_, &info);
    info.set_adopted_jobs(facts_.adopted.jobs);
    info.set_adopt_seconds(absl::ToDoubleSeconds(facts_.adopted.took));
    info.set_down_seconds(absl::ToDoubleSeconds(facts_.adopted.since_drain));
    call->Finish(std::move(info));
  });
}

grpc::ServerUnaryReactor* AdminService::ListJobs(grpc::CallbackServerContext* context,
                                                 const v1::ListJobsRequest* request,
                                                 v1::ListJobsReply* reply) {
  return ForCaller(context, request, reply, [&](const Caller& caller, auto call) {
    std::vector<std::shared_ptr<step::Job>> jobs;
    std::vector<v1::JobStatus> spilled = jobs_->Spilled(caller.uid, caller.privileged);
    if (!request->name().empty()) {
      std::erase_if(spilled, [&](const auto& job) { return job.name() != request->name(); });
    }
    if (request->name().empty()) {
      jobs = jobs_->Visible(caller.uid, caller.privileged);
    } else if (spilled.empty()) {
      absl::StatusOr<std::shared_ptr<step::Job>> job =
          jobs_->Find(request->name(), caller.uid, caller.privileged);
      if (!job.ok()) return call->Finish(job.status());
      jobs.push_back(*std::move(job));
    }
    waiters_.Post([call, jobs = std::move(jobs), spilled = std::move(spilled)] {
      v1::ListJobsReply list;
      for (const v1::JobStatus& job : spilled) *list.add_jobs() = job;
      for (const auto& job : jobs) *list.add_jobs() = job->WholeStatus(kFreshStatus);
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
    const std::vector<v1::JobStatus> spilled = jobs_->Spilled(caller.uid, caller.privileged);
    const bool is_spilled = std::any_of(spilled.begin(), spilled.end(), [&](const auto& status) {
      return status.name() == request->job();
    });
    if (!job.ok() && !is_spilled) return call->Finish(job.status());
    jobs_->Delete(request->job(), request->force(), control::Answering(call));
  });
}

grpc::ServerUnaryReactor* AdminService::Drain(grpc::CallbackServerContext* context,
                                              const v1::DrainRequest* request,
                                              v1::DrainReply* reply) {
  return ForCaller(context, request, reply, [&](const Caller& caller, auto call) {
    if (!caller.privileged) {
      return call->Finish(
          absl::PermissionDeniedError("draining is for root and the daemon's own user"));
    }
    const double seconds = request->deadline_seconds() == 0 ? 30 : request->deadline_seconds();
    if (!(seconds > 0 && seconds <= 3600)) {
      return call->Finish(absl::InvalidArgumentError(
          absl::StrCat("deadline_seconds is ", seconds, "; it must be above 0 and at most 3600")));
    }
    jobs_->Drain(absl::Now() + absl::Seconds(seconds),
                 [this, call](absl::StatusOr<v1::DrainReply> drained) {
                   const bool ok = drained.ok();
                   call->Finish(std::move(drained));
                   if (ok && on_drained_) on_drained_();
                 });
  });
}

grpc::ServerUnaryReactor* AdminService::HandOver(grpc::CallbackServerContext* context,
                                                 const v1::HandOverRequest* request,
                                                 v1::HandOverReply* reply) {
  return ForCaller(context, request, reply, [&](const Caller& caller, auto call) {
    absl::StatusOr<std::shared_ptr<step::Job>> job =
        jobs_->Find(request->job(), caller.uid, caller.privileged);
    if (!job.ok()) return call->Finish(job.status());
    (*job)->HandOver(request->to(), control::Answering(call));
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
  auto call = control::MakeCall(context, reply);
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
  auto call = control::MakeCall(context, reply);
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
  auto call = control::MakeCall(context, reply);
  absl::Status status = CheckFailpoints(request->token());
  if (status.ok()) status = failpoints_->Release(request->name());
  call->Finish(status);
  return call->reactor();
}

}  // namespace shardd::admin

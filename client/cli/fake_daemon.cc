#include "client/cli/fake_daemon.h"

#include <unistd.h>

#include <cstdlib>

#include "proto/contract/version.h"

namespace shardd::cli {

namespace {

constexpr char kToken[] = "fake token 16 by";

template <typename Request, typename Function, typename... Reply>
grpc::Status Answer(const Request& request, const Function& function, Reply*... reply) {
  if (request.token() != kToken) return {grpc::StatusCode::UNAUTHENTICATED, "not the token"};
  if (!function) return {grpc::StatusCode::UNIMPLEMENTED, "not set by this test"};
  return function(request, reply...);
}

}  // namespace

FakeDaemon::FakeDaemon() {
  char name[] = "/tmp/shardctl-fake-XXXXXX";
  directory_ = mkdtemp(name);
  socket_ = directory_ + "/shardd.sock";
  attach_ = std::make_unique<FakeAttachServer>(socket_, HelloAnswer(contract::kVersion));
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket_, grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

FakeDaemon::~FakeDaemon() {
  server_->Shutdown();
  attach_.reset();
  unlink(socket_.c_str());
  rmdir(directory_.c_str());
}

grpc::Status FakeDaemon::ServerInfo(grpc::ServerContext*, const v1::ServerInfoRequest* request,
                                    v1::ServerInfoReply* reply) {
  return Answer(*request, server_info, reply);
}
grpc::Status FakeDaemon::ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                                  v1::ListJobsReply* reply) {
  return Answer(*request, list_jobs, reply);
}
grpc::Status FakeDaemon::ListShards(grpc::ServerContext*, const v1::ListShardsRequest* request,
                                    v1::ListShardsReply* reply) {
  return Answer(*request, list_shards, reply);
}
grpc::Status FakeDaemon::DeleteJob(grpc::ServerContext*, const v1::DeleteJobRequest* request,
                                   v1::DeleteJobReply* reply) {
  return Answer(*request, delete_job, reply);
}
grpc::Status FakeDaemon::ArmFailpoint(grpc::ServerContext*, const v1::ArmFailpointRequest* request,
                                      v1::ArmFailpointReply*) {
  return Answer(*request, arm_failpoint);
}
grpc::Status FakeDaemon::WaitFailpoint(grpc::ServerContext*,
                                       const v1::WaitFailpointRequest* request,
                                       v1::WaitFailpointReply* reply) {
  return Answer(*request, wait_failpoint, reply);
}

}  // namespace shardd::cli

// A daemon for tests of shardctl: real sockets, answers that the test chooses.
#ifndef SHARDD_CLIENT_CLI_FAKE_DAEMON_H_
#define SHARDD_CLIENT_CLI_FAKE_DAEMON_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "proto/contract/attach.h"
#include "proto/contract/fd_passing.h"
#include "proto/control.grpc.pb.h"

namespace shardd::cli {

// Serves the attach socket of `socket` in a thread of its own, from construction to
// destruction. Each hello gets `answer`.
class FakeAttachServer {
 public:
  FakeAttachServer(const std::string& socket, const contract::AttachMessage& answer);
  ~FakeAttachServer();

 private:
  void Serve(contract::AttachMessage answer);

  std::string path_;
  contract::UniqueFd listener_;
  contract::UniqueFd stop_;
  std::thread thread_;
};

// The answer of a daemon of `version` with the token "fake token 16 by".
contract::AttachMessage HelloAnswer(const std::string& version);

// The Admin service beside it. A call is UNIMPLEMENTED unless its function is set,
// and UNAUTHENTICATED without the right token.
class FakeDaemon : public v1::Admin::Service {
 public:
  // Its sockets lie in a new directory under /tmp.
  FakeDaemon();
  ~FakeDaemon() override;

  const std::string& socket() const { return socket_; }

  std::function<grpc::Status(const v1::ListJobsRequest&, v1::ListJobsReply*)> list_jobs;
  std::function<grpc::Status(const v1::ListShardsRequest&, v1::ListShardsReply*)> list_shards;
  std::function<grpc::Status(const v1::DeleteJobRequest&, v1::DeleteJobReply*)> delete_job;
  std::function<grpc::Status(const v1::ServerInfoRequest&, v1::ServerInfoReply*)> server_info;
  std::function<grpc::Status(const v1::ArmFailpointRequest&)> arm_failpoint;
  std::function<grpc::Status(const v1::WaitFailpointRequest&, v1::WaitFailpointReply*)>
      wait_failpoint;

 private:
  grpc::Status ServerInfo(grpc::ServerContext*, const v1::ServerInfoRequest* request,
                          v1::ServerInfoReply* reply) override;
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                        v1::ListJobsReply* reply) override;
  grpc::Status ListShards(grpc::ServerContext*, const v1::ListShardsRequest* request,
                          v1::ListShardsReply* reply) override;
  grpc::Status DeleteJob(grpc::ServerContext*, const v1::DeleteJobRequest* request,
                         v1::DeleteJobReply* reply) override;
  grpc::Status ArmFailpoint(grpc::ServerContext*, const v1::ArmFailpointRequest* request,
                            v1::ArmFailpointReply* reply) override;
  grpc::Status WaitFailpoint(grpc::ServerContext*, const v1::WaitFailpointRequest* request,
                             v1::WaitFailpointReply* reply) override;

  std::string directory_;
  std::string socket_;
  std::unique_ptr<FakeAttachServer> attach_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_FAKE_DAEMON_H_

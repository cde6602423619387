// The control protocol over the daemon's Unix socket: one method for each call of
// proto/control.proto, with the token filled in and gRPC's status made ours.
#ifndef SHARDD_CLIENT_CONTROL_CHANNEL_H_
#define SHARDD_CLIENT_CONTROL_CHANNEL_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/control.grpc.pb.h"

namespace shardd {

// Thread-safe. Every call ends at its deadline with DeadlineExceeded; a daemon that
// is gone is Unavailable. The other codes and the messages are the daemon's.
class ControlChannel {
 public:
  ControlChannel(const std::string& socket_path, std::string token);

  absl::StatusOr<v1::OpenReply> Open(v1::OpenRequest request, absl::Duration timeout);
  absl::StatusOr<v1::JoinReply> Join(v1::JoinRequest request, absl::Duration timeout);
  absl::Status EndStep(v1::EndStepRequest request, absl::Duration timeout);
  absl::StatusOr<v1::StepRecordsReply> StepRecords(v1::StepRecordsRequest request);
  absl::StatusOr<v1::FillWindowReply> FillWindow(v1::FillWindowRequest request);
  // Why the daemon refused this session; always an error.
  absl::Status SessionError();
  absl::Status Close();
  absl::StatusOr<v1::ServerInfoReply> ServerInfo();
  // The last message of the stream. No deadline: a save takes as long as it takes.
  absl::StatusOr<v1::CheckpointProgress> SaveCheckpoint(v1::SaveCheckpointRequest request);
  // Also while sessions are attached.
  absl::Status DeleteJob(const std::string& job);

 private:
  absl::Status ToAbsl(const grpc::Status& status) const;
  template <typename Stub, typename Request, typename Reply>
  using Method = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&, Reply*);
  template <typename Stub, typename Request, typename Reply>
  absl::StatusOr<Reply> Call(Stub* stub, Method<Stub, Request, Reply> method, Request request,
                             absl::Duration timeout);

  std::string socket_path_;
  std::string token_;
  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_CONTROL_CHANNEL_H_

// A call that streams the progress of an operation.
#ifndef SHARDD_SERVER_ADMIN_PROGRESS_STREAM_H_
#define SHARDD_SERVER_ADMIN_PROGRESS_STREAM_H_

#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "proto/control.grpc.pb.h"
#include "server/checkpoint/operation.h"

namespace shardd::admin {

// Lives until gRPC is done with it and nobody reports to it any more. Thread-safe. Of messages
// that come faster than the client reads, the newest is sent.
class ProgressStream final : public grpc::ServerWriteReactor<v1::CheckpointProgress>,
                             public std::enable_shared_from_this<ProgressStream> {
 public:
  static std::shared_ptr<ProgressStream> Create();

  void Report(const v1::CheckpointProgress& progress);
  // The last message is sent before. Once.
  void Finish(const absl::Status& status);
  // What a client that goes away before the end cancels.
  void Cancels(std::shared_ptr<checkpoint::Operation> operation);

 private:
  ProgressStream() = default;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  void Next(std::unique_lock<std::mutex> lock);

  std::mutex mutex_;
  // All under mutex_.
  std::shared_ptr<ProgressStream> self_;  // until OnDone
  std::optional<v1::CheckpointProgress> waiting_;
  v1::CheckpointProgress writing_;
  bool write_pending_ = false;
  bool gone_ = false;
  std::optional<grpc::Status> status_;
  bool finished_ = false;
  std::shared_ptr<checkpoint::Operation> operation_;
};

}  // namespace shardd::admin

#endif  // SHARDD_SERVER_ADMIN_PROGRESS_STREAM_H_

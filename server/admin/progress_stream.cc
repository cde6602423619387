#include "server/admin/progress_stream.h"

#include "server/control/unary_call.h"

namespace shardd::admin {

std::shared_ptr<ProgressStream> ProgressStream::Create() {
  std::shared_ptr<ProgressStream> stream(new ProgressStream());
  stream->self_ = stream;
  return stream;
}

void ProgressStream::Report(const v1::CheckpointProgress& progress) {
  std::unique_lock lock(mutex_);
  if (status_.has_value() || gone_) return;
  waiting_ = progress;
  Next(std::move(lock));
}

void ProgressStream::Finish(const absl::Status& status) {
  std::unique_lock lock(mutex_);
  if (status_.has_value()) return;
  status_ = control::ToGrpc(status);
  operation_ = nullptr;
  Next(std::move(lock));
}

void ProgressStream::Cancels(std::shared_ptr<checkpoint::Operation> operation) {
  std::unique_lock lock(mutex_);
  if (status_.has_value()) return;
  if (!gone_) {
    operation_ = std::move(operation);
    return;
  }
  lock.unlock();
  operation->Cancel();
}

// One write or the end at a time; gRPC is called without the lock.
void ProgressStream::Next(std::unique_lock<std::mutex> lock) {
  if (write_pending_ || finished_) return;
  if (waiting_.has_value() && !gone_) {
    writing_ = *std::move(waiting_);
    waiting_.reset();
    write_pending_ = true;
    lock.unlock();
    StartWrite(&writing_);
  } else if (status_.has_value()) {
    finished_ = true;
    const grpc::Status status = *status_;
    lock.unlock();
    ServerWriteReactor::Finish(status);
  }
}

void ProgressStream::OnWriteDone(bool ok) {
  std::unique_lock lock(mutex_);
  write_pending_ = false;
  if (!ok) gone_ = true;
  Next(std::move(lock));
}

void ProgressStream::OnCancel() {
  std::unique_lock lock(mutex_);
  gone_ = true;
  const std::shared_ptr<checkpoint::Operation> operation = std::move(operation_);
  lock.unlock();
  if (operation != nullptr) operation->Cancel();
}

void ProgressStream::OnDone() {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<ProgressStream> self = std::move(self_);  // goes after the lock
  lock.unlock();
}

}  // namespace shardd::admin

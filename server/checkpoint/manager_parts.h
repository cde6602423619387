// What the manager's operations share.
#ifndef SHARDD_SERVER_CHECKPOINT_MANAGER_PARTS_H_
#define SHARDD_SERVER_CHECKPOINT_MANAGER_PARTS_H_

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/checkpoint/manager.h"

namespace shardd::checkpoint {

// Tells once; that the daemon goes down, if nobody told before.
class OnceDone {
 public:
  explicit OnceDone(Manager::Done done) : done_(std::move(done)) {}
  ~OnceDone() { Tell(absl::UnavailableError("the daemon is going down; ask its successor")); }
  OnceDone(const OnceDone&) = delete;
  void Tell(const absl::Status& status) {
    if (!told_.exchange(true)) done_(status);
  }

 private:
  const Manager::Done done_;
  std::atomic<bool> told_{false};
};

// A callback's answer, waited for. Unavailable when the callback is dropped.
template <typename T>
class Awaited {
 public:
  std::function<void(absl::StatusOr<T>)> Callback() {
    auto promise = std::make_shared<std::promise<absl::StatusOr<T>>>();
    future_ = promise->get_future();
    return [promise](absl::StatusOr<T> answer) { promise->set_value(std::move(answer)); };
  }
  absl::StatusOr<T> Wait() {
    try {
      return future_.get();
    } catch (const std::future_error&) {
      return absl::UnavailableError("the job or the daemon is going down; try again");
    }
  }

 private:
  std::future<absl::StatusOr<T>> future_;
};

// The one save or export of a job.
class Manager::Claim {
 public:
  static absl::StatusOr<std::unique_ptr<Claim>> Take(Manager* manager, const std::string& job,
                                                     std::shared_ptr<Operation> operation) {
    const std::lock_guard lock(manager->mutex_);
    if (!manager->claims_.emplace(job, std::move(operation)).second) {
      return absl::AlreadyExistsError(
          absl::StrCat("job '", job, "' is being saved or exported; wait for that, or cancel it: ",
                       "shardctl checkpoint cancel ", job));
    }
    return std::unique_ptr<Claim>(new Claim(manager, job));
  }
  ~Claim() {
    {
      const std::lock_guard lock(manager_->mutex_);
      manager_->claims_.erase(job_);
    }
    manager_->changed_.notify_all();
  }
  Claim(const Claim&) = delete;

 private:
  Claim(Manager* manager, std::string job) : manager_(manager), job_(std::move(job)) {}
  Manager* const manager_;
  const std::string job_;
};

// A copy with the memory that it may use. Ends the copy when it goes.
struct Manager::Copy {
  Copy() = default;
  Copy(Copy&&) = default;
  Copy& operator=(Copy&&) = delete;
  ~Copy() {
    if (copy == nullptr) return;
    copy->OnCancel(nullptr);  // that it ends now cancels nothing
    copy->Cancel();
    if (const std::shared_ptr<step::Job> alive = job.lock()) alive->EndCopy(copy);
  }
  env::BudgetLease lease;
  std::weak_ptr<step::Job> job;  // which may be deleted meanwhile; then the copy is cancelled
  std::shared_ptr<step::StateCopy> copy;
};

// Of tensors, without headers.
inline uint64_t DataBytes(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const FileEntry& file : manifest.files) bytes += file.bytes - file.header_bytes;
  return bytes;
}

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_MANAGER_PARTS_H_

// One attached client connection, and after Open one rank of one job.
#ifndef SHARDD_SERVER_STEP_SESSION_H_
#define SHARDD_SERVER_STEP_SESSION_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "proto/contract/fd_passing.h"

namespace shardd::step {

class Job;

// Made by the attach socket; shared by it, the RPC handlers and the job's thread.
struct Session {
  std::string token;   // 16 random bytes
  uint64_t nonce = 0;  // 62 random bits, never 0: no other session of any daemon has it
  uid_t uid = 0;
  pid_t pid = 0;
  contract::UniqueFd socket;
  contract::UniqueFd pidfd;

  std::mutex mutex;
  std::weak_ptr<Job> job;  // under mutex; set once, by Open
  absl::Status refusal;    // under mutex; why its line is kRefused
  std::atomic<bool> closed{false};

  std::shared_ptr<Job> GetJob() {
    std::lock_guard lock(mutex);
    return job.lock();
  }
  void SetRefusal(absl::Status status) {
    std::lock_guard lock(mutex);
    if (refusal.ok()) refusal = std::move(status);
  }
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_SESSION_H_

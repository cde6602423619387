// Asks the other daemons for a job that this one does not have.
#ifndef SHARDD_SERVER_CONTROL_JOB_FINDER_H_
#define SHARDD_SERVER_CONTROL_JOB_FINDER_H_

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "proto/peer.pb.h"
#include "server/peer/links.h"

namespace shardd::control {

// What a peer told of a job; also fences it.
struct FoundJob {
  v1::PeerMessage::Found said;
  std::string job_id;  // 16 bytes
  uint64_t timeline = 0;
};

// Thread-safe. One thread, for the times.
class JobFinder {
 public:
  // Null: no peer has it as far as they answered in time. From any thread.
  using Callback = std::function<void(std::optional<FoundJob>)>;

  // `links` outlives it.
  explicit JobFinder(peer::Links* links);
  ~JobFinder();

  // Asks all peers. Answers as soon as one has it or all have said no; a peer that is not reached
  // is waited for until `patience` has passed.
  void Find(const std::string& job, absl::Duration patience, Callback done);
  void OnFound(const std::string& peer, const v1::PeerMessage& message);
  // Runs `task` after a while.
  void After(absl::Duration wait, std::function<void()> task);
  // Drops what waits.
  void Stop();

 private:
  struct Search {
    std::set<std::string> silent;  // peers that have not answered
    Callback done;
  };
  void Main();
  void GiveUp(uint64_t request);

  peer::Links* links_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_request_ = 1;                               // under mutex_
  std::map<uint64_t, Search> searches_;                     // under mutex_
  std::multimap<absl::Time, std::function<void()>> tasks_;  // under mutex_
  bool stop_ = false;                                       // under mutex_
  std::thread thread_;
};

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_JOB_FINDER_H_

// One checkpoint of a job whose chunks lie with several daemons: what those say to each other of it
// (docs/formats/peer.md), between the job's thread and the one that writes this daemon's part.
#ifndef SHARDD_SERVER_STEP_SPAN_SAVE_H_
#define SHARDD_SERVER_STEP_SPAN_SAVE_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "proto/peer.pb.h"

namespace shardd::step {

// Thread-safe.
class SpanSave {
 public:
  using Phase = v1::PeerMessage::Save::Phase;

  // `others`: the daemons besides this one that hold chunks; at the coordinator.
  SpanSave(uint64_t id, uint64_t owners_version, std::set<std::string> others)
      : id_(id), owners_version_(owners_version), others_(std::move(others)) {}

  uint64_t id() const { return id_; }
  uint64_t owners_version() const { return owners_version_; }
  const std::set<std::string>& others() const { return others_; }

  // --- the job's thread: what was said ---
  void Ordered(Phase phase);
  // An error ends the save.
  void Answered(const std::string& daemon, Phase phase, const absl::Status& status);

  // Nothing more will come: waits return `why` from now on. The first one counts.
  void End(absl::Status why);
  // `told` is called by End, once; at once if that was. May be empty.
  void OnEnd(std::function<void()> told);
  // Why it ended; OK while it has not.
  absl::Status ended() const;

  // --- the thread that writes: until it was ordered, or answered by all others ---
  absl::Status AwaitOrder(Phase phase);
  absl::Status AwaitAnswers(Phase phase);

 private:
  const uint64_t id_;
  const uint64_t owners_version_;
  const std::set<std::string> others_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // All under mutex_.
  std::optional<Phase> ordered_;
  std::map<std::string, Phase> answered_;
  absl::Status ended_;
  std::function<void()> told_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_SPAN_SAVE_H_

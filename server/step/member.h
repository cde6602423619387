// One rank's place in a job's group, as the job's thread sees it.
#ifndef SHARDD_SERVER_STEP_MEMBER_H_
#define SHARDD_SERVER_STEP_MEMBER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/contract/slot_tree.h"
#include "proto/control.pb.h"
#include "server/step/ring.h"
#include "server/step/session.h"
#include "server/step/window.h"

namespace shardd::step {

using JoinCallback = std::function<void(absl::StatusOr<v1::JoinReply>)>;

struct Member {
  std::shared_ptr<Session> session;
  std::string daemon;  // empty: attached here; else the daemon that speaks for it
  uint32_t rank = 0;
  uint32_t line = 0;           // on the board
  std::unique_ptr<Ring> ring;  // null until it is attached
  std::unique_ptr<Window> window;
  contract::SlotRange slots;
  std::vector<contract::SlotRange> nodes;  // what it publishes per bucket

  // Why it no longer takes part; its connection is kept until it hangs up.
  bool evicted = false;
  bool closed = false;  // left in good order

  JoinCallback join;  // waiting in Join
  absl::Time join_deadline = absl::InfiniteFuture();
  bool joined = false;  // of the generation that is being formed or runs

  uint64_t heartbeat = 0;   // last count that was read
  absl::Time heartbeat_at;  // when it was last looked at or seen to move
  int lapses = 0;           // looks in a row, a heartbeat apart, that saw it not move

  // Of the step that is not decided yet.
  uint64_t published = 0;  // accepted nodes, duplicates not counted
  bool ended = false;
  uint64_t hyper_hash = 0;
  std::vector<v1::SlotReport> reports;
  std::vector<uint32_t> absent;

  bool local() const { return daemon.empty(); }
  bool live() const { return !evicted && !closed; }
  void ForgetStep() {
    published = 0;
    ended = false;
    reports.clear();
    absent.clear();
  }
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_MEMBER_H_

// What a job keeps of the other daemons that it spans (docs/cluster.md).
#ifndef SHARDD_SERVER_STEP_SPAN_H_
#define SHARDD_SERVER_STEP_SPAN_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/control.pb.h"
#include "server/env/budget.h"
#include "server/peer/links.h"
#include "server/step/placement.h"
#include "server/step/session.h"
#include "server/step/span_save.h"

namespace shardd::step {

// No optimizer step: weights of a chunk that have not come.
inline constexpr uint64_t kNoWeights = ~uint64_t{0};

// Part of a job; its thread's alone, but for `answers`.
struct Span {
  peer::Links* links = nullptr;
  env::Budget* budget = nullptr;
  std::string self;

  // As stored in jobs/NAME/peers.
  std::string coordinator;
  uint64_t epoch = 1;
  uint64_t owners_version = 0;
  Placement placement;
  env::BudgetLease chunks_lease;  // of the chunks that are held here

  struct Peer {
    bool synced = false;  // its process and ours have told each other where they stand
    // A decision that this coordinator lost is being asked for.
  };
  std::map<std::string, Peer> peers;
  // Of the group that runs or forms, one per rank.
  std::vector<std::string> daemons;

  // The step that is not decided.
  std::vector<bool> partials_sent;  // [buckets]
  struct Assembly {
    std::shared_ptr<std::vector<float>> memory;
    uint64_t begin = 0;  // of the flat space
  };
  std::map<std::pair<uint64_t, uint32_t>, Assembly> assemblies;  // by bucket, first slot
  bool preparing = false;  // all is summed, and is being made durable
  std::string stall_told;  // why that takes long
  bool prepared_told = false;
  std::set<std::string> prepared;             // the coordinator's: who said so
  std::map<std::string, std::string> stalls;  // the coordinator's: why others are not, by daemon
  std::string nonfinite;                      // that others found
  // A local rank has gone: nothing more is given until the coordinator says that a generation
  // begins.
  bool awaiting_generation = false;
  // Of a placement that has not been told here yet.
  std::vector<std::pair<std::string, peer::Message>> ahead;
  std::vector<peer::Message> early;  // of a step or generation that this daemon has not reached
  std::vector<std::string> early_from;

  std::vector<uint64_t> weights_applied;  // [chunks]: steps that the working weights carry
  bool all_initialised = false;           // the coordinator says that every element was uploaded

  // Calls of local sessions that wait for the coordinator, by nonce.
  struct PendingOpen {
    std::shared_ptr<Session> session;
    v1::PeerMessage::Member member;
    absl::Time deadline;
    std::function<void(absl::Status)> done;
  };
  std::map<uint64_t, PendingOpen> opens;
  std::map<uint64_t, std::function<void(absl::Status)>> ends;
  std::map<uint64_t, std::pair<absl::Time, std::function<void()>>> closes;  // with a deadline

  // A reshard that runs: the placement to come, and whom it waits for (the coordinator's), or
  // what has still to come (the others').
  bool resharding = false;
  uint64_t reshard_generation = 0;
  std::optional<v1::PeerMessage> waiting_reshard;  // until the step is over here
  uint64_t target_version = 0;                     // of the owners to come
  Placement target;
  std::set<std::string> storing;
  uint64_t pieces_missing = 0;              // bytes
  std::vector<peer::Message> early_chunks;  // of a reshard that was not announced here yet
  std::vector<std::string> early_chunks_from;
  absl::Time reshard_since;

  // Reads of state that lies elsewhere.
  struct Read {
    std::weak_ptr<Session> session;
    v1::FillWindowRequest request;
    uint64_t missing = 0;  // elements
    uint64_t step = 0;
    absl::Time deadline;
    std::function<void(absl::StatusOr<v1::FillWindowReply>)> done;
  };
  uint64_t next_request = 1;
  std::map<uint64_t, Read> reads;
  bool ask_again = false;                            // what was asked of a daemon that died since
  std::vector<std::function<void()>> waiting_reads;  // until the step is over here
  // Reads of others for a step that is not reached here.
  std::vector<peer::Message> parked;
  std::vector<std::string> parked_from;

  std::shared_ptr<SpanSave> save;  // a checkpoint of all parts that is being made

  bool delete_ordered = false;  // by the coordinator

  std::string handing_over_to;
  std::function<void(absl::Status)> handed_over;

  // Status of the others, for whoever waits for it on another thread.
  struct Answers {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, v1::JobStatus> by_daemon;  // under mutex
    size_t expected = 0;                             // under mutex
    bool published = false;                          // under mutex
  };
  std::map<uint64_t, std::weak_ptr<Answers>> status_requests;

  bool follows() const { return coordinator != self; }
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_SPAN_H_

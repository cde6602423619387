// Jobs that several daemons share, with durability = node: each daemon keeps a journal of the
// chunks that lie with it.
//
// An owner says that it is prepared once its sums are durable, the coordinator tells a decision
// once that is durable, and every daemon tells its ranks once the decision is durable there too. So
// a daemon that comes back from its journal is one decision behind at most, and has what the
// decision asks for.
//
// When chunks move, every daemon whose chunks change makes the journal that is to be, complete and
// durable, before it says that all has been stored; taking the new owners puts it in place.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

using v1::PeerMessage;

bool Job::KeepsPart() const { return span_ != nullptr && config_.durability() == v1::node; }

v1::JobPeers Job::PeersOf(const Placement& placement, uint64_t version) const {
  v1::JobPeers peers;
  peers.set_coordinator(span_->coordinator);
  peers.set_epoch(span_->epoch);
  peers.set_owners_version(version);
  placement.ToProto(peers.mutable_owners());
  peers.set_daemon(span_->self);
  return peers;
}

Durability::Parts Job::DurabilityParts() {
  return KeepsPart() ? DurabilityParts(span_->placement, span_->owners_version)
                     : Durability::Parts{&layout_,        segments_.get(),
                                         updater_.gate(), optimizer_->num_states(),
                                         std::nullopt,    ""};
}

Durability::Parts Job::DurabilityParts(const Placement& placement, uint64_t version) {
  return {&layout_,
          segments_.get(),
          updater_.gate(),
          optimizer_->num_states(),
          placement.ChunksOf(span_->self),
          EncodeJournalPeers(PeersOf(placement, version))};
}

// The journal of a job whose chunks have no owner yet is made when they have.
bool Job::AwaitsOwners() const {
  return KeepsPart() && span_->placement.empty() && layout_.num_chunks() > 0;
}

// --- A step.

// All that is summed here is there: once it is durable the coordinator is told.
void Job::Prepare() {
  if (durability_ == nullptr) return TellPrepared();
  span_->preparing = true;
  const uint64_t generation = segments_->header()->generation.load();
  const uint64_t step = decider_.committed_step() + 1;
  durability_->AwaitDurable([this, generation, step] {
    Post([this, generation, step] {
      if (deleted_ || failed_ || !follows() || !span_->preparing || span_->awaiting_generation ||
          generation != segments_->header()->generation.load() ||
          step != decider_.committed_step() + 1) {
        return;
      }
      span_->preparing = false;
      TellPrepared();
    });
  });
}

bool Job::AwaitsJournal() const {
  return durability_ != nullptr && (span_->preparing || commit_.pending());
}

// Says why this owner is not prepared, or this coordinator's decision not durable, so that every
// rank can be told.
void Job::TellStall() {
  const std::string stall = durability_->Stall();
  if (stall == span_->stall_told) return;
  span_->stall_told = stall;
  PeerMessage message;
  message.set_step(decider_.committed_step() + (commit_.pending() ? 0 : 1));
  message.mutable_prepared()->set_stall(stall);
  if (follows()) return Tell(span_->coordinator, std::move(message));
  TellOthers(message);
}

// Chunks that were to move while a step, or a copy of the state, was not over.
void Job::MoveWaiting() {
  if (span_ == nullptr || !span_->waiting_reshard.has_value()) return;
  const PeerMessage header = *std::exchange(span_->waiting_reshard, std::nullopt);
  DoReshard(header);
}

// What had to wait until a step was over here, or the journal had done with its gradient.
void Job::AfterDecision() {
  if (span_ == nullptr) return;
  MoveWaiting();
  for (const auto& read : std::exchange(span_->waiting_reads, {})) read();
  RetryEarly();
  auto parked = std::exchange(span_->parked, {});
  const auto parked_from = std::exchange(span_->parked_from, {});
  for (size_t i = 0; i < parked.size(); ++i) OnReadState(parked_from[i], std::move(parked[i]));
  FoldWaiting();
}

// Whether the sums of the step before may still be read.
bool Job::SumsInUse() const {
  return span_ != nullptr && (commit_.pending() || journal_reading_ > 0);
}

void Job::FoldWaiting() {
  if (SumsInUse()) return;
  const std::vector<uint64_t> unfolded = std::exchange(unfolded_, {});
  for (const uint64_t bucket : unfolded) {
    if (sums_.HasAllNodes(bucket)) FoldBucket(bucket);
  }
}

// --- Chunks that move.

absl::Status Job::MakeNextJournal(const Placement& placement, uint64_t version) {
  if (!journal_setup_.has_value()) return absl::OkStatus();
  return Durability::MakeNext(*journal_setup_, DurabilityParts(placement, version),
                              decider_.committed_step(),
                              segments_->header()->initialised.load() != 0);
}

// After the owners have changed, to what the job's thread now says that they are.
absl::Status Job::TakeJournal(bool same_chunks) {
  if (!journal_setup_.has_value()) return absl::OkStatus();
  const Durability::Parts parts = DurabilityParts();
  if (same_chunks && durability_ != nullptr) return durability_->StorePeers(parts.peers);
  const uint64_t step = decider_.committed_step();
  const bool state = segments_->header()->initialised.load() != 0;
  if (!Durability::NextIs(*journal_setup_, parts, step, state)) {
    absl::Status status = MakeNextJournal(span_->placement, span_->owners_version);
    if (!status.ok()) return status;
  }
  DropJournal();
  absl::StatusOr<std::unique_ptr<Durability>> taken =
      Durability::TakeNext(*journal_setup_, parts, step);
  if (!taken.ok()) return taken.status();
  durability_ = *std::move(taken);
  StartJournal();
  return absl::OkStatus();
}

void Job::DropJournal() {
  if (durability_ != nullptr) durability_->Stop();
  durability_.reset();
  ++journals_;
  journal_reading_ = 0;  // its threads have ended
}

// The owners stay as they were: so does the journal.
absl::Status Job::KeepJournal() {
  if (!journal_setup_.has_value() || durability_ != nullptr || AwaitsOwners()) {
    return absl::OkStatus();
  }
  if (segments_->header()->initialised.load() == 0) return CreateJournal(*journal_setup_);
  if (absl::Status status = AdoptJournal(*journal_setup_); !status.ok()) return status;
  StartJournal();
  return absl::OkStatus();
}

}  // namespace shardd::step

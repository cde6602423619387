// Jobs that several daemons share: what daemons tell each other, and where each one stands.
#include <algorithm>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

using v1::PeerMessage;

namespace {

// What only the coordinator says.
bool IsOrder(PeerMessage::WhatCase what) {
  switch (what) {
    case PeerMessage::kMemberAnswer:
    case PeerMessage::kNewGeneration:
    case PeerMessage::kFormed:
    case PeerMessage::kInitialised:
    case PeerMessage::kReshard:
    case PeerMessage::kOwners:
    case PeerMessage::kDelete:
    case PeerMessage::kHandover:
    case PeerMessage::kSave:
      return true;
    default:
      return false;
  }
}

// What can be judged only by somebody who knows the sender's placement.
bool NeedsPlacement(PeerMessage::WhatCase what) {
  return what == PeerMessage::kInit || what == PeerMessage::kWeights ||
         what == PeerMessage::kReadState || what == PeerMessage::kPartial ||
         what == PeerMessage::kSave;
}
constexpr size_t kMaxAhead = 4096;

// What a daemon may say before it takes part, or is judged by its ranks.
bool IsIntroduction(PeerMessage::WhatCase what) {
  return what == PeerMessage::kPartial || what == PeerMessage::kState ||
         what == PeerMessage::kUnknown || what == PeerMessage::kMemberOpen ||
         what == PeerMessage::kAskStatus;
}

}  // namespace

absl::Status Job::SpanWith(std::unique_ptr<Span> span) {
  span_ = std::move(span);
  span_->partials_sent.assign(layout_.num_buckets(), false);
  span_->weights_applied.assign(layout_.num_chunks(), kNoWeights);
  const uint64_t chunks = CountChunks(span_->placement.ChunksOf(span_->self));
  absl::StatusOr<env::BudgetLease> lease = span_->budget->Reserve(
      segments_->ChunkBytes(chunks), absl::StrCat("the shards of job '", name(), "'"));
  if (!lease.ok()) return lease.status();
  span_->chunks_lease = *std::move(lease);
  TakePlacement();
  return absl::OkStatus();
}

void Job::Introduce() {
  Post([this] {
    if (span_ == nullptr) return;
    for (const std::string& daemon : Participants()) TellState(daemon, false);
  });
}

void Job::OnPeerMessage(const std::string& peer, peer::Message message) {
  auto shared = std::make_shared<peer::Message>(std::move(message));
  Post([this, peer, shared] {
    if (span_ != nullptr && !deleted_) OnMessage(peer, std::move(*shared));
  });
}

void Job::OnPeerProcess(const std::string& peer) {
  Post([this, peer] {
    if (span_ == nullptr || deleted_) return;
    span_->peers[peer].synced = false;
    EndSpanSaveWith(peer, "has ended meanwhile");
    if (Participants().contains(peer)) TellState(peer, false);
  });
}

void Job::Tell(const std::string& daemon, PeerMessage header, std::string bytes) {
  header.set_job(name());
  header.set_job_id(absl::HexStringToBytes(job_id_));
  header.set_timeline(segments_->timeline());
  header.set_epoch(span_->epoch);
  header.set_owners_version(span_->owners_version);
  if (header.generation() == 0) header.set_generation(segments_->header()->generation.load());
  span_->links->Send(daemon, {std::move(header), std::move(bytes)});
}

void Job::TellOthers(const PeerMessage& header) {
  for (const std::string& daemon : Participants()) Tell(daemon, header);
}

// The other daemons that hold chunks, speak for ranks, or decide.
std::set<std::string> Job::Participants() const {
  std::set<std::string> daemons = span_->placement.Daemons();
  daemons.insert(span_->coordinator);
  daemons.insert(span_->daemons.begin(), span_->daemons.end());
  if (span_->resharding) daemons.merge(span_->target.Daemons());
  for (const auto& member : members_) daemons.insert(member->daemon);
  daemons.erase("");
  daemons.erase(span_->self);
  return daemons;
}

void Job::RefuseMessage(const std::string& from, const std::string& why) {
  span_->links->counters()->messages += 1;
  env_.log(absl::StrCat("job ", name(), ": a message of ", from, " is refused: ", why));
}

// Of an older job, timeline or coordinator: whoever sent it has been passed over, and is told so.
bool Job::Fenced(const std::string& from, const PeerMessage& header) {
  const bool other_job = header.job_id() != absl::HexStringToBytes(job_id_) ||
                         header.timeline() != segments_->timeline();
  const bool old_order =
      IsOrder(header.what_case()) && (header.epoch() < span_->epoch || from != span_->coordinator);
  if (!other_job && !old_order) return false;
  span_->links->counters()->fenced += 1;
  env_.log(absl::StrCat("job ", name(), ": a message of ", from, " is fenced: ",
                        other_job ? "it is of another job of that name"
                                  : "the coordinator is " + span_->coordinator));
  if (header.what_case() == PeerMessage::kUnknown) return true;
  if (!other_job) {
    TellState(from, true);
    return true;
  }
  PeerMessage answer;
  answer.mutable_unknown()->set_fenced(true);
  answer.mutable_unknown()->set_reason(
      absl::StrCat(span_->self, " has another job of that name, ", job_id_));
  answer.set_job(name());
  answer.set_job_id(header.job_id());
  answer.set_timeline(header.timeline());
  span_->links->Send(from, {std::move(answer), ""});
  return true;
}

void Job::OnMessage(const std::string& from, peer::Message message) {
  const PeerMessage& header = message.header;
  if (Fenced(from, header)) return;
  if (header.owners_version() > span_->owners_version && NeedsPlacement(header.what_case())) {
    if (span_->ahead.size() >= kMaxAhead)
      return RefuseMessage(from, "too many of a later placement");
    span_->ahead.emplace_back(from, std::move(message));
    return;
  }
  if (!IsIntroduction(header.what_case()) && !Participants().contains(from)) {
    return RefuseMessage(from, "it takes no part in this job");
  }
  Dispatch(from, std::move(message));
}

void Job::Dispatch(const std::string& from, peer::Message message) {
  PeerMessage& header = message.header;
  switch (header.what_case()) {
    case PeerMessage::kState:
      return OnState(from, header);
    case PeerMessage::kUnknown:
      return OnUnknown(from, header.unknown());
    case PeerMessage::kMemberOpen:
      return AnswerMember(from, PeerMessage::MemberAnswer::OPEN,
                          header.member_open().member().session(),
                          Admit(from, header.member_open().member()));
    case PeerMessage::kMemberAnswer:
      return OnMemberAnswer(header.member_answer());
    case PeerMessage::kMemberJoin:
      return OnMemberJoin(from, header.member_join());
    case PeerMessage::kMemberEnd:
      return OnMemberEnd(from, header.mutable_member_end());
    case PeerMessage::kMemberGone:
      return OnMemberGone(from, header);
    case PeerMessage::kNewGeneration:
      return OnNewGeneration(header);
    case PeerMessage::kFormed:
      return OnFormed(header);
    case PeerMessage::kPartial:
      return OnPartial(from, std::move(message));
    case PeerMessage::kPrepared:
      return OnPrepared(from, message);
    case PeerMessage::kDecided:
      return OnDecided(from, header);
    case PeerMessage::kWeights:
      return OnWeights(from, message);
    case PeerMessage::kInit:
      return OnInitPiece(from, message);
    case PeerMessage::kInitStored:
      return NoteStored(header.init_stored().begin(), header.init_stored().count());
    case PeerMessage::kInitialised:
      return OnInitialised();
    case PeerMessage::kReshard:
      return DoReshard(header);
    case PeerMessage::kChunk:
      return OnChunk(from, message);
    case PeerMessage::kReshardStored:
      return OnReshardStored(from, header);
    case PeerMessage::kOwners:
      return OnOwners(header);
    case PeerMessage::kReadState:
      return OnReadState(from, std::move(message));
    case PeerMessage::kStateData:
      return OnStateData(message);
    case PeerMessage::kAskStatus: {
      Publish();
      PeerMessage answer;
      answer.mutable_status_answer()->set_request(header.ask_status().request());
      *answer.mutable_status_answer()->mutable_status() = Status();
      return Tell(from, std::move(answer));
    }
    case PeerMessage::kStatusAnswer: {
      const auto it = span_->status_requests.find(header.status_answer().request());
      if (it == span_->status_requests.end()) return;
      if (const auto answers = it->second.lock()) {
        std::lock_guard lock(answers->mutex);
        answers->by_daemon[from] = header.status_answer().status();
        answers->changed.notify_all();
      }
      return;
    }
    case PeerMessage::kDelete:
      span_->delete_ordered = true;
      begins_anew_ = header.delete_().begins_anew();
      return env_.on_deleted(name());
    case PeerMessage::kHandover:
      return OnHandover(from, header);
    case PeerMessage::kHandoverAccepted:
      return OnHandoverAccepted(from, header);
    case PeerMessage::kFailed:
      if (!failed_) FailJob(header.failed().reason());
      return;
    case PeerMessage::kSave:
      return OnSave(header);
    case PeerMessage::kSaveAnswer:
      return OnSaveAnswer(from, header.save_answer());
    default:
      return RefuseMessage(from, "it is of an unknown kind");
  }
}

void Job::TellState(const std::string& to, bool answer) {
  PeerMessage message;
  PeerMessage::State* state = message.mutable_state();
  state->set_coordinator(span_->coordinator);
  state->set_owners_version(span_->owners_version);
  state->set_sequence(decider_.current().header.sequence);
  state->set_committed_step(decider_.committed_step());
  state->set_initialised(segments_->header()->initialised.load() != 0);
  state->set_answer(answer);
  if (to == span_->coordinator) {
    for (const auto& member : members_) {
      if (member->live() && member->local()) *state->add_members() = Describe(*member);
    }
  }
  Tell(to, std::move(message));
}

void Job::OnState(const std::string& from, const PeerMessage& header) {
  const PeerMessage::State& state = header.state();
  bool was_synced = std::exchange(span_->peers[from].synced, true);
  if (span_->handing_over_to == from && !was_synced && header.epoch() == span_->epoch) {
    span_->handing_over_to.clear();  // its new process has not taken over, and will not
    std::exchange(span_->handed_over, nullptr)(absl::UnavailableError(absl::StrCat(
        "job '", name(), "': daemon ", from, " ended before it took over; it stays here")));
  }
  if (header.epoch() > span_->epoch) {
    was_synced = false;
    span_->epoch = header.epoch();
    span_->coordinator = state.coordinator();
    EndSpanSave(absl::UnavailableError("another daemon coordinates the job now"));
    StorePeers().IgnoreError();  // it is told again by whoever knows
    env_.log(absl::StrCat("job ", name(), ": the coordinator is ", span_->coordinator));
    if (span_->handed_over) std::exchange(span_->handed_over, nullptr)(absl::OkStatus());
    span_->handing_over_to.clear();
  }
  if (!state.answer()) TellState(from, true);
  if (!was_synced) span_->ask_again = true;
  Synchronise(from, state, was_synced);
}

// Brings whoever is behind to where the other one is.
void Job::Synchronise(const std::string& with, const PeerMessage::State& state, bool was_synced) {
  const uint64_t mine = decider_.current().header.sequence;
  const bool initialised = segments_->header()->initialised.load() != 0;
  if (coordinates()) {
    // It has lost its part of the first weights, and no step was ever committed.
    if (decider_.committed_step() == 0 && !state.initialised() &&
        state.owners_version() < span_->owners_version && !was_synced &&
        span_->placement.Daemons().contains(with)) {
      env_.log(absl::StrCat("job ", name(), ": daemon ", with,
                            " ended before it could keep its weights; trainers begin anew"));
      begins_anew_ = true;
      return env_.on_deleted(name());
    }
    // What its process held in memory of the step is gone, and so are ranks that it had.
    std::vector<Member*> gone;
    for (const auto& member : members_) {
      const bool there =
          std::any_of(state.members().begin(), state.members().end(),
                      [&](const auto& m) { return m.session() == member->session->nonce; });
      if (member->daemon == with && !there) gone.push_back(member.get());
    }
    if (!was_synced) span_->resharding = false;  // begun anew when the group forms
    if (!was_synced && running_group_) {
      BreakGroup(absl::StrCat("daemon ", with, " came anew"));
    }
    for (Member* member : gone) Leave(member, "lost its daemon");
    for (const auto& member : state.members()) {
      if (FindRemote(with, member.session()) == nullptr) {
        AnswerMember(with, PeerMessage::MemberAnswer::OPEN, member.session(), Admit(with, member));
      }
    }
  }
  if (state.sequence() < mine && !commit_.pending()) TellDecision(with, failure_);
  if (coordinates()) {
    if (state.owners_version() != span_->owners_version) {
      PeerMessage owners;
      owners.mutable_owners()->set_version(span_->owners_version);
      span_->placement.ToProto(owners.mutable_owners()->mutable_owners());
      Tell(with, std::move(owners));
    }
    if (initialised && !state.initialised()) {
      PeerMessage message;
      message.mutable_initialised();
      Tell(with, std::move(message));
    }
    PeerMessage generation;
    generation.mutable_new_generation()->set_why("the coordinator says where it is");
    Tell(with, std::move(generation));
    if (failed_) {
      PeerMessage message;
      message.mutable_failed()->set_reason(failure_);
      Tell(with, std::move(message));
    }
  } else if (with == span_->coordinator && !was_synced) {
    for (const auto& [nonce, open] : span_->opens) {
      PeerMessage message;
      *message.mutable_member_open()->mutable_member() = open.member;
      Tell(with, std::move(message));
    }
    for (const auto& member : members_) {
      if (member->live() && member->local() && member->join) TellJoin(*member);
    }
  }
  if (initialised && !commit_.pending()) TellWeights(with);
  Gather();
  TryForm();
}

void Job::OnUnknown(const std::string& from, const PeerMessage::Unknown& unknown) {
  env_.log(absl::StrCat("job ", name(), ": daemon ", from, " says: ", unknown.reason()));
  const bool coordinator = from == span_->coordinator;
  const bool lost = !unknown.fenced() && span_->placement.Daemons().contains(from);
  if (decider_.committed_step() == 0 && (coordinator || lost)) {
    // A part of the first weights is gone, and nothing was ever committed.
    span_->delete_ordered = true;
    begins_anew_ = true;
    return env_.on_deleted(name());
  }
  if (!coordinator || !unknown.fenced()) return;
  FailJob(absl::StrCat("job '", name(), "' went on without this daemon: ", unknown.reason(),
                       "; what lies here is of the job before: delete it (shardctl job delete)"));
}

absl::Status Job::StorePeersHere() {
  return WriteJobPeers(segments_->path(), PeersOf(span_->placement, span_->owners_version));
}

absl::Status Job::StorePeers() {
  if (absl::Status status = StorePeersHere(); !status.ok()) return status;
  if (!KeepsPart() || durability_ == nullptr) return absl::OkStatus();
  return durability_->StorePeers(
      EncodeJournalPeers(PeersOf(span_->placement, span_->owners_version)));
}

std::string Job::Silence(const std::string& daemon) const {
  const peer::LinkState state = span_->links->State(daemon);
  if (state.connected) return "";
  if (state.heard == absl::InfinitePast()) return " (which was never reached)";
  return absl::StrCat(
      " (which is not reached; last heard of ",
      absl::FormatDuration(absl::Trunc(env_.now() - state.heard, absl::Milliseconds(100))),
      " ago)");
}

// --- Hand-over of the coordination.

void Job::HandOver(const std::string& to, Callback<v1::HandOverReply> done) {
  Post([this, to, done] { DoHandOver(to, done); });
}

void Job::DoHandOver(const std::string& to, Callback<v1::HandOverReply> done) {
  const auto refuse = [&](const std::string& why) {
    done(absl::FailedPreconditionError(absl::StrCat("job '", name(), "': ", why)));
  };
  if (span_ == nullptr) return refuse("this daemon knows no others (peer.peers)");
  if (follows()) return refuse("its coordinator is " + span_->coordinator + "; ask there");
  if (!span_->handing_over_to.empty()) return refuse("it is being handed over already");
  if (!Participants().contains(to)) {
    return refuse(absl::StrCat("daemon ", to, " takes no part in it; attach a rank there first"));
  }
  if (!span_->peers[to].synced || !span_->links->State(to).connected) {
    return refuse(absl::StrCat("daemon ", to, " is not reached", Silence(to)));
  }
  if (commit_.pending() || span_->resharding) {
    return refuse("a step is being committed, or chunks move; try again");
  }
  BreakGroup(absl::StrCat("the job is handed over to ", to));
  span_->handing_over_to = to;
  span_->handed_over = [this, done](absl::Status status) {
    if (!status.ok()) return done(std::move(status));
    v1::HandOverReply reply;
    reply.set_from(span_->self);
    reply.set_generation(segments_->header()->generation.load());
    done(std::move(reply));
  };
  PeerMessage message;
  message.mutable_handover()->set_sequence(decider_.current().header.sequence);
  Tell(to, std::move(message));
}

void Job::OnHandover(const std::string& from, const PeerMessage& header) {
  if (header.handover().sequence() != decider_.current().header.sequence) {
    return RefuseMessage(from, "a hand-over at another decision");
  }
  env_.failpoints->Reach("peer.handover.before_accept");
  EndSpanSave(absl::UnavailableError("another daemon coordinates the job now"));
  const std::string before = std::exchange(span_->coordinator, span_->self);
  ++span_->epoch;
  if (absl::Status status = StorePeers(); !status.ok()) {
    span_->coordinator = before;
    --span_->epoch;
    return env_.log(absl::StrCat("job ", name(), ": not taken over: ", status.message()));
  }
  env_.failpoints->Reach("peer.handover.after_accept");
  env_.log(absl::StrCat("job ", name(), ": taken over from ", from));
  for (const auto& member : members_) {
    member->joined = false;
    if (member->join) member->join_deadline -= absl::Seconds(1);
  }
  EnterGeneration(std::max(header.generation(), segments_->header()->generation.load()) + 1,
                  absl::StrCat("the job was handed over from ", from));
  for (const std::string& daemon : Participants()) {
    span_->peers[daemon].synced = false;  // each says again which ranks it has
    TellState(daemon, false);
  }
  PeerMessage accepted;
  accepted.mutable_handover_accepted();
  Tell(from, std::move(accepted));
}

void Job::OnHandoverAccepted(const std::string& from, const PeerMessage&) {
  if (span_->handing_over_to != from && span_->coordinator != from) return;
  // Its state, which came before, has said so; ranks of others are not ours to mind any more.
  std::vector<Member*> remote;
  for (const auto& member : members_) {
    if (!member->local()) remote.push_back(member.get());
  }
  for (Member* member : remote) {
    member->join = nullptr;
    Remove(member);
  }
}

}  // namespace shardd::step

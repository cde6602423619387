// Jobs that several daemons share: which chunks lie where, how they move, the initial values, and
// what is read from elsewhere.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

using v1::PeerMessage;

namespace {

constexpr uint64_t kPieceElements = peer::kMaxPieceBytes / sizeof(float);
constexpr absl::Duration kRead = absl::Seconds(20);

}  // namespace

// Sums, updates and counts what this daemon holds.
void Job::TakePlacement() {
  std::vector<contract::Range> elements;
  std::vector<uint64_t> chunks;
  for (const contract::Range& range : span_->placement.ChunksOf(span_->self)) {
    elements.push_back({range.begin * layout_.chunk_elements(),
                        std::min(range.end * layout_.chunk_elements(), layout_.flat_elements())});
    for (uint64_t c = range.begin; c < range.end; ++c) chunks.push_back(c);
  }
  sums_.SetOwned(elements);
  updater_.SetOwned(std::move(chunks), [this](uint64_t bucket) { return OthersComplete(bucket); });
}

// --- Before a group forms, every shard is to lie with the daemon of its rank.

bool Job::ReadyToForm() {
  if (!span_->handing_over_to.empty()) return false;
  span_->daemons = DaemonsOfRanks();
  for (const std::string& daemon : Participants()) {
    if (!span_->peers[daemon].synced) return false;  // TryForm comes again when it is
  }
  const Placement target = Placement::ForRanks(layout_, span_->daemons);
  if (target == span_->placement) return true;
  if (copy_ != nullptr) return false;  // its end comes again
  if (!span_->resharding) StartReshard(target);
  return false;
}

void Job::StartReshard(const Placement& target) {
  span_->resharding = true;
  span_->target = target;
  span_->reshard_generation += 1;
  span_->reshard_since = env_.now();
  span_->storing.clear();
  std::set<std::string> daemons = target.Daemons();
  daemons.merge(span_->placement.Daemons());
  for (const std::string& daemon : daemons) {
    if (target.ChunksOf(daemon) != span_->placement.ChunksOf(daemon)) span_->storing.insert(daemon);
  }
  PeerMessage message;
  message.set_step(span_->reshard_generation);
  target.ToProto(message.mutable_reshard()->mutable_owners());
  span_->placement.ToProto(message.mutable_reshard()->mutable_from());
  message.set_owners_version(span_->owners_version);
  TellOthers(message);
  DoReshard(message);
  // A job without chunks.
  if (span_->resharding && span_->storing.empty()) CommitReshard();
}

// Makes room for what is to come, and sends what is to go.
void Job::DoReshard(const PeerMessage& header) {
  if (commit_.pending() || copy_ != nullptr) {
    span_->waiting_reshard = header;
    return;
  }
  const auto target = Placement::FromProto(header.reshard().owners(), layout_.num_chunks());
  const auto from = Placement::FromProto(header.reshard().from(), layout_.num_chunks());
  if (!target.ok() || !from.ok()) {
    return RefuseMessage(span_->coordinator, "a placement that does not fit the job");
  }
  span_->reshard_generation = header.step();
  span_->target_version = header.owners_version() + 1;
  span_->target = *target;
  span_->resharding = true;
  const std::vector<contract::Range> incoming =
      Without(target->ChunksOf(span_->self), from->ChunksOf(span_->self));
  const absl::Status status = MakeRoomForChunks(incoming, from->empty());
  if (!status.ok()) {
    PeerMessage message;
    message.set_step(span_->reshard_generation);
    message.mutable_reshard_stored()->set_error(std::string(status.message()));
    if (follows()) return Tell(span_->coordinator, std::move(message));
    return AbandonReshard(status);
  }
  span_->pieces_missing = 0;
  for (const contract::Range& chunks : incoming) {
    if (!from->empty()) span_->pieces_missing += segments_->moved_bytes(chunks);
  }
  for (const OwnedChunks& owned : target->ranges()) {
    if (owned.daemon == span_->self || from->empty()) continue;
    for (uint64_t c = owned.chunks.begin; c < owned.chunks.end; ++c) {
      if (from->OwnerOf(c) == span_->self) TellChunk(c, owned.daemon);
    }
  }
  std::vector<peer::Message> early = std::exchange(span_->early_chunks, {});
  const std::vector<std::string> early_from = std::exchange(span_->early_chunks_from, {});
  const bool changes = target->ChunksOf(span_->self) != from->ChunksOf(span_->self);
  if (changes && span_->pieces_missing == 0) ReshardPieceDone();
  for (size_t i = 0; i < early.size(); ++i) OnChunk(early_from[i], early[i]);
}

// So that the budget knows of so many chunks.
absl::Status Job::GrowLease(uint64_t chunks) {
  const uint64_t bytes = segments_->ChunkBytes(chunks);
  if (bytes <= span_->chunks_lease.bytes()) return absl::OkStatus();
  absl::StatusOr<env::BudgetLease> lease = span_->budget->Reserve(
      bytes - span_->chunks_lease.bytes(), absl::StrCat("the shards of job '", name(), "'"));
  if (!lease.ok()) return lease.status();
  span_->chunks_lease.Absorb(*std::move(lease));
  return absl::OkStatus();
}

absl::Status Job::MakeRoomForChunks(const std::vector<contract::Range>& incoming, bool fresh) {
  const uint64_t held = CountChunks(span_->placement.ChunksOf(span_->self));
  if (absl::Status status = GrowLease(held + CountChunks(incoming)); !status.ok()) return status;
  for (const contract::Range& chunks : incoming) {
    if (absl::Status status = segments_->AddChunks(chunks, fresh); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void Job::TellChunk(uint64_t chunk, const std::string& to) {
  const uint64_t bytes = segments_->moved_bytes(chunk);
  for (uint64_t at = 0; at < bytes; at += peer::kMaxPieceBytes) {
    PeerMessage message;
    message.set_step(span_->reshard_generation);
    message.mutable_chunk()->set_chunk(chunk);
    message.mutable_chunk()->set_offset(at);
    std::string piece(std::min<uint64_t>(peer::kMaxPieceBytes, bytes - at), '\0');
    segments_->CopyMoved(chunk, at, piece);
    Tell(to, std::move(message), std::move(piece));
  }
}

void Job::OnChunk(const std::string& from, const peer::Message& message) {
  const PeerMessage::Chunk& chunk = message.header.chunk();
  if (message.header.step() > span_->reshard_generation || !span_->resharding) {
    if (message.header.step() <= span_->reshard_generation) return;  // of one that was given up
    span_->early_chunks.push_back(message);
    span_->early_chunks_from.push_back(from);
    return;
  }
  if (message.header.step() < span_->reshard_generation) return;
  if (chunk.chunk() >= layout_.num_chunks() ||
      span_->target.OwnerOf(chunk.chunk()) != span_->self ||
      span_->placement.OwnerOf(chunk.chunk()) == span_->self ||
      chunk.offset() > segments_->moved_bytes(chunk.chunk()) ||
      message.bytes.size() > segments_->moved_bytes(chunk.chunk()) - chunk.offset() ||
      message.bytes.size() > span_->pieces_missing) {
    return RefuseMessage(from, "a chunk that is not to come here");
  }
  segments_->TakeMoved(chunk.chunk(), chunk.offset(), message.bytes);
  span_->pieces_missing -= message.bytes.size();
  if (span_->pieces_missing == 0) ReshardPieceDone();
}

// All that was to come here has been stored; with a journal, durably.
void Job::ReshardPieceDone() {
  const absl::Status made = MakeNextJournal(span_->target, span_->target_version);
  env_.failpoints->Reach("peer.reshard.stored");
  PeerMessage message;
  message.set_step(span_->reshard_generation);
  message.mutable_reshard_stored()->set_error(std::string(made.message()));
  if (follows()) return Tell(span_->coordinator, std::move(message));
  OnReshardStored(span_->self, message);
}

void Job::OnReshardStored(const std::string& from, const PeerMessage& header) {
  if (follows() || !span_->resharding || header.step() != span_->reshard_generation) return;
  if (!header.reshard_stored().error().empty()) {
    return AbandonReshard(absl::ResourceExhaustedError(
        absl::StrCat("daemon ", from, ": ", header.reshard_stored().error())));
  }
  span_->storing.erase(from);
  if (span_->storing.empty()) CommitReshard();
}

// Nothing has moved as far as anybody counts; those that wait to join are told why.
void Job::AbandonReshard(const absl::Status& why) {
  env_.log(absl::StrCat("job ", name(), ": chunks cannot move: ", why.message()));
  span_->resharding = false;
  span_->storing.clear();
  if (due_copy_.has_value() && due_copy_->save == nullptr && LiesElsewhere()) {
    std::exchange(due_copy_, std::nullopt)->done(why);
  }
  for (const auto& member : members_) {
    if (!member->join) continue;
    JoinCallback done = std::move(member->join);
    member->join = nullptr;
    member->join_deadline = absl::InfiniteFuture();
    done(why);
  }
}

// Every chunk lies with its new owner as well: from here on it is theirs.
void Job::CommitReshard() {
  env_.failpoints->Reach("reshard.after_copy");
  const bool first = span_->placement.empty();
  const std::set<std::string> told = Participants();
  span_->resharding = false;
  if (!first) {
    EnterGeneration(segments_->header()->generation.load() + 1, "shards have moved");
  }
  absl::Status status = TakeOwners(span_->target, span_->owners_version + 1);
  if (!status.ok()) return AbandonReshard(status);
  env_.failpoints->Reach("reshard.after_record");
  env_.log(absl::StrCat(
      "job ", name(), ": shards lie with ", span_->placement.Daemons().size(), " daemons, ",
      CountChunks(span_->placement.ChunksOf(span_->self)), " of ", layout_.num_chunks(),
      " chunks here; moved in ",
      absl::FormatDuration(absl::Trunc(env_.now() - span_->reshard_since, absl::Milliseconds(1)))));
  PeerMessage owners;
  owners.mutable_owners()->set_version(span_->owners_version);
  span_->placement.ToProto(owners.mutable_owners()->mutable_owners());
  PeerMessage generation;
  generation.mutable_new_generation()->set_why("shards have moved");
  for (const std::string& daemon : told) {
    Tell(daemon, generation);
    Tell(daemon, owners);
  }
  StartDueCopy();
  TryForm();
}

void Job::OnOwners(const PeerMessage& header) {
  const PeerMessage::Owners& owners = header.owners();
  if (owners.version() <= span_->owners_version) return;
  auto placement = Placement::FromProto(owners.owners(), layout_.num_chunks());
  absl::Status status = placement.status();
  span_->resharding = false;
  if (status.ok()) status = TakeOwners(*std::move(placement), owners.version());
  if (!status.ok()) {
    return FailJob(
        absl::StrCat("daemon ", span_->self,
                     " cannot hold the chunks that were moved to it: ", status.message()));
  }
  auto ahead = std::exchange(span_->ahead, {});
  for (auto& [from, message] : ahead) OnMessage(from, std::move(message));
  // Owners that this one has not met since it began.
  for (const std::string& daemon : Participants()) {
    if (!span_->peers[daemon].synced) TellState(daemon, false);
  }
}

// Records who holds what, then frees what is not held here any more.
absl::Status Job::TakeOwners(Placement placement, uint64_t version) {
  const std::vector<contract::Range> mine = placement.ChunksOf(span_->self);
  for (const contract::Range& chunks : mine) {
    if (absl::Status status = segments_->CheckChunks(chunks); !status.ok()) return status;
  }
  const std::vector<contract::Range> before = span_->placement.ChunksOf(span_->self);
  std::swap(span_->placement, placement);
  const uint64_t old_version = std::exchange(span_->owners_version, version);
  absl::Status status = GrowLease(CountChunks(mine));
  if (status.ok()) status = StorePeersHere();
  if (status.ok()) status = TakeJournal(mine == before);
  if (!status.ok()) {
    std::swap(span_->placement, placement);
    span_->owners_version = old_version;
    status.Update(StorePeersHere());
    status.Update(KeepJournal());
    return status;
  }
  TakePlacement();
  for (const contract::Range& chunks : Without({{0, layout_.num_chunks()}}, mine)) {
    segments_->FreeChunks(chunks);
  }
  span_->chunks_lease.ShrinkTo(segments_->ChunkBytes(CountChunks(mine)));
  if (segments_->header()->initialised.load() == 0 || Without(mine, before).empty()) {
    return absl::OkStatus();
  }
  // Weights of chunks that came may not have been here.
  updater_.PublishMasters(decider_.committed_step(), decider_.table());
  WeightsUpdated();
  return absl::OkStatus();
}

// --- Initial values go to the owners; the coordinator knows what is there.

void Job::StoreInit(uint64_t begin, uint64_t count, const float* values) {
  for (uint64_t at = 0; at < count;) {
    const uint64_t element = begin + at;
    const uint64_t chunk = element / layout_.chunk_elements();
    const uint64_t inside = element % layout_.chunk_elements();
    const uint64_t part = std::min({count - at, layout_.chunk_elements() - inside, kPieceElements});
    const std::string& owner = span_->placement.OwnerOf(chunk);
    if (owner == span_->self) {
      segments_->chunk(chunk).Write(0, inside, part, values + at);
      NoteStored(element, part);
    } else {
      PeerMessage message;
      message.mutable_init()->set_begin(element);
      message.mutable_init()->set_count(part);
      Tell(owner, std::move(message),
           std::string(reinterpret_cast<const char*>(values + at), part * sizeof(float)));
    }
    at += part;
  }
}

void Job::OnInitPiece(const std::string& from, const peer::Message& message) {
  const PeerMessage::Init& init = message.header.init();
  if (upload_.complete()) return RefuseMessage(from, "an upload to a job that has its weights");
  if (init.count() == 0 || init.begin() >= layout_.flat_elements() ||
      init.count() > layout_.flat_elements() - init.begin() ||
      message.bytes.size() != init.count() * sizeof(float) ||
      span_->placement.OwnerOf(init.begin() / layout_.chunk_elements()) != span_->self ||
      init.begin() / layout_.chunk_elements() !=
          (init.begin() + init.count() - 1) / layout_.chunk_elements()) {
    return RefuseMessage(from, "an upload to chunks that are not held here");
  }
  std::vector<float> values(init.count());
  std::memcpy(values.data(), message.bytes.data(), message.bytes.size());
  StoreInit(init.begin(), init.count(), values.data());
}

void Job::NoteStored(uint64_t begin, uint64_t count) {
  if (follows()) {
    PeerMessage message;
    message.mutable_init_stored()->set_begin(begin);
    message.mutable_init_stored()->set_count(count);
    return Tell(span_->coordinator, std::move(message));
  }
  if (upload_.complete() || begin >= layout_.flat_elements() ||
      count > layout_.flat_elements() - begin || begin % contract::kParameterAlignment != 0) {
    return;
  }
  upload_.Mark(begin, count);
  if (!upload_.complete()) return;
  PeerMessage message;
  message.mutable_initialised();
  TellOthers(message);
  span_->all_initialised = true;
  FinishInitialisation();
}

void Job::OnInitialised() {
  if (segments_->header()->initialised.load() != 0) return;
  upload_.SetComplete();
  span_->all_initialised = true;
  FinishInitialisation();
  Wake();
}

// --- Reading state that lies elsewhere.

bool Job::ReadsElsewhere(const v1::FillWindowRequest& request) const {
  if (request.parameter() >= layout_.num_parameters()) return false;
  const contract::Range range = layout_.parameter_range(request.parameter());
  if (request.offset() > range.size() || request.count() > range.size() - request.offset()) {
    return false;  // refused where all are
  }
  const uint64_t begin = range.begin + request.offset(), end = begin + request.count();
  for (uint64_t c = begin / layout_.chunk_elements(); c * layout_.chunk_elements() < end; ++c) {
    if (span_->placement.OwnerOf(c) != span_->self) return true;
  }
  return false;
}

void Job::CopyState(uint32_t kind, uint64_t begin, uint64_t count, float* out) const {
  const size_t array = kind - v1::STATE_MASTER;
  for (uint64_t at = 0; at < count;) {
    const uint64_t element = begin + at;
    const uint64_t inside = element % layout_.chunk_elements();
    const uint64_t part = std::min(count - at, layout_.chunk_elements() - inside);
    const store::ChunkView view = segments_->chunk(element / layout_.chunk_elements());
    view.Read(array, inside, part, out + at);
    at += part;
  }
}

void Job::StartRead(const std::shared_ptr<Session>& session, const v1::FillWindowRequest& request,
                    Callback<v1::FillWindowReply> done) {
  if (commit_.pending()) {  // all of it at one step
    span_->waiting_reads.push_back(
        [this, session, request, done] { StartRead(session, request, done); });
    return;
  }
  Member* member = Find(session.get());
  const int moment = request.kind() - v1::STATE_MOMENT_0;
  if (member == nullptr || member->window == nullptr || request.kind() < v1::STATE_MASTER ||
      moment >= optimizer_->num_states() ||
      request.count() > member->window->bytes() / sizeof(float)) {
    return done(absl::InvalidArgumentError(
        absl::StrCat("a read of ", request.count(), " elements of state ", request.kind(),
                     " without a window that takes them; attach a ring first")));
  }
  const uint64_t id = span_->next_request++;
  Span::Read& read = span_->reads[id];
  read.session = session;
  read.request = request;
  read.step = decider_.committed_step();
  read.deadline = env_.now() + kRead;
  read.done = std::move(done);
  const uint64_t first = layout_.parameter_range(request.parameter()).begin + request.offset();
  for (uint64_t at = 0; at < request.count();) {
    const uint64_t element = first + at;
    const uint64_t chunk = element / layout_.chunk_elements();
    const uint64_t part =
        std::min({request.count() - at,
                  layout_.chunk_elements() - element % layout_.chunk_elements(), kPieceElements});
    const std::string& owner = span_->placement.OwnerOf(chunk);
    if (owner == span_->self) {
      CopyState(request.kind(), element, part, member->window->data() + at);
    } else if (owner.empty()) {
      read.deadline = env_.now();
    } else {
      read.missing += part;
      PeerMessage message;
      message.set_step(read.step);
      message.mutable_read_state()->set_request(id);
      message.mutable_read_state()->set_kind(request.kind());
      message.mutable_read_state()->set_begin(element);
      message.mutable_read_state()->set_count(part);
      Tell(owner, std::move(message));
    }
    at += part;
  }
}

void Job::OnReadState(const std::string& from, peer::Message message) {
  const PeerMessage::ReadState& read = message.header.read_state();
  if (message.header.step() > decider_.committed_step() || commit_.pending()) {
    span_->parked.push_back(std::move(message));  // until the decision is here too
    span_->parked_from.push_back(from);
    return;
  }
  const uint64_t chunk = layout_.chunk_elements();
  if (read.count() == 0 || read.count() > kPieceElements ||
      read.begin() >= layout_.flat_elements() ||
      read.begin() / chunk != (read.begin() + read.count() - 1) / chunk ||
      span_->placement.OwnerOf(read.begin() / chunk) != span_->self ||
      read.kind() < v1::STATE_MASTER ||
      static_cast<int>(read.kind()) - v1::STATE_MOMENT_0 >= optimizer_->num_states()) {
    return RefuseMessage(from, "a read of chunks that are not held here");
  }
  std::vector<float> values(read.count());
  CopyState(read.kind(), read.begin(), read.count(), values.data());
  PeerMessage answer;
  answer.set_step(decider_.committed_step());
  answer.mutable_state_data()->set_request(read.request());
  answer.mutable_state_data()->set_begin(read.begin());
  answer.mutable_state_data()->set_count(read.count());
  Tell(from, std::move(answer),
       std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
}

void Job::OnStateData(const peer::Message& message) {
  const PeerMessage::StateData& data = message.header.state_data();
  const auto it = span_->reads.find(data.request());
  if (it == span_->reads.end()) return;
  Span::Read& read = it->second;
  const std::shared_ptr<Session> session = read.session.lock();
  Member* member = session == nullptr ? nullptr : Find(session.get());
  const uint64_t first =
      layout_.parameter_range(read.request.parameter()).begin + read.request.offset();
  const uint64_t end = first + read.request.count();
  if (data.begin() < first || data.begin() >= end || data.count() > end - data.begin() ||
      data.count() > read.missing || message.bytes.size() != data.count() * sizeof(float)) {
    return;
  }
  const auto finish = [&](absl::StatusOr<v1::FillWindowReply> reply) {
    const auto done = std::move(read.done);
    span_->reads.erase(it);
    done(std::move(reply));
  };
  if (member == nullptr || member->window == nullptr) {
    return finish(absl::CancelledError("the session's connection is gone"));
  }
  if (message.header.step() != decider_.committed_step() ||
      read.step != decider_.committed_step()) {
    // A step was committed in between: all of it anew, at one step.
    const v1::FillWindowRequest request = read.request;
    const auto done = std::move(read.done);
    span_->reads.erase(it);
    return StartRead(session, request, done);
  }
  std::memcpy(member->window->data() + (data.begin() - first), message.bytes.data(),
              message.bytes.size());
  read.missing -= data.count();
  if (read.missing > 0) return;
  v1::FillWindowReply reply;
  reply.set_committed_step(decider_.committed_step());
  reply.set_parameter_applied(decider_.table()[read.request.parameter()].applied);
  finish(std::move(reply));
}

// What a daemon was asked before it died it does not know any more.
void Job::AskAgain() {
  if (!span_->ask_again || commit_.pending()) return;
  span_->ask_again = false;
  auto reads = std::exchange(span_->reads, {});
  for (auto& [request, read] : reads) {
    if (const std::shared_ptr<Session> session = read.session.lock(); session != nullptr) {
      StartRead(session, read.request, std::move(read.done));
    } else {
      read.done(absl::CancelledError("the session's connection is gone"));
    }
  }
}

void Job::ExpireReads(absl::Time now) {
  for (auto it = span_->reads.begin(); it != span_->reads.end();) {
    if (now < it->second.deadline) {
      ++it;
      continue;
    }
    const auto done = std::move(it->second.done);
    it = span_->reads.erase(it);
    done(absl::DeadlineExceededError(
        absl::StrCat("job '", name(), "': a daemon that holds part of it gave no answer: ",
                     ExplainSpan(decider_.committed_step() + 1))));
  }
}

// --- What is told of it.

std::string Job::StallOf(const std::string& daemon) const {
  const auto it = span_->stalls.find(daemon);
  if (it == span_->stalls.end() || it->second.empty()) return "";
  return absl::StrCat(", whose journal has not taken its part of the step: ", it->second);
}

std::string Job::ExplainSpan(uint64_t step) const {
  std::string waits;
  const auto add = [&](const std::string& text) {
    absl::StrAppend(&waits, waits.empty() ? "" : ", ", text);
  };
  if (follows()) {
    if (!running_group_) {
      return absl::StrCat("waits for the rank group, which daemon ", span_->coordinator, " forms",
                          Silence(span_->coordinator));
    }
    if (span_->preparing) {
      add(absl::StrCat("its journal: ", durability_ == nullptr ? "" : durability_->Stall()));
    } else if (!span_->prepared_told) {
      for (const std::string& daemon : Participants()) {
        const std::string silence = Silence(daemon);
        if (!silence.empty()) add(absl::StrCat("daemon ", daemon, silence));
      }
      if (waits.empty()) add("gradients of other ranks");
    } else {
      add(absl::StrCat("the decision of daemon ", span_->coordinator, Silence(span_->coordinator),
                       StallOf(span_->coordinator)));
    }
  } else {
    for (const std::string& daemon : Participants()) {
      if (!span_->prepared.contains(daemon)) {
        add(absl::StrCat("daemon ", daemon, Silence(daemon), StallOf(daemon)));
      }
    }
    const std::string ranks = MissingRanks([](const Member& m) { return m.ended; });
    if (ranks != "ranks ") add(absl::StrCat("EndStep of ", ranks));
  }
  return absl::StrCat("waits for ", waits);
}

void Job::PublishSpan(v1::JobStatus* status) const {
  status->set_daemon(span_->self);
  status->set_timeline(segments_->timeline());
  status->set_coordinator(span_->coordinator);
  const uint64_t chunks = CountChunks(span_->placement.ChunksOf(span_->self));
  status->set_own_chunks(chunks);
  const uint64_t record = segments_->record_bytes();
  status->set_state_bytes(chunks * record + segments_->plan().job_bytes);
  status->set_reduced_bytes(segments_->ChunkBytes(chunks) - chunks * record);
  std::string unreached;
  for (const std::string& daemon : Participants()) {
    v1::JobPeer* peer = status->add_peers();
    peer->set_daemon(daemon);
    peer->set_chunks(CountChunks(span_->placement.ChunksOf(daemon)));
    const peer::LinkState link = span_->links->State(daemon);
    peer->set_silent_seconds(
        link.heard == absl::InfinitePast() ? -1 : absl::ToDoubleSeconds(env_.now() - link.heard));
    for (const auto& member : members_) {
      if (member->live() && member->daemon == daemon) peer->set_sessions(peer->sessions() + 1);
    }
    if (!link.connected) absl::StrAppend(&unreached, unreached.empty() ? "" : ", ", daemon);
  }
  if (!unreached.empty()) {
    status->set_waits_for(absl::StrCat("daemon ", unreached, Silence(unreached)));
  } else if (span_->resharding) {
    status->set_waits_for("chunks that move");
  }
  for (const auto& [daemon, stall] : span_->stalls) {
    if (!stall.empty()) status->set_waits_for(absl::StrCat("daemon ", daemon, StallOf(daemon)));
  }
}

v1::JobStatus Job::WholeStatus(absl::Duration timeout) {
  auto answers = std::make_shared<Span::Answers>();
  Post([this, answers] {
    Publish();
    std::set<std::string> asked;
    if (span_ != nullptr && !deleted_) {
      const uint64_t request = span_->next_request++;
      for (const std::string& daemon : Participants()) {
        if (!span_->links->State(daemon).connected) continue;
        asked.insert(daemon);
        PeerMessage message;
        message.mutable_ask_status()->set_request(request);
        Tell(daemon, std::move(message));
      }
      std::erase_if(span_->status_requests, [](const auto& r) { return r.second.expired(); });
      span_->status_requests[request] = answers;
    }
    std::lock_guard lock(answers->mutex);
    answers->expected = asked.size();
    answers->published = true;
    answers->changed.notify_all();
  });
  std::unique_lock lock(answers->mutex);
  answers->changed.wait_for(lock, absl::ToChronoMilliseconds(timeout), [&] {
    return answers->published && answers->by_daemon.size() >= answers->expected;
  });
  v1::JobStatus whole = Status();
  for (auto& peer : *whole.mutable_peers()) {
    const auto it = answers->by_daemon.find(peer.daemon());
    if (it == answers->by_daemon.end()) continue;
    const v1::JobStatus& said = it->second;
    peer.set_answered(true);
    peer.set_committed_step(said.committed_step());
    peer.set_applied(said.applied());
    peer.set_state(said.state());
    peer.set_held_bytes(said.state_bytes() + said.weights_bytes() + said.reduced_bytes() +
                        said.ring_bytes());
    uint32_t sessions = 0;
    for (const auto& session : said.sessions()) {
      if (!session.daemon().empty()) continue;  // the coordinator's list of others'
      ++sessions;
      if (whole.coordinator() == whole.daemon()) continue;  // it has them all
      v1::SessionStatus* added = whole.add_sessions();
      *added = session;
      added->set_daemon(peer.daemon());
    }
    peer.set_sessions(sessions);
  }
  return whole;
}

}  // namespace shardd::step

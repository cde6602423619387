// Jobs that several daemons share: a step whose parts lie with several of them.
//
// A daemon adds the gradients of its own ranks in the slot tree as far as they go, and sends the
// nodes to the owners; an owner that has all nodes folds them as if all ranks were its own. Every
// owner says that it is prepared; the coordinator decides, records, and tells; owners update their
// chunks and send the new weights.
#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/env/fault_guard.h"
#include "server/step/job.h"

namespace shardd::step {

using contract::kBlockElements;
using v1::PeerMessage;

namespace {

constexpr uint64_t kPieceElements = peer::kMaxPieceBytes / sizeof(float);
constexpr uint64_t kPieceBlocks = peer::kMaxPieceBytes / sizeof(double);
// What may wait for this daemon to reach a step.
constexpr size_t kMaxEarly = 1 << 16;

contract::Range ElementsOf(const contract::Layout& layout, contract::Range chunks) {
  return {std::min(chunks.begin * layout.chunk_elements(), layout.flat_elements()),
          std::min(chunks.end * layout.chunk_elements(), layout.flat_elements())};
}

contract::Range BlocksOf(const contract::Layout& layout, contract::Range chunks) {
  const contract::Range elements = ElementsOf(layout, chunks);
  return {elements.begin / kBlockElements, (elements.end + kBlockElements - 1) / kBlockElements};
}

contract::Range Common(contract::Range a, contract::Range b) {
  const uint64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// The maximal nodes of slots that these ranks have, which are ascending.
std::vector<contract::SlotRange> NodesOf(uint32_t slots, std::vector<contract::SlotRange> ranks) {
  std::sort(ranks.begin(), ranks.end(), [](auto a, auto b) { return a.lo < b.lo; });
  std::vector<contract::SlotRange> nodes;
  for (size_t i = 0; i < ranks.size();) {
    contract::SlotRange run = ranks[i];
    for (++i; i < ranks.size() && ranks[i].lo == run.hi; ++i) run.hi = ranks[i].hi;
    for (const contract::SlotRange& node : contract::MaximalNodes(slots, run)) {
      nodes.push_back(node);
    }
  }
  return nodes;
}

}  // namespace

uint32_t Job::LocalSlots() const {
  uint32_t slots = 0;
  for (const auto& member : members_) {
    if (member->live() && member->local() && member->joined) slots += member->slots.size();
  }
  return slots;
}

void Job::OnLocalNodes(uint64_t bucket) {
  if (span_->partials_sent[bucket] || sums_.LocalSlots(bucket) != LocalSlots()) return;
  span_->partials_sent[bucket] = true;
  TellPartials(bucket);
  if (!span_->partials_sent[bucket] || !sums_.Owned(bucket).empty()) return;
  for (const Contribution& c : sums_.Take(bucket)) {
    if (Member* member = AtRank(c.rank)) ReleaseDescriptor(member, c.ring_index);
  }
  Wake();
}

void Job::TellPartials(uint64_t bucket) {
  std::vector<contract::SlotRange> ranks;
  for (const auto& member : members_) {
    if (member->live() && member->local() && member->joined) ranks.push_back(member->slots);
  }
  const contract::Range range = layout_.bucket_range(bucket);
  for (const OwnedChunks& owned : span_->placement.ranges()) {
    if (owned.daemon == span_->self) continue;
    if (Common(range, ElementsOf(layout_, owned.chunks)).empty()) continue;
    for (const contract::SlotRange& node : NodesOf(config_.slots(), ranks)) {
      TellNode(bucket, {node.lo, node.hi}, owned);
      if (!running_group_ || span_->awaiting_generation) return;  // a ring could not be read
    }
  }
}

// Adds what local ranks gave inside `node` and sends it to the owner, piece by piece.
void Job::TellNode(uint64_t bucket, kernels::SlotRange node, const OwnedChunks& owned) {
  std::vector<Contribution> inside;
  std::vector<kernels::SlotRange> nodes;
  for (const Contribution& c : sums_.Waiting(bucket)) {
    if (!c.daemon.empty() || c.node.lo < node.lo || c.node.hi > node.hi) continue;
    inside.push_back(c);
    nodes.push_back({c.node.lo - node.lo, c.node.hi - node.lo});
  }
  // A subtree has the shape of a tree of its own.
  kernels::ReduceProgram program;
  if (!kernels::SlotTreeProgram(node.hi - node.lo, nodes, &program)) {
    return FailJob("nodes of this daemon's ranks do not fold to a node of the tree");
  }
  const kernels::DType dtype =
      inside.size() == 1 ? inside[0].dtype : kernels::DType::kFloat32;  // a leaf as it came
  const contract::Range part =
      Common(layout_.bucket_range(bucket), ElementsOf(layout_, owned.chunks));
  std::vector<contract::Range> pieces;
  for (uint64_t at = part.begin; at < part.end; at += kPieceElements) {
    pieces.push_back({at, std::min(at + kPieceElements, part.end)});
  }
  std::vector<std::string> bytes(pieces.size());
  std::atomic<const void*> fault{nullptr};
  env_.pool->ParallelFor(pieces.size(), [&](size_t i) {
    bytes[i].resize(pieces[i].size() * kernels::DTypeSize(dtype));
    std::vector<kernels::ReduceInput> inputs;
    for (const Contribution& c : inside) inputs.push_back({c.at(pieces[i].begin), c.dtype});
    kernels::Reducer reducer(env_.isa, program, inputs);
    const void* at =
        env::RunGuarded([&] { reducer.Run(pieces[i].size(), bytes[i].data(), dtype, nullptr); });
    if (at != nullptr) fault.store(at);
  });
  if (const void* at = fault.load()) {
    span_->partials_sent[bucket] = false;
    for (const auto& member : members_) {
      if (member->ring != nullptr && member->ring->Contains(at)) {
        return Refuse(member.get(), absl::DataLossError("the ring's memory is gone"));
      }
    }
    return FailJob("a gradient cannot be read");
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    PeerMessage message;
    message.set_step(decider_.committed_step() + 1);
    PeerMessage::Partial* partial = message.mutable_partial();
    partial->set_bucket(bucket);
    partial->set_slot_lo(node.lo);
    partial->set_slot_hi(node.hi);
    partial->set_dtype(static_cast<uint32_t>(dtype));
    partial->set_begin(pieces[i].begin);
    partial->set_count(pieces[i].size());
    Tell(owned.daemon, std::move(message), std::move(bytes[i]));
  }
}

void Job::OnPartial(const std::string& from, peer::Message message) {
  const uint64_t generation = segments_->header()->generation.load();
  const uint64_t step = decider_.committed_step() + 1;
  const PeerMessage& header = message.header;
  if (header.generation() < generation || header.step() < step) {
    span_->links->counters()->fenced += 1;
    return;
  }
  if (header.generation() > generation || header.step() > step || !running_group_) {
    if (span_->early.size() >= kMaxEarly) return RefuseMessage(from, "too many of a later step");
    span_->early.push_back(std::move(message));
    span_->early_from.push_back(from);
    return;
  }
  const PeerMessage::Partial& partial = header.partial();
  const auto dtype = static_cast<kernels::DType>(partial.dtype());
  const contract::SlotRange node{partial.slot_lo(), partial.slot_hi()};
  std::vector<contract::SlotRange> ranks;
  for (uint32_t rank = 0; rank < span_->daemons.size(); ++rank) {
    if (span_->daemons[rank] == from) {
      ranks.push_back(contract::SlotsOfRank(config_.slots(),
                                            static_cast<uint32_t>(span_->daemons.size()), rank));
    }
  }
  const std::vector<contract::SlotRange> nodes = NodesOf(config_.slots(), ranks);
  const auto due = node.size() == 1 ? static_cast<kernels::DType>(config_.grad_dtype())
                                    : kernels::DType::kFloat32;
  if (partial.bucket() >= layout_.num_buckets() || dtype != due ||
      std::find(nodes.begin(), nodes.end(), node) == nodes.end()) {
    return RefuseMessage(from, "a node of the slot tree that is not of its ranks");
  }
  const std::vector<contract::Range>& owned = sums_.Owned(partial.bucket());
  const contract::Range piece{partial.begin(), partial.begin() + partial.count()};
  const bool ours = std::any_of(owned.begin(), owned.end(), [&](const contract::Range& range) {
    return piece.begin >= range.begin && piece.end <= range.end && piece.begin < piece.end;
  });
  if (!ours || message.bytes.size() != piece.size() * kernels::DTypeSize(dtype)) {
    return RefuseMessage(from, "a gradient of chunks that are not held here");
  }
  const contract::Range hull{owned.front().begin, owned.back().end};
  Span::Assembly& assembly = span_->assemblies[{partial.bucket(), node.lo}];
  if (assembly.memory == nullptr) {
    assembly.begin = hull.begin;
    assembly.memory = std::make_shared<std::vector<float>>(hull.size());
  }
  auto* to = reinterpret_cast<std::byte*>(assembly.memory->data());
  std::memcpy(to + (piece.begin - hull.begin) * kernels::DTypeSize(dtype), message.bytes.data(),
              message.bytes.size());
  if (piece.end != hull.end) return;  // more is to come
  Contribution contribution;
  contribution.node = {node.lo, node.hi};
  contribution.dtype = dtype;
  contribution.data = to;
  contribution.begin = hull.begin;
  contribution.daemon = from;
  contribution.memory = assembly.memory;
  span_->assemblies.erase({partial.bucket(), node.lo});
  if (sums_.Add(partial.bucket(), contribution) == AddResult::kOverlaps) {
    return RefuseMessage(from, "a node that overlaps another");
  }
  if (sums_.HasAllNodes(partial.bucket())) FoldBucket(partial.bucket());
}

// What came before this daemon had reached its step.
void Job::RetryEarly() {
  std::vector<peer::Message> early = std::exchange(span_->early, {});
  const std::vector<std::string> from = std::exchange(span_->early_from, {});
  for (size_t i = 0; i < early.size(); ++i) OnPartial(from[i], std::move(early[i]));
}

void Job::TellPrepared() {
  env_.failpoints->Reach("peer.prepared");
  span_->prepared_told = true;
  PeerMessage message;
  message.set_step(decider_.committed_step() + 1);
  message.mutable_prepared()->set_nonfinite(sums_.nonfinite().what);
  for (const contract::Range& chunks : span_->placement.ChunksOf(span_->self)) {
    const contract::Range blocks = BlocksOf(layout_, chunks);
    for (uint64_t at = blocks.begin; at < blocks.end; at += kPieceBlocks) {
      const uint64_t count = std::min(kPieceBlocks, blocks.end - at);
      message.mutable_prepared()->set_first_block(at);
      Tell(span_->coordinator, message,
           std::string(reinterpret_cast<const char*>(segments_->sums() + at),
                       count * sizeof(double)));
    }
  }
  message.mutable_prepared()->set_last(true);
  Tell(span_->coordinator, std::move(message));
}

void Job::OnPrepared(const std::string& from, const peer::Message& message) {
  const PeerMessage& header = message.header;
  const PeerMessage::Prepared& prepared = header.prepared();
  if (message.bytes.empty() && !prepared.last()) {
    if (header.step() == decider_.committed_step() + 1) span_->stalls[from] = prepared.stall();
    return;
  }
  if (follows() || header.generation() != segments_->header()->generation.load() ||
      header.step() != decider_.committed_step() + 1 || !running_group_) {
    span_->links->counters()->fenced += 1;
    return;
  }
  if (!message.bytes.empty()) {
    const contract::Range blocks{prepared.first_block(),
                                 prepared.first_block() + message.bytes.size() / sizeof(double)};
    const std::vector<contract::Range> owned = span_->placement.ChunksOf(from);
    const bool theirs = std::any_of(owned.begin(), owned.end(), [&](const contract::Range& range) {
      const contract::Range own = BlocksOf(layout_, range);
      return blocks.begin >= own.begin && blocks.end <= own.end;
    });
    if (!theirs) return RefuseMessage(from, "sums of squares of chunks that are not its own");
    std::memcpy(segments_->sums() + blocks.begin, message.bytes.data(), message.bytes.size());
  }
  if (!prepared.last()) return;
  span_->stalls.erase(from);
  if (span_->nonfinite.empty()) span_->nonfinite = prepared.nonfinite();
  span_->prepared.insert(from);
}

bool Job::OthersPrepared() const {
  for (const std::string& daemon : Participants()) {
    if (!span_->prepared.contains(daemon)) return false;
  }
  return true;
}

// The newest decision, as it is recorded.
void Job::TellDecision(const std::string& to, const std::string& failure) {
  const store::Decision& current = decider_.current();
  const auto records = log_.Records(current.header.step, current.header.step);
  if (current.header.sequence == 0 || records.empty()) return;
  PeerMessage message;
  message.set_step(current.header.step);
  PeerMessage::Decided* decided = message.mutable_decided();
  decided->set_header(&current.header, sizeof(current.header));
  decided->mutable_presence()->Add(current.presence.begin(), current.presence.end());
  decided->set_groups(current.groups.data(),
                      current.groups.size() * sizeof(contract::DecisionGroup));
  decided->set_blob(current.blob);
  decided->set_record(&records.back(), sizeof(contract::StepRecordEntry));
  decided->set_failure(failure);
  const contract::ParameterEntry* last = nullptr;
  for (const contract::ParameterEntry& entry : decider_.table()) {
    if (last == nullptr || std::memcmp(last, &entry, sizeof(entry)) != 0) {
      decided->add_table()->set_entry(&entry, sizeof(entry));
      last = &entry;
    }
    auto* run = decided->mutable_table(decided->table_size() - 1);
    run->set_count(run->count() + 1);
  }
  Tell(to, std::move(message));
}

namespace {

// A decision as another daemon told it. False: it does not fit the job.
bool ReadDecision(const PeerMessage::Decided& said, const contract::JobHeader& job,
                  store::Decision* decision, std::vector<contract::ParameterEntry>* table,
                  contract::StepRecordEntry* record) {
  if (said.header().size() != sizeof(decision->header) || said.record().size() != sizeof(*record) ||
      said.groups().size() != job.groups * sizeof(contract::DecisionGroup) ||
      static_cast<uint64_t>(said.presence_size()) != (job.parameters + 63) / 64 ||
      said.blob().size() > contract::kMaxBlobBytes) {
    return false;
  }
  std::memcpy(&decision->header, said.header().data(), sizeof(decision->header));
  std::memcpy(record, said.record().data(), sizeof(*record));
  record->reason[sizeof(record->reason) - 1] = '\0';
  decision->presence.assign(said.presence().begin(), said.presence().end());
  decision->groups.resize(job.groups);
  std::memcpy(decision->groups.data(), said.groups().data(), said.groups().size());
  decision->blob = said.blob();
  for (const auto& run : said.table()) {
    contract::ParameterEntry entry;
    if (run.entry().size() != sizeof(entry) || run.count() > job.parameters - table->size()) {
      return false;
    }
    std::memcpy(&entry, run.entry().data(), sizeof(entry));
    table->insert(table->end(), run.count(), entry);
  }
  return table->size() == job.parameters && decision->header.timeline == job.timeline &&
         record->step == decision->header.step;
}

}  // namespace

// Whether the gradient of `step` lies here for every chunk that is held.
absl::Status Job::CheckReduced(uint64_t step) const {
  for (const uint64_t chunk : updater_.owned()) {
    const uint64_t bucket = layout_.bucket_of(layout_.chunk_range(chunk).begin);
    const uint64_t have = segments_->reduced_line(bucket)->step.load();
    if (have != step) {
      return absl::DataLossError(absl::StrCat("chunk ", chunk, " of step ", step,
                                              " is wanted, but its gradient is of step ", have));
    }
  }
  return absl::OkStatus();
}

void Job::OnDecided(const std::string& from, const PeerMessage& header) {
  store::Decision decision;
  std::vector<contract::ParameterEntry> table;
  contract::StepRecordEntry record;
  if (!ReadDecision(header.decided(), *segments_->header(), &decision, &table, &record)) {
    return RefuseMessage(from, "a decision that does not fit the job");
  }
  const uint64_t sequence = decider_.current().header.sequence;
  if (decision.header.sequence <= sequence) return;
  if (commit_.pending()) return RefuseMessage(from, "a decision before the last one is durable");
  if (follows() && from != span_->coordinator && header.epoch() < span_->epoch) {
    span_->links->counters()->fenced += 1;
    return;
  }
  const bool applies = decision.header.applied != decider_.applied();
  absl::Status status;
  if (!updater_.owned().empty()) {
    if (decision.header.sequence != sequence + 1) {
      status = absl::DataLossError(
          absl::StrCat("decision ", decision.header.sequence, " was told after ", sequence));
    } else if (applies) {
      status = CheckReduced(decision.header.step);
    }
  }
  if (!status.ok()) {
    return FailJob(absl::StrCat("daemon ", span_->self, " lost its part of step ",
                                decision.header.step, ": ", status.message()));
  }
  commit_.outcome = decider_.Adopt(std::move(decision), table, record);
  commit_.phase = CommitPhase::kRecorded;
  env_.failpoints->Reach("peer.decision.received");
  const std::string& failure = header.decided().failure();
  if (!failure.empty()) commit_.outcome.failure = absl::FailedPreconditionError(failure);
  ForgetStep();
  MakeDurable();
}

void Job::ForgetSpanStep() {
  span_->partials_sent.assign(layout_.num_buckets(), false);
  span_->assemblies.clear();
  span_->preparing = span_->prepared_told = false;
  span_->stall_told.clear();
  span_->prepared.clear();
  span_->stalls.clear();
  span_->nonfinite.clear();
}

// The chunks that are held here carry the newest decision: their weights go to the others.
void Job::WeightsUpdated() {
  for (const uint64_t chunk : updater_.owned()) {
    span_->weights_applied[chunk] = decider_.applied();
  }
  MarkReady({0, layout_.flat_elements()});
  for (const std::string& daemon : Participants()) {
    if (span_->peers[daemon].synced) TellWeights(daemon);
  }
}

void Job::TellWeights(const std::string& to) {
  const size_t size = kernels::DTypeSize(segments_->weight_dtype());
  const uint64_t most = peer::kMaxPieceBytes / size;
  for (const contract::Range& chunks : span_->placement.ChunksOf(span_->self)) {
    const contract::Range range = ElementsOf(layout_, chunks);
    for (uint64_t at = range.begin; at < range.end; at += most) {
      const uint64_t count = std::min(most, range.end - at);
      PeerMessage message;
      message.mutable_weights()->set_begin(at);
      message.mutable_weights()->set_count(count);
      message.mutable_weights()->set_applied(decider_.applied());
      Tell(to, std::move(message),
           std::string(reinterpret_cast<const char*>(segments_->weights(at)), count * size));
    }
  }
}

void Job::OnWeights(const std::string& from, const peer::Message& message) {
  const PeerMessage::Weights& weights = message.header.weights();
  const contract::Range piece{weights.begin(), weights.begin() + weights.count()};
  const size_t size = kernels::DTypeSize(segments_->weight_dtype());
  if (piece.end > layout_.flat_elements() || piece.begin >= piece.end ||
      message.bytes.size() != piece.size() * size) {
    return RefuseMessage(from, "weights outside of the job");
  }
  const uint64_t chunk = layout_.chunk_elements();
  for (uint64_t c = piece.begin / chunk; c * chunk < piece.end; ++c) {
    if (span_->placement.OwnerOf(c) != from) return;  // it has moved meanwhile
  }
  for (uint64_t c = piece.begin / chunk; c * chunk < piece.end; ++c) {
    const uint64_t have = span_->weights_applied[c];
    if (have != kNoWeights && have > weights.applied()) continue;  // newer ones have come
    const contract::Range part = Common(piece, layout_.chunk_range(c));
    std::memcpy(segments_->weights(part.begin),
                message.bytes.data() + (part.begin - piece.begin) * size, part.size() * size);
    if (part.end == layout_.chunk_range(c).end) span_->weights_applied[c] = weights.applied();
  }
  std::atomic_thread_fence(std::memory_order_release);
  MarkReady(piece);
}

// Within an update: whether the chunks of a bucket that lie elsewhere carry what it leads to.
bool Job::OthersComplete(uint64_t bucket) const {
  const contract::Range range = layout_.bucket_range(bucket);
  const uint64_t chunk = layout_.chunk_elements();
  for (uint64_t c = range.begin / chunk; c * chunk < range.end; ++c) {
    if (span_->placement.OwnerOf(c) == span_->self) continue;
    const uint64_t have = span_->weights_applied[c];
    if (have == kNoWeights || have < decider_.applied()) return false;
  }
  return true;
}

// Sets the ready words of those buckets that touch `range` whose weights are all there.
void Job::MarkReady(contract::Range range) {
  if (commit_.pending()) return;  // comes again when the step is over here
  bool news = false;
  const uint64_t first = range.empty() ? 0 : layout_.bucket_of(range.end - 1);
  const uint64_t end = range.empty() ? 0 : layout_.bucket_of(range.begin) + 1;
  for (uint64_t b = first; b < end; ++b) {
    contract::BucketLine* line = segments_->bucket_line(b);
    if (!WeightsThere(b) || line->ready_step.load() == decider_.committed_step()) continue;
    line->ready_step.store(decider_.committed_step(), std::memory_order_release);
    news = true;
  }
  const auto initialising = static_cast<uint32_t>(contract::BoardState::kInitialising);
  if (span_->all_initialised && segments_->board()->state.load() == initialising) {
    bool all = true;
    for (uint64_t b = 0; b < layout_.num_buckets() && all; ++b) all = WeightsThere(b);
    if (all) board_.SetState(contract::BoardState::kReady);
  }
  if (news) Wake();
}

// All was uploaded once; what is here of the weights is to be completed by the others. Ranks wait
// for ready words; only before the first step, when a word of 0 would do, they wait for the board.
void Job::ExpectWeights() {
  span_->all_initialised = true;
  for (const uint64_t chunk : updater_.owned()) {
    span_->weights_applied[chunk] = decider_.applied();
  }
  for (uint64_t b = 0; b < layout_.num_buckets(); ++b) {
    if (!WeightsThere(b)) segments_->bucket_line(b)->ready_step.store(0);
  }
  board_.SetState(decider_.committed_step() > 0 ? contract::BoardState::kReady
                                                : contract::BoardState::kInitialising);
  WeightsUpdated();
}

bool Job::WeightsThere(uint64_t bucket) const {
  const contract::Range range = layout_.bucket_range(bucket);
  const uint64_t chunk = layout_.chunk_elements();
  for (uint64_t c = range.begin / chunk; c * chunk < range.end; ++c) {
    const uint64_t have = span_->weights_applied[c];
    if (have == kNoWeights || have < decider_.applied()) return false;
  }
  return true;
}

}  // namespace shardd::step

// Who takes part in a job: sessions, ranks, generations.
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

Member* Job::Find(const Session* session) {
  for (const auto& member : members_) {
    if (member->session.get() == session) return member.get();
  }
  return nullptr;
}

absl::StatusOr<Member*> Job::FindLive(const Session* session) {
  Member* member = Find(session);
  if (member == nullptr || member->closed) {
    return absl::FailedPreconditionError("this session is over; open a new one");
  }
  if (member->evicted) {
    std::lock_guard lock(member->session->mutex);
    return member->session->refusal;
  }
  return member;
}

Member* Job::AtRank(uint32_t rank) {
  for (const auto& member : members_) {
    if (member->live() && member->rank == rank) return member.get();
  }
  return nullptr;
}

absl::StatusOr<uint32_t> Job::TakeLine(const Session& session) {
  for (uint32_t i = 0; i < segments_->session_lines(); ++i) {
    contract::SessionLine* line = segments_->session_line(i);
    if (line->session.load(std::memory_order_relaxed) != 0) continue;
    line->released.store(0, std::memory_order_relaxed);
    line->state.store(static_cast<uint32_t>(contract::SessionState::kAttached),
                      std::memory_order_relaxed);
    line->session.store(session.nonce, std::memory_order_release);
    return i;
  }
  return absl::ResourceExhaustedError(absl::StrCat("job '", name(), "' has sessions on all of its ",
                                                   segments_->session_lines(), " lines; end some"));
}

// Two missed beats: one may be late, a second one means that it does not run.
bool Job::Lapsed(const Member& member) const { return member.lapses >= 2; }

std::string Job::HowItEnded(const Session& session) {
  // Of a rank at another daemon neither descriptor is open: poll passes it over.
  std::array<pollfd, 2> ends = {pollfd{session.pidfd.get(), POLLIN, 0},
                                pollfd{session.socket.get(), POLLRDHUP, 0}};
  if (poll(ends.data(), ends.size(), 0) <= 0) return "";
  return ends[0].revents != 0 ? "died" : "hung up";
}

absl::Status Job::MakeRoom(uint32_t rank, uint32_t world_size) {
  if (Member* holder = AtRank(rank)) {
    // Its end may be known before its event is looked at: a process that opens a job again
    // has closed its first connection before.
    if (const std::string how = HowItEnded(*holder->session); !how.empty()) {
      Leave(holder, how);
    } else if (Lapsed(*holder)) {
      Refuse(holder, absl::AbortedError(absl::StrCat(
                         "rank ", rank, " of job '", name(),
                         "' was taken over by another process after this one gave no sign of life "
                         "for two heartbeats; end this process")));
    } else {
      return absl::AlreadyExistsError(absl::StrCat(
          "rank ", rank, " of job '", name(), "' is held by the living process ",
          holder->session->pid,
          holder->local() ? "" : " at daemon " + holder->daemon + Silence(holder->daemon),
          "; end it, or wait until its heartbeats have lapsed"));
    }
  }
  const bool empty =
      std::none_of(members_.begin(), members_.end(), [](const auto& m) { return m->live(); });
  if (!empty && world_size != world_size_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " of job '", name(), "' has world_size ", world_size, ", but its group has ",
        world_size_, "; start all ranks with the same world_size"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::OpenReply> Job::DoOpen(const std::shared_ptr<Session>& session, uint32_t rank,
                                          uint32_t world_size, const v1::JobConfig& config,
                                          bool created, bool restarted) {
  if (deleted_) return absl::NotFoundError(absl::StrCat("job '", name(), "' was deleted"));
  if (drained_) return Draining();
  if (failed_) return absl::FailedPreconditionError(failure_);
  if (absl::Status status = MakeRoom(rank, world_size); !status.ok()) return status;
  absl::StatusOr<uint32_t> line = TakeLine(*session);
  if (!line.ok()) return line.status();
  BeginRun(world_size, config, restarted);
  finished_.erase(rank);
  StoreFinished();
  auto member = std::make_unique<Member>();
  member->session = session;
  member->rank = rank;
  member->line = *line;
  member->slots = contract::SlotsOfRank(config_.slots(), world_size, rank);
  member->nodes = contract::MaximalNodes(config_.slots(), member->slots);
  member->heartbeat_at = env_.now();
  members_.push_back(std::move(member));
  // Messages are the attach socket's until the ring is attached; a hang-up is ours.
  Watch(EPOLL_CTL_ADD, session->socket.get(), session->nonce << 1, EPOLLRDHUP | EPOLLET);
  Watch(EPOLL_CTL_ADD, session->pidfd.get(), session->nonce << 1 | 1, EPOLLIN);
  Wake();

  v1::OpenReply reply;
  reply.set_job_id(job_id_);
  reply.set_created(created);
  reply.set_timeline(segments_->timeline());
  reply.set_layout_hash(layout_.hash());
  reply.set_session_line(*line);
  reply.set_initialising(!upload_.complete());
  reply.set_committed_step(VisibleStep());
  reply.set_chunk_elements(layout_.chunk_elements());
  reply.set_bucket_elements(layout_.bucket_elements());
  reply.set_weights_bytes(segments_->weights_bytes());
  reply.set_window_bytes(kWindowBytes);
  reply.set_job_tag(segments_->job_tag());
  return reply;
}

// The first rank to come says how many there are, and how the job is run.
void Job::BeginRun(uint32_t world_size, const v1::JobConfig& config, bool restarted) {
  const bool empty =
      std::none_of(members_.begin(), members_.end(), [](const auto& m) { return m->live(); });
  if (!empty) return;
  // After a run that all ranks finished, a new one waits for all of them again; a rank that was
  // killed before its process ended comes back alone.
  const bool all_finished = finished_.size() == group_world_size_;
  if (world_size != group_world_size_ || (all_finished && !restarted)) finished_.clear();
  world_size_ = group_world_size_ = world_size;
  running_ = config;
}

void Job::Watch(int operation, int fd, uint64_t key, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  epoll_ctl(epoll_, operation, fd, &event);
}

absl::StatusOr<AttachedRing> Job::DoAttachRing(const Session* session, std::unique_ptr<Ring> ring) {
  absl::StatusOr<Member*> member = FindLive(session);
  if (!member.ok()) return member.status();
  if ((*member)->ring != nullptr) {
    return absl::FailedPreconditionError("this session has attached a ring before");
  }
  absl::StatusOr<std::unique_ptr<Window>> window = Window::Create();
  if (!window.ok()) return window.status();
  absl::StatusOr<contract::UniqueFd> weights = segments_->OpenWeights();
  if (!weights.ok()) return weights.status();
  absl::StatusOr<contract::UniqueFd> window_fd = (*window)->OpenReadOnly();
  if (!window_fd.ok()) return window_fd.status();
  ring_bytes_ += ring->bytes();
  (*member)->ring = std::move(ring);
  (*member)->window = *std::move(window);
  (*member)->heartbeat_at = env_.now();
  Watch(EPOLL_CTL_MOD, session->socket.get(), session->nonce << 1, EPOLLIN | EPOLLRDHUP | EPOLLET);
  return AttachedRing{*std::move(weights), *std::move(window_fd)};
}

void Job::DoJoin(const Session* session, absl::Duration timeout, JoinCallback done) {
  absl::StatusOr<Member*> found = FindLive(session);
  if (!found.ok()) return done(found.status());
  Member* member = *found;
  if (failed_) return done(absl::FailedPreconditionError(failure_));
  if (drained_) return done(Draining());
  if (member->ring == nullptr) {
    return done(absl::FailedPreconditionError(
        "Join before a ring is attached; send kSegments on the attach socket first"));
  }
  if (member->join) {
    return done(absl::FailedPreconditionError("this session is waiting in Join already"));
  }
  // Whoever joins while a group runs is either one of it, which has given up the step, or
  // the successor of a rank that had closed: the others cannot go on without it.
  if (running_group_ && !follows()) {
    BreakGroup(absl::StrCat("rank ", member->rank, member->joined ? " joined anew" : " came back"));
  }
  member->join = std::move(done);
  member->join_deadline = env_.now() + std::min(timeout, absl::Seconds(running_.join_seconds()));
  if (follows()) {
    member->join_deadline += absl::Seconds(1);  // the coordinator knows better what is missing
    return TellJoin(*member);
  }
  TryForm();
}

void Job::TryForm() {
  if (running_group_ || world_size_ == 0 || commit_.pending() || journal_reading_ > 0 ||
      follows()) {
    return;
  }
  uint32_t present = 0;
  bool any = false;  // else all have finished, and there is no group
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    const Member* member = AtRank(rank);
    any = any || member != nullptr;
    present += (member != nullptr ? member->join != nullptr : finished_.contains(rank)) ? 1 : 0;
  }
  if (!any || present < world_size_ || (span_ != nullptr && !ReadyToForm())) return;
  running_group_ = true;
  ForgetStep();
  if (durability_ != nullptr && upload_.complete()) {
    durability_->AtBoundary(decider_.committed_step());
  }
  env_.failpoints->Reach("session.join.before_reply");
  v1::JoinReply reply;
  reply.set_generation(segments_->header()->generation.load());
  reply.set_next_step(decider_.committed_step() + 1);
  reply.set_blob(decider_.current().blob);
  reply.set_loss_scale(decider_.loss_scale());
  reply.set_initialising(!upload_.complete());
  reply.set_applied(decider_.applied());
  env_.log(absl::StrCat("job ", name(), ": generation ", reply.generation(), " of ", world_size_,
                        " ranks at step ", reply.next_step()));
  for (const auto& member : members_) {
    if (!member->live() || !member->join) continue;
    JoinCallback done = std::move(member->join);
    member->join = nullptr;
    member->join_deadline = absl::InfiniteFuture();
    member->joined = true;
    done(reply);
  }
  if (span_ != nullptr) TellFormed(reply);
}

std::string Job::MissingRanks(const std::function<bool(const Member&)>& has) const {
  std::string missing;
  size_t count = 0;
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    const bool found = std::any_of(members_.begin(), members_.end(), [&](const auto& m) {
      return m->live() && m->rank == rank && has(*m);
    });
    if (found) continue;
    if (++count <= 16) absl::StrAppend(&missing, missing.empty() ? "" : ", ", rank);
  }
  if (count > 16) absl::StrAppend(&missing, " and ", count - 16, " more");
  return absl::StrCat(count == 1 ? "rank " : "ranks ", missing);
}

bool Job::SomeRankHasClosed() const {
  return !finished_.empty() || std::any_of(members_.begin(), members_.end(),
                                           [](const auto& m) { return m->closed && m->joined; });
}

void Job::StoreFinished() {
  contract::JobHeader* header = segments_->header();
  header->finished_world_size = group_world_size_;
  header->finished_step = decider_.committed_step();
  std::array<uint64_t, contract::kMaxFinishedRanks / 64> words{};
  for (uint32_t rank : finished_) words[rank / 64] |= uint64_t{1} << (rank % 64);
  for (size_t w = 0; w < words.size(); ++w) header->finished[w] = words[w];
}

void Job::LoadFinished() {
  const contract::JobHeader* header = segments_->header();
  if (header->finished_step != decider_.committed_step()) return;
  group_world_size_ = static_cast<uint32_t>(header->finished_world_size);
  for (uint32_t rank = 0; rank < contract::kMaxFinishedRanks; ++rank) {
    if ((header->finished[rank / 64] >> (rank % 64) & 1) != 0) finished_.insert(rank);
  }
}

void Job::Refuse(Member* member, absl::Status why) {
  env_.log(absl::StrCat("job ", name(), ": rank ", member->rank, " (pid ", member->session->pid,
                        ") is refused: ", why.message()));
  env_.counters->refused_descriptors += 1;
  member->session->SetRefusal(why);
  if (member->local()) {
    segments_->session_line(member->line)
        ->state.store(static_cast<uint32_t>(contract::SessionState::kRefused),
                      std::memory_order_release);
  }
  if (follows()) TellGone(*member, "was refused", false);
  const bool took_part = member->joined;
  member->evicted = true;
  member->joined = false;
  if (member->join) {
    JoinCallback done = std::move(member->join);
    member->join = nullptr;
    done(why);
  }
  if (running_group_ && took_part) {
    BreakGroup(absl::StrCat("rank ", member->rank, " was refused"));
  }
  if (member->ring != nullptr) {
    ring_bytes_ -= member->ring->bytes();
    member->ring.reset();  // after BreakGroup: nothing points into it any more
  }
  Wake();
}

// The connection is gone, or the session was closed.
void Job::Leave(Member* member, const std::string& how) {
  const bool took_part = member->joined && member->live();
  const uint32_t rank = member->rank;
  if (member->live()) {
    env_.log(
        absl::StrCat("job ", name(), ": rank ", rank, " (pid ", member->session->pid, ") ", how));
  }
  if (how == "closed") {
    // Its ring goes with it, so what it published of a step that is not decided goes too.
    const bool amid_step = member->published > 0 || member->ended;
    if (follows()) TellGone(*member, how, amid_step);
    if (amid_step) BreakGroup(absl::StrCat("rank ", rank, " closed in the middle of a step"));
    member->closed = true;
    // A leaver in good order does not disturb the others, who may still read their
    // last decision. If they go on to another step, they regroup then.
    const bool any =
        std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m->live(); });
    if (!amid_step) finished_.insert(rank);
    StoreFinished();
    if (!any && running_group_ && !follows()) BreakGroup("all ranks have closed");
    idle_since_ = env_.now();
    if (any) TryForm();  // the others may have waited for this one alone
    if (!member->local()) Remove(member);
    return;
  }
  if (follows() && member->live()) TellGone(*member, how, false);
  member->evicted = true;  // so that nobody counts it while the group is broken
  if (running_group_ && took_part) BreakGroup(absl::StrCat("rank ", rank, " ", how));
  Remove(member);
}

void Job::Remove(Member* member) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, member->session->socket.get(), nullptr);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, member->session->pidfd.get(), nullptr);
  if (member->join) {
    JoinCallback done = std::move(member->join);
    done(absl::CancelledError("the session's connection is gone"));
  }
  if (member->local()) {
    contract::SessionLine* line = segments_->session_line(member->line);
    line->state.store(static_cast<uint32_t>(contract::SessionState::kFree));
    line->session.store(0, std::memory_order_release);
  }
  if (span_ != nullptr) span_->ends.erase(member->session->nonce);
  if (member->ring != nullptr) ring_bytes_ -= member->ring->bytes();
  const std::shared_ptr<Session> session = member->session;
  std::erase_if(members_, [&](const auto& m) { return m.get() == member; });
  env_.on_session_end(session);
  if (!members_.empty()) return;
  idle_since_ = env_.now();
  world_size_ = 0;
  if (!upload_.complete() && !deleted_ && !follows()) {
    env_.log(absl::StrCat("job ", name(), ": abandoned before parameter '", upload_.FirstMissing(),
                          "' was uploaded; its memory is given back"));
    env_.on_abandoned(name());
  }
}

// Ends the running group: a new generation begins, and what is not decided is dropped.
void Job::BreakGroup(const std::string& why) {
  if (follows()) {  // what is complete stays until the coordinator says that it is not wanted
    span_->awaiting_generation = true;
    return sums_.DropWaiting();
  }
  EnterGeneration(segments_->header()->generation.load() + 1, why);
  if (span_ == nullptr) return;
  v1::PeerMessage message;
  message.mutable_new_generation()->set_why(why);
  TellOthers(message);
}

void Job::EnterGeneration(uint64_t generation, const std::string& why) {
  running_group_ = false;
  contract::JobHeader* header = segments_->header();
  const bool lost = !sums_.empty() || std::any_of(members_.begin(), members_.end(),
                                                  [](const auto& m) { return m->ended; });
  if (lost) header->recomputed_steps += 1;
  header->regroups += 1;
  header->generation.store(generation, std::memory_order_release);
  env_.log(absl::StrCat(
      "job ", name(), ": generation ", generation, " begins: ", why,
      lost ? absl::StrCat("; step ", decider_.committed_step() + 1, " will be computed again")
           : ""));
  ForgetStep();
  for (const auto& member : members_) {
    member->joined = false;
    if (member->ring == nullptr) continue;
    segments_->session_line(member->line)
        ->released.store(member->ring->ReleaseAll(), std::memory_order_release);
  }
  board_.SetGeneration(generation);
  TellJournalOfGeneration();
  Publish();
}

}  // namespace shardd::step

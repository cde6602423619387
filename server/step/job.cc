#include "server/step/job.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/contract/attach.h"
#include "server/env/fault_guard.h"

namespace shardd::step {

namespace {

constexpr uint64_t kCommandKey = ~uint64_t{0};
constexpr absl::Duration kLookAtStall = absl::Milliseconds(200);
constexpr absl::Duration kLookAtSave = absl::Seconds(1);

std::vector<uint64_t> FrozenSizes(const store::JobSegments& segments) {
  std::vector<uint64_t> sizes;
  for (size_t f = 0; f < segments.num_frozen(); ++f) sizes.push_back(segments.frozen_bytes(f));
  return sizes;
}

// Answers on the job's thread.
template <typename T>
void Answer(const std::function<void(absl::StatusOr<T>)>& done, absl::Status status, T reply) {
  if (status.ok()) {
    done(std::move(reply));
  } else {
    done(std::move(status));
  }
}

}  // namespace

Job::Job(const JobEnvironment& environment, contract::Layout layout, v1::JobConfig config,
         std::unique_ptr<store::JobSegments> segments, env::BudgetLease lease, uint32_t uid,
         std::string job_id)
    : env_(environment),
      layout_(std::move(layout)),
      config_(config),
      running_(config),
      segments_(std::move(segments)),
      lease_(std::move(lease)),
      uid_(uid),
      job_id_(std::move(job_id)),
      optimizer_(kernels::FindOptimizer(config.optimizer())),
      log_(&segments_->job()),
      decider_(&layout_, &config_, optimizer_, &log_),
      board_(segments_->board()),
      sums_(&layout_, segments_.get(), config_.slots(), environment.isa, environment.pool),
      updater_(&layout_, segments_.get(), optimizer_, environment.isa, environment.pool,
               environment.failpoints),
      upload_(&layout_, FrozenSizes(*segments_), segments_->header()->initialised != 0) {
  group_sizes_.resize(static_cast<size_t>(config_.groups_size()));
  for (size_t p = 0; p < layout_.num_parameters(); ++p) {
    GroupSize& group = group_sizes_[layout_.parameter(p).group];
    ++group.parameters;
    group.elements += layout_.parameter_elements(p);
  }
  if (optimizer_->has_trust_ratio()) {
    decider_.SetCompleteTable([this](const StepInputs& inputs, float clip_factor,
                                     std::span<contract::ParameterEntry> table) {
      SetTrustRatios(inputs, clip_factor, table);
    });
  }
  idle_since_ = env_.now();
  last_progress_ = idle_since_;
}

Job::~Job() {
  Stop();
  if (epoll_ >= 0) close(epoll_);
  if (event_ >= 0) close(event_);
}

absl::Status Job::Recover() {
  absl::StatusOr<uint64_t> redone = 0;
  // A decision that is pending has updated nothing.
  if (!commit_.pending()) redone = RedoDecision();
  if (!redone.ok()) return redone.status();
  // Weights may be torn where state is whole; masters have it all.
  updater_.PublishMasters(VisibleStep(), VisibleTable());
  for (uint32_t i = 0; i < segments_->session_lines(); ++i) {
    contract::SessionLine* line = segments_->session_line(i);
    line->state.store(static_cast<uint32_t>(contract::SessionState::kFree));
    line->session.store(0);
  }
  contract::JobHeader* header = segments_->header();
  LoadFinished();
  // Only the coordinator begins generations.
  const uint64_t generation = header->generation.load() + (follows() ? 0 : 1);
  header->generation.store(generation, std::memory_order_release);
  board_.Reset();
  if (!commit_.pending()) board_.PublishDecision(CurrentNews());
  board_.SetGeneration(generation);
  TellJournalOfGeneration();
  if (header->failed.load() != 0) {
    FailJob(std::string(header->failure, strnlen(header->failure, sizeof(header->failure))));
  } else if (span_ == nullptr) {
    board_.SetState(contract::BoardState::kReady);
  } else {
    ExpectWeights();
  }
  env_.log(absl::StrCat("job ", name(), ": adopted at step ", VisibleStep(), ", generation ",
                        generation, "; ", *redone, " of ", updater_.owned().size(),
                        " chunks were redone"));
  return absl::OkStatus();
}

// Finishes the update that a daemon's death interrupted; how many chunks it redid.
absl::StatusOr<uint64_t> Job::RedoDecision() {
  const store::Decision& decision = decider_.current();
  UpdateOrder order;
  order.step = decider_.committed_step();
  order.applied = decider_.applied();
  order.clip_factor = std::bit_cast<float>(decision.header.clip_factor_bits);
  order.table = decider_.table();
  order.presence = decision.presence;
  return updater_.Recover(order);
}

// What the board says of the current decision.
DecisionNews Job::CurrentNews() const {
  DecisionNews news;
  news.committed_step = decider_.committed_step();
  news.applied = decider_.applied();
  news.loss_scale = decider_.loss_scale();
  const auto records = log_.Records(news.committed_step, news.committed_step);
  if (records.empty()) return news;
  news.result = records.back().result;
  news.loss = records.back().loss;
  news.grad_norm = records.back().grad_norm;
  news.skip_reason = records.back().reason;
  news.lr = decider_.lr();
  return news;
}

void Job::Start() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kCommandKey;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, event_, &event);
  if (upload_.complete() && segments_->header()->initialised == 0) FinishInitialisation();
  StartJournal();
  Publish();
  thread_ = std::thread([this] { Main(); });
}

void Job::Stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  Post([] {});
  CancelCopy();  // the thread may be waiting for its reader
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
  std::deque<std::function<void()>> left;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    left.swap(commands_);
  }
  if (durability_ != nullptr) durability_->Stop();
  DropCopy();
  due_copy_.reset();
  EndSpanSave(absl::UnavailableError("the daemon is going down; ask its successor"));
  // A deleted job says so to whoever still asks.
  for (const auto& command : left) {
    if (deleted_ && !begins_anew_) command();
  }
  for (const auto& member : members_) {
    member->join = nullptr;
    env_.on_session_end(member->session);
  }
}

void Job::Post(std::function<void()> command) {
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    commands_.push_back(std::move(command));
  }
  // seq_cst on both sides: either this sees the sleeper or the sleeper sees the command.
  if (sleeping_.load()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(event_, &one, sizeof(one));
  }
}

void Job::Main() {
  pthread_setname_np(pthread_self(), "shardd-job");
  const kernels::ScopedFlushToZero flush;
  while (!stop_) {
    bool progress = RunCommands();
    if (!drained_) {
      if (!commit_.pending()) progress |= PollRings();
      progress |= Advance();
      CheckDrain();
    }
    const absl::Time now = env_.now();
    if (progress) {
      last_progress_ = now;
      if (now - published_at_ > absl::Milliseconds(50)) Publish();
    } else if (!running_group_ || now - last_progress_ > env_.spin) {
      CheckClocks();
      Sleep();
    }
  }
}

bool Job::RunCommands() {
  std::deque<std::function<void()>> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) command();
  return !commands.empty();
}

bool Job::PollRings() {
  bool progress = false;
  for (size_t i = 0; i < members_.size(); ++i) {
    Member* member = members_[i].get();
    if (!member->live() || member->ring == nullptr) continue;
    if (span_ != nullptr && span_->awaiting_generation) continue;
    bool has_next = false;
    const Ring* ring = member->ring.get();
    if (env::RunGuarded([&] { has_next = ring->HasNext(); }) != nullptr) {
      Refuse(member, absl::DataLossError("the ring cannot be read: its memory is gone"));
      continue;
    }
    if (!has_next) continue;
    progress = true;
    PollRing(member);
  }
  return progress;
}

void Job::Sleep() {
  Publish();
  sleeping_ = true;
  board_.SetSleeping(true);
  // Whoever published before reading daemon_sleeps is seen here; whoever does
  // after it rings.
  bool work = false;
  for (const auto& member : members_) {
    if (commit_.pending() || !member->live() || member->ring == nullptr) continue;
    if (span_ != nullptr && span_->awaiting_generation) continue;
    const Ring* ring = member->ring.get();
    env::RunGuarded([&] { work = work || ring->HasNext(); });
  }
  {
    std::lock_guard lock(mutex_);
    work = work || !commands_.empty();
  }
  const absl::Duration wait = NextClock() - env_.now();
  const double ms = std::clamp(absl::ToDoubleMilliseconds(wait) + 1, 0.0, 3600e3);
  OnEvents(work || stop_ ? 0 : static_cast<int>(ms));
  sleeping_ = false;
  board_.SetSleeping(false);
}

void Job::OnEvents(int timeout_ms) {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout_ms);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.u64 == kCommandKey) {
      uint64_t drained;
      [[maybe_unused]] const ssize_t n = read(event_, &drained, sizeof(drained));
      continue;
    }
    const uint64_t nonce = event.data.u64 >> 1;
    const auto it = std::find_if(members_.begin(), members_.end(), [&](const auto& member) {
      return member->local() && member->session->nonce == nonce;
    });
    if (it == members_.end()) continue;
    Member* member = it->get();
    if ((event.data.u64 & 1) != 0) {  // the pidfd: the process has ended
      Leave(member, "died");
      continue;
    }
    // Doorbells. What they say does not matter.
    contract::AttachMessage message;
    bool gone = (event.events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0;
    while (!gone && member->ring != nullptr) {
      const ssize_t n =
          recv(member->session->socket.get(), &message, sizeof(message), MSG_DONTWAIT | MSG_TRUNC);
      if (n < 0) break;
      gone = n == 0;
    }
    if (gone) Leave(member, "hung up");
  }
}

absl::Time Job::NextClock() const {
  absl::Time next = draining_ ? drain_deadline_ : absl::InfiniteFuture();
  if (span_ != nullptr) {
    if (AwaitsJournal()) next = std::min(next, env_.now() + kLookAtStall);
    for (const auto& [nonce, open] : span_->opens) next = std::min(next, open.deadline);
    for (const auto& [request, read] : span_->reads) next = std::min(next, read.deadline);
    for (const auto& [nonce, close] : span_->closes) next = std::min(next, close.first);
    if (span_->save != nullptr) next = std::min(next, env_.now() + kLookAtSave);
  }
  for (const auto& member : members_) {
    if (member->join) next = std::min(next, member->join_deadline);
    if (member->live() && member->local()) {
      next = std::min(next, member->heartbeat_at + absl::Seconds(running_.heartbeat_seconds()));
    }
  }
  return next;
}

void Job::CheckClocks() {
  const absl::Time now = env_.now();
  const bool expired = std::any_of(members_.begin(), members_.end(), [&](const auto& m) {
    return m->join && now >= m->join_deadline;
  });
  if (expired) ExpireJoins(now);
  if (span_ != nullptr) {
    ExpireOpens(now);
    ExpireReads(now);
    CheckSpanSave(now);
    AskAgain();
    if (AwaitsJournal()) TellStall();
  }
  for (const auto& member : members_) {
    if (!member->live() || !member->local()) continue;
    uint64_t beat = member->heartbeat;
    if (const Ring* ring = member->ring.get()) env::RunGuarded([&] { beat = ring->heartbeat(); });
    if (beat != member->heartbeat) {
      member->lapses = 0;
    } else if (now < member->heartbeat_at + absl::Seconds(running_.heartbeat_seconds())) {
      continue;
    } else {
      ++member->lapses;
    }
    member->heartbeat = beat;
    member->heartbeat_at = now;  // the next look that counts is a heartbeat away
  }
}

void Job::ExpireJoins(absl::Time now) {
  const absl::Status why = absl::DeadlineExceededError(absl::StrCat(
      "job '", name(), "': the rank group of ", world_size_, " did not form in time: missing ",
      follows() ? absl::StrCat("the coordinator ", span_->coordinator, " has not said that it did",
                               Silence(span_->coordinator))
                : MissingRanks([](const Member& m) { return m.joined || m.join != nullptr; }),
      "; start them, or start with another world_size",
      commit_.pending() && durability_ != nullptr
          ? absl::StrCat("; step ", decider_.committed_step(),
                         " waits for its journal: ", durability_->Stall())
          : ""));
  for (const auto& member : members_) {
    if (!member->join || now < member->join_deadline) continue;
    JoinCallback done = std::move(member->join);
    member->join = nullptr;
    member->join_deadline = absl::InfiniteFuture();
    done(why);
  }
}

void Job::Open(std::shared_ptr<Session> session, uint32_t rank, uint32_t world_size,
               const v1::JobConfig& config, bool created, bool restarted,
               Callback<v1::OpenReply> done) {
  Post([this, session, rank, world_size, config, created, restarted, done] {
    if (follows()) return ForwardOpen(session, rank, world_size, config, restarted, done);
    done(DoOpen(session, rank, world_size, config, created, restarted));
  });
}

void Job::AttachRing(std::shared_ptr<Session> session, std::unique_ptr<Ring> ring,
                     Callback<AttachedRing> done) {
  auto shared = std::make_shared<std::unique_ptr<Ring>>(std::move(ring));
  Post([this, session, shared, done] { done(DoAttachRing(session.get(), std::move(*shared))); });
}

void Job::Join(std::shared_ptr<Session> session, absl::Duration timeout, JoinCallback done) {
  Post([this, session, timeout, done] { DoJoin(session.get(), timeout, done); });
}

void Job::EndStep(std::shared_ptr<Session> session, v1::EndStepRequest request,
                  Callback<v1::EndStepReply> done) {
  auto shared = std::make_shared<v1::EndStepRequest>(std::move(request));
  Post([this, session, shared, done] {
    absl::Status status = DoEndStep(session.get(), shared.get());
    if (status.ok() && follows()) {  // the coordinator's answer is what counts
      span_->ends[session->nonce] = [done](absl::Status answer) {
        Answer<v1::EndStepReply>(done, std::move(answer), {});
      };
      return;
    }
    Answer<v1::EndStepReply>(done, std::move(status), {});
  });
}

void Job::StepRecords(uint64_t first_step, Callback<v1::StepRecordsReply> done) {
  Post([this, first_step, done] {
    v1::StepRecordsReply reply;
    reply.set_committed_step(VisibleStep());
    for (const auto& entry : log_.Records(first_step, VisibleStep())) {
      *reply.add_records() = ToProto(entry);
    }
    done(std::move(reply));
  });
}

void Job::FillWindow(std::shared_ptr<Session> session, v1::FillWindowRequest request,
                     Callback<v1::FillWindowReply> done) {
  Post([this, session, request, done] {
    if (span_ != nullptr && ReadsElsewhere(request)) return StartRead(session, request, done);
    done(DoFillWindow(session.get(), request));
  });
}

void Job::ExplainWait(std::shared_ptr<Session> session, Callback<v1::SessionErrorReply> done) {
  Post([this, session, done] { done(DoExplainWait(session.get())); });
}

void Job::Close(std::shared_ptr<Session> session, Callback<v1::CloseReply> done) {
  Post([this, session, done] {
    if (Member* member = Find(session.get())) {
      session->closed = true;
      Advance();  // its EndStep may have been the last that a step waited for
      const bool live = member->live();
      if (live) Leave(member, "closed");
      // When this is answered, the coordinator knows that the rank's place is free.
      if (live && follows() && span_->links->State(span_->coordinator).connected) {
        span_->closes[session->nonce] = {env_.now() + absl::Seconds(2),
                                         [done] { done(v1::CloseReply()); }};
        return;
      }
    }
    done(v1::CloseReply());
  });
}

void Job::PrepareDelete(bool force, Callback<v1::DeleteJobReply> done) {
  Post([this, force, done] {
    if (follows() && !span_->delete_ordered && !failed_ &&
        (!force || span_->links->State(span_->coordinator).connected)) {
      done(absl::FailedPreconditionError(
          absl::StrCat("job '", name(), "' is coordinated by daemon ", span_->coordinator,
                       ": delete it there, which deletes it everywhere; --force deletes what lies "
                       "here once that daemon is gone")));
      return;
    }
    const auto live =
        std::count_if(members_.begin(), members_.end(), [](const auto& m) { return m->live(); });
    if (live > 0 && !force) {
      done(absl::FailedPreconditionError(
          absl::StrCat("job '", name(), "' has ", live,
                       " sessions attached; stop its trainers, or delete with --force")));
      return;
    }
    deleted_ = true;
    EndSpanSave(absl::NotFoundError(absl::StrCat("job '", name(), "' was deleted")));
    if (coordinates()) {
      v1::PeerMessage message;
      message.mutable_delete_()->set_begins_anew(begins_anew_);
      TellOthers(message);
    }
    if (!begins_anew_) {  // else sessions end with the job, and open it again
      board_.SetState(contract::BoardState::kDeleted);
      const absl::Status why =
          absl::NotFoundError(absl::StrCat("job '", name(), "' was deleted by its operator"));
      for (const auto& member : members_) {
        if (member->live()) Refuse(member.get(), why);
      }
    }
    v1::DeleteJobReply reply;
    reply.set_freed_bytes(segments_->plan().total());
    done(std::move(reply));
  });
}

}  // namespace shardd::step

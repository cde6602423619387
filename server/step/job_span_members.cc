// Jobs that several daemons share: ranks that are attached to other daemons.
//
// The coordinator has a Member for each of them; the daemon to which a rank is attached forwards
// what it asks, and waits for what the coordinator says.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

using v1::PeerMessage;

PeerMessage::Member Job::Describe(const Member& member) const {
  PeerMessage::Member described;
  described.set_session(member.session->nonce);
  described.set_rank(member.rank);
  described.set_pid(member.session->pid);
  described.set_world_size(world_size_);
  *described.mutable_config() = running_;
  return described;
}

// --- Where the rank is attached.

void Job::ForwardOpen(const std::shared_ptr<Session>& session, uint32_t rank, uint32_t world_size,
                      const v1::JobConfig& config, bool restarted, Callback<v1::OpenReply> done) {
  if (failed_) return done(absl::FailedPreconditionError(failure_));
  // One that has gone here is told of before its successor is.
  if (absl::Status status = MakeRoom(rank, world_size); !status.ok()) return done(status);
  DropEndedOpens(rank);
  Span::PendingOpen open;
  open.session = session;
  open.member.set_session(session->nonce);
  open.member.set_rank(rank);
  open.member.set_pid(session->pid);
  open.member.set_world_size(world_size);
  *open.member.mutable_config() = config;
  open.member.set_restarted(restarted);
  open.deadline = env_.now() + absl::Seconds(config.join_seconds());
  open.done = [this, session, rank, world_size, config, restarted, done](absl::Status status) {
    if (!status.ok()) return done(std::move(status));
    absl::StatusOr<v1::OpenReply> reply =
        DoOpen(session, rank, world_size, config, false, restarted);
    if (!reply.ok()) {
      PeerMessage gone;
      gone.mutable_member_gone()->set_session(session->nonce);
      gone.mutable_member_gone()->set_how("could not be attached");
      Tell(span_->coordinator, std::move(gone));
    }
    done(std::move(reply));
  };
  PeerMessage message;
  *message.mutable_member_open()->mutable_member() = open.member;
  span_->opens[session->nonce] = std::move(open);
  if (span_->peers[span_->coordinator].synced) Tell(span_->coordinator, std::move(message));
}

// A process that ended before the coordinator's answer came may have been admitted there.
void Job::DropEndedOpens(uint32_t rank) {
  for (auto it = span_->opens.begin(); it != span_->opens.end();) {
    const std::string how = HowItEnded(*it->second.session);
    if (it->second.member.rank() != rank || how.empty()) {
      ++it;
      continue;
    }
    PeerMessage gone;
    gone.mutable_member_gone()->set_session(it->first);
    gone.mutable_member_gone()->set_how(how);
    Tell(span_->coordinator, std::move(gone));
    const auto done = std::move(it->second.done);
    it = span_->opens.erase(it);
    done(absl::CancelledError("the session's connection is gone"));
  }
}

void Job::ExpireOpens(absl::Time now) {
  for (auto it = span_->closes.begin(); it != span_->closes.end();) {
    if (now < it->second.first) {
      ++it;
      continue;
    }
    const auto done = std::move(it->second.second);
    it = span_->closes.erase(it);
    done();
  }
  for (auto it = span_->opens.begin(); it != span_->opens.end();) {
    if (now < it->second.deadline) {
      ++it;
      continue;
    }
    const auto done = std::move(it->second.done);
    it = span_->opens.erase(it);
    done(absl::DeadlineExceededError(absl::StrCat("job '", name(), "': its coordinator, daemon ",
                                                  span_->coordinator, ", gave no answer in time",
                                                  Silence(span_->coordinator), "; look at it")));
  }
}

void Job::OnMemberAnswer(const PeerMessage::MemberAnswer& answer) {
  const absl::Status status(static_cast<absl::StatusCode>(answer.code()), answer.text());
  switch (answer.call()) {
    case PeerMessage::MemberAnswer::OPEN: {
      const auto it = span_->opens.find(answer.session());
      if (it == span_->opens.end()) {
        // Of a session that was told of again.
        for (const auto& member : members_) {
          if (!status.ok() && member->live() && member->session->nonce == answer.session()) {
            return Refuse(member.get(), status);
          }
        }
        return;
      }
      const auto done = std::move(it->second.done);
      span_->opens.erase(it);
      return done(status);
    }
    case PeerMessage::MemberAnswer::END_STEP: {
      const auto it = span_->ends.find(answer.session());
      if (it == span_->ends.end()) return;
      const auto done = std::move(it->second);
      span_->ends.erase(it);
      if (!status.ok()) {
        for (const auto& member : members_) {
          if (member->session->nonce == answer.session()) member->ended = false;
        }
      }
      return done(status);
    }
    case PeerMessage::MemberAnswer::CLOSE: {
      const auto it = span_->closes.find(answer.session());
      if (it == span_->closes.end()) return;
      const auto done = std::move(it->second.second);
      span_->closes.erase(it);
      return done();
    }
    default:
      for (const auto& member : members_) {
        if (member->session->nonce != answer.session() || !member->join) continue;
        JoinCallback done = std::move(member->join);
        member->join = nullptr;
        member->join_deadline = absl::InfiniteFuture();
        return done(status);
      }
  }
}

void Job::TellGone(const Member& member, const std::string& how, bool amid_step) {
  PeerMessage message;
  message.set_step(decider_.committed_step() + 1);
  message.mutable_member_gone()->set_session(member.session->nonce);
  message.mutable_member_gone()->set_how(how);
  message.mutable_member_gone()->set_amid_step(amid_step);
  Tell(span_->coordinator, std::move(message));
}

void Job::TellJoin(const Member& member) {
  PeerMessage message;
  message.mutable_member_join()->set_session(member.session->nonce);
  message.mutable_member_join()->set_timeout_seconds(
      absl::ToDoubleSeconds(member.join_deadline - env_.now() - absl::Seconds(1)));
  Tell(span_->coordinator, std::move(message));
}

void Job::OnFormed(const PeerMessage& header) {
  const PeerMessage::Formed& formed = header.formed();
  if (header.generation() != segments_->header()->generation.load()) {
    return RefuseMessage(span_->coordinator, "a group of another generation");
  }
  ForgetStep();
  running_group_ = true;
  span_->awaiting_generation = false;
  span_->daemons.assign(formed.daemons().begin(), formed.daemons().end());
  env_.log(absl::StrCat("job ", name(), ": generation ", header.generation(), " of ",
                        formed.world_size(), " ranks at step ", formed.reply().next_step()));
  for (const auto& member : members_) {
    if (!member->live() || !member->join) continue;
    JoinCallback done = std::move(member->join);
    member->join = nullptr;
    member->join_deadline = absl::InfiniteFuture();
    member->joined = true;
    done(formed.reply());
  }
  RetryEarly();
}

void Job::OnNewGeneration(const PeerMessage& header) {
  if (header.generation() <= segments_->header()->generation.load()) return;
  EnterGeneration(header.generation(), header.new_generation().why());
  span_->awaiting_generation = false;
  auto ends = std::exchange(span_->ends, {});
  for (auto& [session, done] : ends) {
    done(absl::AbortedError(absl::StrCat("job '", name(), "': the group is over; Join again")));
  }
  RetryEarly();
}

// --- At the coordinator.

Member* Job::FindRemote(const std::string& daemon, uint64_t session) {
  for (const auto& member : members_) {
    if (member->daemon == daemon && member->session->nonce == session) return member.get();
  }
  return nullptr;
}

absl::Status Job::Admit(const std::string& daemon, const PeerMessage::Member& said) {
  if (follows()) {
    return absl::UnavailableError(
        absl::StrCat("job '", name(), "': its coordinator is ", span_->coordinator));
  }
  if (drained_) return Draining();
  if (failed_) return absl::FailedPreconditionError(failure_);
  if (config_.durability() == v1::peer) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job '", name(), "' has durability = peer, and its journal is kept by daemon ", span_->self,
        ": attach its ranks there, or start it with durability = node to span daemons"));
  }
  if (upload_.has_frozen()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job '", name(), "' has frozen parameters, which lie with daemon ", span_->self,
        " alone: attach its ranks there, or register what is trained only to span daemons"));
  }
  if (FindRemote(daemon, said.session()) != nullptr) return absl::OkStatus();
  if (said.world_size() == 0 || said.world_size() > config_.slots() ||
      said.rank() >= said.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", said.rank(), " of ", said.world_size(),
                                                   " with ", config_.slots(), " slots"));
  }
  absl::Status status = MakeRoom(said.rank(), said.world_size());
  if (!status.ok()) return status;
  BeginRun(said.world_size(), said.config(), said.restarted());
  finished_.erase(said.rank());
  StoreFinished();
  auto member = std::make_unique<Member>();
  member->session = std::make_shared<Session>();
  member->session->nonce = said.session();
  member->session->pid = static_cast<pid_t>(said.pid());
  member->daemon = daemon;
  member->rank = said.rank();
  member->slots = contract::SlotsOfRank(config_.slots(), said.world_size(), said.rank());
  member->nodes = contract::MaximalNodes(config_.slots(), member->slots);
  member->heartbeat_at = env_.now();
  members_.push_back(std::move(member));
  return absl::OkStatus();
}

void Job::AnswerMember(const std::string& daemon, PeerMessage::MemberAnswer::Call call,
                       uint64_t session, const absl::Status& status) {
  PeerMessage message;
  PeerMessage::MemberAnswer* answer = message.mutable_member_answer();
  answer->set_call(call);
  answer->set_session(session);
  answer->set_code(static_cast<int>(status.code()));
  answer->set_text(std::string(status.message()));
  Tell(daemon, std::move(message));
}

void Job::OnMemberJoin(const std::string& from, const PeerMessage::MemberJoin& join) {
  const auto answer = [this, from, session = join.session()](const absl::Status& status) {
    AnswerMember(from, PeerMessage::MemberAnswer::JOIN, session, status);
  };
  if (follows()) return;  // it will have been told who coordinates
  Member* member = FindRemote(from, join.session());
  if (member == nullptr || !member->live()) {
    return answer(absl::FailedPreconditionError("this session is over; open a new one"));
  }
  if (failed_) return answer(absl::FailedPreconditionError(failure_));
  if (drained_) return answer(Draining());
  if (running_group_) {
    BreakGroup(absl::StrCat("rank ", member->rank, member->joined ? " joined anew" : " came back"));
  }
  member->join = [answer](absl::StatusOr<v1::JoinReply> reply) {
    if (!reply.ok()) answer(reply.status());  // else all are told at once
  };
  member->join_deadline = env_.now() + std::min(absl::Seconds(join.timeout_seconds()),
                                                absl::Seconds(running_.join_seconds()));
  TryForm();
}

void Job::TellFormed(const v1::JoinReply& reply) {
  PeerMessage message;
  *message.mutable_formed()->mutable_reply() = reply;
  message.mutable_formed()->set_world_size(world_size_);
  for (const std::string& daemon : span_->daemons) message.mutable_formed()->add_daemons(daemon);
  TellOthers(message);
  RetryEarly();
}

void Job::OnMemberEnd(const std::string& from, PeerMessage::MemberEnd* end) {
  const auto answer = [&](const absl::Status& status) {
    AnswerMember(from, PeerMessage::MemberAnswer::END_STEP, end->session(), status);
  };
  Member* member = FindRemote(from, end->session());
  if (member == nullptr || !member->live()) {
    return answer(absl::AbortedError("this session's group is over; Join again"));
  }
  if (failed_) return answer(absl::FailedPreconditionError(failure_));
  if (running_group_ && SomeRankHasClosed()) {
    finished_.clear();
    BreakGroup("a rank has closed and another goes on");
  }
  absl::Status status = CheckEndStep(*member, end->request());
  if (status.ok()) {
    AcceptEndStep(member, end->mutable_request());
  } else if (!absl::IsAborted(status)) {
    env_.counters->refused_calls += 1;
  }
  answer(status);
}

void Job::OnMemberGone(const std::string& from, const PeerMessage& header) {
  const PeerMessage::MemberGone& gone = header.member_gone();
  if (follows()) return;
  const uint64_t session = gone.session();
  Member* member = FindRemote(from, session);
  if (member == nullptr) {
    return AnswerMember(from, PeerMessage::MemberAnswer::CLOSE, session, absl::OkStatus());
  }
  // It may have closed before it learned of the decision that its EndStep led to.
  const bool amid_step =
      gone.amid_step() && running_group_ && header.step() == decider_.committed_step() + 1;
  member->published = amid_step ? 1 : 0;
  if (!amid_step) member->ended = false;
  Leave(member, gone.how());
  AnswerMember(from, PeerMessage::MemberAnswer::CLOSE, session, absl::OkStatus());
}

// The daemon of each rank of the group that is to form.
std::vector<std::string> Job::DaemonsOfRanks() {
  std::vector<std::string> daemons(world_size_, span_->self);
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    const Member* member = AtRank(rank);
    if (member != nullptr) {
      if (!member->local()) daemons[rank] = member->daemon;
    } else if (span_->daemons.size() == world_size_) {
      daemons[rank] = span_->daemons[rank];  // it has finished; its shard stays where it is
    }
  }
  return daemons;
}

}  // namespace shardd::step

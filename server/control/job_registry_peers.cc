// Jobs that several daemons share, as the registry sees them.
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/control/job_registry.h"
#include "server/control/job_spec.h"

namespace shardd::control {

namespace {

// How long a rank that would create a job waits for peers that are not reached.
constexpr absl::Duration kPatience = absl::Seconds(2);
constexpr absl::Duration kAskAgain = absl::Milliseconds(50);

}  // namespace

void JobRegistry::ShareWith(peer::Links* links) {
  links_ = links;
  finder_ = std::make_unique<JobFinder>(links);
}

void JobRegistry::OnPeerProcess(const std::string& peer) {
  for (const auto& job : Visible(0, true)) job->OnPeerProcess(peer);
}

void JobRegistry::OnPeerMessage(const std::string& peer, peer::Message message) {
  const v1::PeerMessage& header = message.header;
  if (header.has_find()) return AnswerFind(peer, header);
  if (header.has_found()) return finder_->OnFound(peer, header);
  const std::shared_ptr<step::Job> job = Lookup(header.job());
  if (job != nullptr) return job->OnPeerMessage(peer, std::move(message));
  if (header.has_unknown()) return;
  links_->counters()->messages += 1;
  peer::Message answer;
  answer.header.set_job(header.job());
  answer.header.set_job_id(header.job_id());
  answer.header.set_timeline(header.timeline());
  answer.header.mutable_unknown()->set_reason(
      absl::StrCat("daemon ", links_->self(), " has no job '", header.job(), "'"));
  links_->Send(peer, std::move(answer));
}

void JobRegistry::AnswerFind(const std::string& peer, const v1::PeerMessage& asked) {
  peer::Message answer;
  answer.header.set_job(asked.job());
  v1::PeerMessage::Found* found = answer.header.mutable_found();
  found->set_request(asked.find().request());
  if (const std::shared_ptr<step::Job> job = Lookup(asked.job())) {
    const v1::JobStatus status = job->Status();
    const contract::JobHeader* header = job->segments().header();
    answer.header.set_job_id(header->job_id, sizeof(header->job_id));
    answer.header.set_timeline(header->timeline);
    found->set_found(true);
    found->set_coordinator(status.coordinator());
    *found->mutable_config() = job->created_config();
    found->set_parameters(job->segments().job().at<char>(header->parameters_offset),
                          header->parameters_bytes);
    found->set_config_hash(header->config_hash);
    found->set_uid(header->uid);
    found->set_committed_step(status.committed_step());
  }
  links_->Send(peer, std::move(answer));
}

void JobRegistry::SearchPeers(const std::shared_ptr<step::Session>& session,
                              const std::shared_ptr<v1::OpenRequest>& request,
                              const OpenCallback& done, absl::Time begun) {
  finder_->Find(request->config().name(), kPatience, [=, this](std::optional<FoundJob> found) {
    tasks_.Post([=, this] { OnSearched(session, request, done, begun, found); });
  });
}

void JobRegistry::OnSearched(const std::shared_ptr<step::Session>& session,
                             const std::shared_ptr<v1::OpenRequest>& request,
                             const OpenCallback& done, absl::Time begun,
                             std::optional<FoundJob> found) {
  const std::string& name = request->config().name();
  // A peer that has not heard yet that the job was deleted here.
  if (found.has_value() && found->said.coordinator() == links_->self()) found.reset();
  const bool may_create = request->rank() == 0 && request->resume() != v1::RESUME_MUST;
  if (!found.has_value() && !may_create) {
    if (environment_.now() - begun > absl::Seconds(request->config().join_seconds())) {
      return done(absl::NotFoundError(
          absl::StrCat("no daemon has job '", name, "': not this one, nor ",
                       absl::StrJoin(links_->peers(), ", "),
                       request->resume() == v1::RESUME_MUST
                           ? "; check the name, or allow a fresh start (resume = auto)"
                           : "; the daemon of rank 0 creates it: look at that rank")));
    }
    return finder_->After(kAskAgain, [=, this] {
      tasks_.Post([=, this] { TryOpen(session, request, done, begun); });
    });
  }
  if (found.has_value()) {
    if (absl::Status status = CheckFound(*found, *request, *session); !status.ok()) {
      return done(status);
    }
    if (!links_->Knows(found->said.coordinator())) {
      return done(absl::FailedPreconditionError(
          absl::StrCat("job '", name, "' is coordinated by daemon '", found->said.coordinator(),
                       "', which is not among peer.peers of ", links_->self(), "; add it")));
    }
  }
  bool made_meanwhile = false;
  {
    std::lock_guard lock(mutex_);
    made_meanwhile = jobs_.contains(name) || busy_.contains(name);
    if (!made_meanwhile) busy_[name];
  }
  if (made_meanwhile) return TryOpen(session, request, done, begun);
  Make(session, request, done, found);
}

// The job that a peer has must be the one that is wanted.
absl::Status JobRegistry::CheckFound(const FoundJob& found, const v1::OpenRequest& request,
                                     const step::Session& session) const {
  const std::string& name = request.config().name();
  if (found.said.uid() != session.uid && session.uid != 0 && session.uid != geteuid()) {
    return absl::PermissionDeniedError(
        absl::StrCat("job '", name, "' belongs to another user; choose another name"));
  }
  if (request.resume() == v1::RESUME_NEVER && found.said.committed_step() > 0) {
    return absl::AlreadyExistsError(
        absl::StrCat("job '", name, "' exists at step ", found.said.committed_step(), " at daemon ",
                     found.said.coordinator(), "; delete it there, or resume it (resume = auto)"));
  }
  v1::OpenRequest there;
  if (found.job_id.size() != 16 || !there.ParseFromString(found.said.parameters())) {
    return absl::InternalError(absl::StrCat("a peer told nonsense of job '", name, "'"));
  }
  *there.mutable_config() = found.said.config();
  absl::StatusOr<contract::Layout> there_layout = MakeLayout(there);
  absl::StatusOr<contract::Layout> here_layout = MakeLayout(request);
  if (!there_layout.ok()) return there_layout.status();
  if (!here_layout.ok()) return here_layout.status();
  if (found.said.config().durability() == v1::peer) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job '", name, "' has durability = peer, and its journal is kept by daemon ",
        found.said.coordinator(),
        ": attach its ranks there, or start it with durability = node to span daemons"));
  }
  if (found.said.config().durability() == v1::node && journals_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job '", name, "' has durability = node, and daemon ", links_->self(),
        " has no journal: give it a journal.directory, or start the job with durability = "
        "process"));
  }
  std::vector<std::string> lines = ConfigDifferences(found.said.config(), request.config());
  for (std::string& line : LayoutDifferences(*there_layout, *here_layout)) {
    lines.push_back(std::move(line));
  }
  if (lines.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("job '", name, "' exists at daemon ", found.said.coordinator(),
                   " with another configuration: ", absl::StrJoin(lines, "; "),
                   ". Start it as it was, delete it, or choose another name"));
}

std::unique_ptr<step::Span> JobRegistry::MakeSpanAlone(const store::JobSegments& segments,
                                                       uint64_t num_chunks,
                                                       const v1::JobPeers* peers,
                                                       env::BudgetLease* lease,
                                                       absl::Status* status) const {
  if (links_ == nullptr) return nullptr;
  v1::JobPeers alone;
  alone.set_coordinator(links_->self());
  if (num_chunks > 0) {
    auto* all = alone.add_owners();
    all->set_chunks(num_chunks);
    all->set_daemon(links_->self());
  }
  std::unique_ptr<step::Span> span =
      MakeSpan(peers != nullptr ? *peers : alone, num_chunks, status);
  const uint64_t total = segments.plan().total();
  lease->ShrinkTo(total - std::min(total, segments.ChunkBytes(num_chunks)));
  return span;
}

std::unique_ptr<step::Span> JobRegistry::MakeSpan(const v1::JobPeers& peers, uint64_t num_chunks,
                                                  absl::Status* status) const {
  if (!status->ok()) return nullptr;
  auto span = std::make_unique<step::Span>();
  span->links = links_;
  span->budget = budget_;
  span->self = links_->self();
  span->coordinator = peers.coordinator();
  span->epoch = std::max<uint64_t>(peers.epoch(), 1);
  span->owners_version = peers.owners_version();
  absl::StatusOr<step::Placement> placement =
      step::Placement::FromProto(peers.owners(), num_chunks);
  *status = placement.status();
  if (!status->ok()) return nullptr;
  span->placement = *std::move(placement);
  return span;
}

}  // namespace shardd::control

// Jobs with durability = peer: their mirrors, and how they come back when the disk is lost too.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/control/job_registry.h"
#include "server/journal/manifest.h"

namespace shardd::control {

namespace {

constexpr absl::Duration kLookAgain = absl::Milliseconds(50);
// How long a job is waited for that is not wanted with durability = peer.
constexpr absl::Duration kPatience = absl::Seconds(2);

}  // namespace

void JobRegistry::UseMirrors(peer::Mirrors* mirrors) { mirrors_ = mirrors; }

bool JobRegistry::HasMirrors() const { return mirrors_ != nullptr && !mirrors_->peer().empty(); }

absl::Status JobRegistry::CheckMirror(const v1::JobConfig& config) const {
  if (config.durability() != v1::peer || HasMirrors()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "durability is peer, which this daemon does not offer: it has no peers; give it peer.name, "
      "peer.peers and certificates (docs/cluster.md), or give durability = node");
}

absl::Status JobRegistry::DeleteMirror(const std::string& name) {
  if (!HasMirrors() || !journals_->Holds(name)) return absl::OkStatus();
  absl::StatusOr<journal::Manifest> manifest =
      journal::ReadManifest(environment_.files, journals_->JobPath(name));
  return mirrors_->Delete(name, manifest.ok() ? manifest->job.job_tag : 0);
}

void JobRegistry::OnMirrorList(v1::PeerMessage::MirrorList list) {
  tasks_.Post([this, list = std::move(list)] { TakeMirrored(list); });
}

void JobRegistry::TakeMirrored(const v1::PeerMessage::MirrorList& list) {
  for (const v1::PeerMessage::MirroredJob& job : list.jobs()) {
    const std::string& name = job.job();
    const std::shared_ptr<step::Job> here = Lookup(name);
    if (here != nullptr && here->segments().job_tag() != job.tag()) {
      environment_.log(absl::StrCat("peer ", mirrors_->peer(), " mirrors another job '", name,
                                    "' than the one that is here; it is left there"));
    }
    if (mirrors_->Deleting(name, job.tag()) || directory_->Holds(name) || journals_->Holds(name)) {
      continue;
    }
    std::lock_guard lock(mutex_);
    if (jobs_.contains(name) || spilled_.contains(name)) continue;
    if (const auto busy = busy_.find(name); busy != busy_.end()) {
      v1::PeerMessage::MirrorList again;
      *again.add_jobs() = job;
      busy->second.push_back([this, again] { TakeMirrored(again); });
      continue;
    }
    busy_[name];
    heavy_.Post([this, job] { FetchMirrored(job); });
  }
  std::lock_guard lock(mutex_);
  mirror_listed_ = true;
}

// The name is busy.
void JobRegistry::FetchMirrored(const v1::PeerMessage::MirroredJob& job) {
  const std::string& name = job.job();
  const absl::Status fetched = mirrors_->Fetch(job);
  if (fetched.ok()) {
    Recover(name, false);
    if (Lookup(name) == nullptr && !journals_->Holds(name)) {
      // It never came to a first step, and was given back.
      const absl::Status deleted = mirrors_->Delete(name, job.tag());
      if (!deleted.ok()) environment_.log(std::string(deleted.message()));
    }
  } else {
    environment_.log(absl::StrCat("job ", name, " is mirrored by peer ", mirrors_->peer(),
                                  " and cannot be fetched: ", fetched.message()));
  }
  {
    std::lock_guard lock(mutex_);
    if (fetched.ok()) {
      unfetched_.erase(name);
    } else {
      unfetched_[name] = std::string(fetched.message());
    }
  }
  for (auto& task : EndBusy(name, nullptr)) tasks_.Post(std::move(task));
}

// A job that is not here may be mirrored by the peer. True: `done` is told, or the request waits.
bool JobRegistry::AwaitMirrors(const std::shared_ptr<step::Session>& session,
                               const std::shared_ptr<v1::OpenRequest>& request,
                               const OpenCallback& done, absl::Time begun) {
  if (!HasMirrors()) return false;
  const std::string& name = request->config().name();
  std::string why;
  {
    std::lock_guard lock(mutex_);
    if (const auto it = unfetched_.find(name); it != unfetched_.end()) {
      why = it->second;
      unfetched_.erase(it);
    } else if (mirror_listed_) {
      return false;
    }
  }
  if (!why.empty()) {
    mirrors_->AskList();
    done(absl::UnavailableError(absl::StrCat("job '", name, "' is mirrored by peer ",
                                             mirrors_->peer(), " and cannot be fetched: ", why,
                                             "; it is tried again now")));
    return true;
  }
  absl::Duration wait = absl::Seconds(journal_config_.mirror_fetch_seconds());
  if (request->config().durability() != v1::peer) wait = std::min(wait, kPatience);
  if (environment_.now() - begun < wait) {
    finder_->After(kLookAgain, [=, this] {
      tasks_.Post([=, this] { TryOpen(session, request, done, begun); });
    });
    return true;
  }
  if (request->config().durability() != v1::peer) return false;
  done(absl::UnavailableError(absl::StrCat(
      "there is no job '", name, "' here, and peer ", mirrors_->peer(),
      ", which may mirror it, is not reached; start its daemon, or give durability = node to begin "
      "a new job without it")));
  return true;
}

}  // namespace shardd::control

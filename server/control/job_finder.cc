#include "server/control/job_finder.h"

#include <pthread.h>

#include "absl/time/clock.h"

namespace shardd::control {

JobFinder::JobFinder(peer::Links* links) : links_(links), thread_([this] { Main(); }) {}

JobFinder::~JobFinder() { Stop(); }

void JobFinder::Stop() {
  {
    std::lock_guard lock(mutex_);
    if (stop_) return;
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
  std::map<uint64_t, Search> searches;
  std::multimap<absl::Time, std::function<void()>> tasks;
  std::lock_guard lock(mutex_);
  searches.swap(searches_);
  tasks.swap(tasks_);
}

void JobFinder::Find(const std::string& job, absl::Duration patience, Callback done) {
  uint64_t request = 0;
  const std::vector<std::string> peers = links_->peers();
  {
    std::lock_guard lock(mutex_);
    if (stop_) return;
    request = next_request_++;
    searches_[request] = {{peers.begin(), peers.end()}, std::move(done)};
  }
  for (const std::string& peer : peers) {
    peer::Message message;
    message.header.set_job(job);
    message.header.mutable_find()->set_request(request);
    links_->Send(peer, std::move(message));
  }
  After(patience, [this, request] { GiveUp(request); });
}

void JobFinder::GiveUp(uint64_t request) {
  Callback done;
  {
    std::lock_guard lock(mutex_);
    const auto it = searches_.find(request);
    if (it == searches_.end()) return;
    done = std::move(it->second.done);
    searches_.erase(it);
  }
  done(std::nullopt);
}

void JobFinder::OnFound(const std::string& peer, const v1::PeerMessage& message) {
  Callback done;
  std::optional<FoundJob> found;
  {
    std::lock_guard lock(mutex_);
    const auto it = searches_.find(message.found().request());
    if (it == searches_.end()) return;
    it->second.silent.erase(peer);
    if (message.found().found()) {
      found = FoundJob{message.found(), message.job_id(), message.timeline()};
    } else if (!it->second.silent.empty()) {
      return;
    }
    done = std::move(it->second.done);
    searches_.erase(it);
  }
  done(std::move(found));
}

void JobFinder::After(absl::Duration wait, std::function<void()> task) {
  std::lock_guard lock(mutex_);
  tasks_.emplace(absl::Now() + wait, std::move(task));
  changed_.notify_all();
}

void JobFinder::Main() {
  pthread_setname_np(pthread_self(), "shardd-finder");
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (tasks_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const absl::Time next = tasks_.begin()->first;
    if (absl::Now() < next) {
      changed_.wait_until(lock, absl::ToChronoTime(next));
      continue;
    }
    const std::function<void()> task = std::move(tasks_.begin()->second);
    tasks_.erase(tasks_.begin());
    lock.unlock();
    task();
    lock.lock();
  }
}

}  // namespace shardd::control

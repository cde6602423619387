#include "client/python/native/verb_queue.h"

#include <signal.h>

#include <chrono>
#include <utility>

namespace shardd::python {

VerbQueue::VerbQueue() {
  // Signals are the interpreter's: its main thread is to be woken by them, not this one.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

VerbQueue::~VerbQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

uint64_t VerbQueue::Add(Verb verb) {
  std::lock_guard<std::mutex> lock(mutex_);
  verbs_.push_back(std::move(verb));
  changed_.notify_all();
  return ++added_;
}

uint64_t VerbQueue::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

bool VerbQueue::WaitDone(uint64_t number, absl::Duration timeout) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                           [&] { return done_ >= number; });
}

void VerbQueue::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopped_ || !verbs_.empty(); });
    if (verbs_.empty()) return;
    const Verb verb = std::move(verbs_.front());
    verbs_.pop_front();
    lock.unlock();
    verb();
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

}  // namespace shardd::python

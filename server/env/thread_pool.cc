#include "server/env/thread_pool.h"

#include <algorithm>

namespace shardd::env {

// `next` and `running` are under the pool's mutex: an index is worth tens of
// microseconds, so the lock is not felt, and std::mutex is seen by ThreadSanitizer.
struct ThreadPool::Loop {
  const std::function<void(size_t)>* fn;
  size_t count;
  size_t next = 0;
  size_t running = 0;
  std::condition_variable done;
};

ThreadPool::ThreadPool(size_t threads, std::function<void()> on_start)
    : on_start_(std::move(on_start)) {
  for (size_t i = 1; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Work() {
  if (on_start_) on_start_();
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || !loops_.empty(); });
    if (stop_) return;
    std::shared_ptr<Loop> loop = loops_.front();
    const size_t i = loop->next++;
    ++loop->running;
    if (loop->next == loop->count) loops_.pop_front();
    lock.unlock();
    (*loop->fn)(i);
    lock.lock();
    if (--loop->running == 0 && loop->next == loop->count) loop->done.notify_one();
  }
}

void ThreadPool::ParallelFor(size_t count, const std::function<void(size_t)>& fn) {
  if (count == 0) return;
  if (count == 1 || threads_.empty()) {
    for (size_t i = 0; i < count; ++i) fn(i);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->fn = &fn;
  loop->count = count;
  std::unique_lock lock(mutex_);
  loops_.push_back(loop);
  work_.notify_all();
  while (loop->next < loop->count) {
    const size_t i = loop->next++;
    ++loop->running;
    if (loop->next == loop->count) loops_.erase(std::find(loops_.begin(), loops_.end(), loop));
    lock.unlock();
    fn(i);
    lock.lock();
    --loop->running;
  }
  loop->done.wait(lock, [&] { return loop->running == 0; });
}

}  // namespace shardd::env

// The threads that reduce and update, shared by all jobs.
#ifndef SHARDD_SERVER_ENV_THREAD_POOL_H_
#define SHARDD_SERVER_ENV_THREAD_POOL_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace shardd::env {

// Thread-safe: several callers' loops run side by side.
class ThreadPool {
 public:
  // `threads` counts the caller of ParallelFor: threads - 1 are started.
  // `on_start` runs once in each of them.
  ThreadPool(size_t threads, std::function<void()> on_start);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t threads() const { return threads_.size() + 1; }

  // Calls fn(i) for i in [0, count), lower ones started first, on the caller and idle threads;
  // returns when all have returned. fn may not throw, and may not call ParallelFor.
  void ParallelFor(size_t count, const std::function<void(size_t)>& fn);

 private:
  struct Loop;
  void Work();

  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::shared_ptr<Loop>> loops_;  // that still have indices to start
  bool stop_ = false;
  std::function<void()> on_start_;
  std::vector<std::thread> threads_;
};

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_THREAD_POOL_H_

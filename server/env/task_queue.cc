#include "server/env/task_queue.h"

namespace shardd::env {

TaskQueue::TaskQueue(size_t threads) {
  for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

TaskQueue::~TaskQueue() { Stop(); }

void TaskQueue::Post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stop_) return;
    tasks_.push_back(std::move(task));
  }
  work_.notify_one();
}

void TaskQueue::Stop() {
  std::deque<std::function<void()>> dropped;  // destroyed without the lock
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    dropped.swap(tasks_);
  }
  work_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void TaskQueue::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
    if (stop_) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace shardd::env

// A few threads for work that takes long and must not hold up an RPC thread.
#ifndef SHARDD_SERVER_ENV_TASK_QUEUE_H_
#define SHARDD_SERVER_ENV_TASK_QUEUE_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace shardd::env {

// Thread-safe. With one thread, tasks run one after the other in order.
class TaskQueue {
 public:
  explicit TaskQueue(size_t threads);
  // Finishes the running tasks and drops the waiting ones.
  ~TaskQueue();
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  void Post(std::function<void()> task);
  // What the destructor does. Later Posts are dropped.
  void Stop();

 private:
  void Work();

  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_TASK_QUEUE_H_

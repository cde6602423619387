// A thread that does a session's verbs in the order in which they were asked for, so that
// gradients leave while backward goes on and nothing that blocks holds the interpreter.
#ifndef SHARDD_CLIENT_PYTHON_NATIVE_VERB_QUEUE_H_
#define SHARDD_CLIENT_PYTHON_NATIVE_VERB_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "absl/time/time.h"

namespace shardd::python {

// Thread-safe.
class VerbQueue {
 public:
  using Verb = std::function<void()>;

  VerbQueue();
  // Waits for all verbs.
  ~VerbQueue();

  // Returns the verb's number; numbers ascend from 1.
  uint64_t Add(Verb verb);
  uint64_t done() const;  // verbs up to this number are over
  // Whether the verb is over within `timeout`.
  bool WaitDone(uint64_t number, absl::Duration timeout) const;

 private:
  void Run();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Verb> verbs_;  // that have not begun
  uint64_t added_ = 0;
  uint64_t done_ = 0;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_NATIVE_VERB_QUEUE_H_

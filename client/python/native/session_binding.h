// A session of the C++ client as the package's Python code uses it.
//
// Memory is handed over as addresses (a tensor's data_ptr()), so that this needs no PyTorch to
// build: the caller keeps it alive and as large as it says until the verb is over.
#ifndef SHARDD_CLIENT_PYTHON_NATIVE_SESSION_BINDING_H_
#define SHARDD_CLIENT_PYTHON_NATIVE_SESSION_BINDING_H_

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "client/python/native/verb_queue.h"

namespace shardd::python {

// A parameter's memory on the Python side.
struct Memory {
  size_t parameter = 0;
  uint64_t address = 0;
  uint64_t bytes = 0;
};

// What EndStep came to.
struct StepOutcome {
  // The parameter whose memory was not what the job's weights are, before the step was ended: it
  // then was not. -1: none.
  int64_t changed = -1;
  absl::Status status;
  Decision decision;
};

// Python's lock is held by every caller of these. Whatever may block is done on the queue's
// thread without it, and is waited for in a way that lets signals through: a wait that ends
// with KeyboardInterrupt leaves the verb running.
class SessionBinding {
 public:
  // `job` is the JSON of proto/job_config.proto.
  SessionBinding(const pybind11::dict& options, const std::string& job,
                 const pybind11::list& parameters, const pybind11::list& frozen);
  // Without Close it is the death of this rank. In a forked child nothing is touched.
  ~SessionBinding();

  Session& session() const;
  pybind11::list TakeLog();  // lines for people

  void Upload(size_t parameter, uint64_t address, uint64_t elements);
  void UploadMoment(uint32_t moment, size_t parameter, uint64_t address, uint64_t elements,
                    uint64_t applied);
  void UploadFrozen(size_t index, uint64_t address, uint64_t bytes);
  void FinishUpload();

  // Hands a gradient over; does not wait. `bytes` of the job's grad_dtype. An error is kept for
  // EndStep; after one, gradients are dropped. Returns the verb's number.
  uint64_t SendGradient(size_t parameter, uint32_t slot, uint64_t address, uint64_t bytes);
  uint64_t done() const { return live().queue.done(); }
  void Wait(uint64_t verb);
  // The first error of the gradients of this step, which it forgets; it is raised.
  void CheckGradients();
  bool failed() const;  // CheckGradients would raise
  void Rejoin();

  // Compares `compare` with the weights of the step, ends it, waits for the decision, and then
  // copies the new weights to `fetch`, in that order. Waits if `wait`; a call with wait=False, or
  // one that was interrupted, is to be followed by FinishStep.
  pybind11::object EndStep(const pybind11::dict& report, const pybind11::list& compare,
                           const pybind11::list& fetch);
  pybind11::object FinishStep();
  bool ending() const { return live().ending != nullptr; }

  void Fetch(const pybind11::list& fetch);
  // The same without waiting; an error is kept as one of a gradient is. Returns the verb's number.
  uint64_t StartFetch(const pybind11::list& fetch);
  // Weights that are gathered, as bytes that are read and written in place. Valid until the
  // session is closed; at stage 3 with private weights they hold something only between Gather
  // and Release.
  pybind11::memoryview Weights(size_t parameter);
  uint64_t Gather(std::vector<size_t> parameters);   // does not wait
  uint64_t Release(std::vector<size_t> parameters);  // does not wait

  void ReadState(uint32_t kind, size_t parameter, uint64_t address, uint64_t elements);
  uint64_t ParameterApplied(size_t parameter);
  pybind11::list StepRecords(uint64_t first_step);
  pybind11::tuple SaveCheckpoint(uint32_t keep, bool wait);
  // False: it did not end in time, as when the daemon is gone; it is then given up.
  bool Close(double seconds_if_gone);
  void DeleteJob();

 private:
  // Shared with the verbs that run, so that one that never ends can be left behind.
  struct Live {
    std::unique_ptr<Session> session;
    std::mutex mutex;
    std::vector<std::string> log;         // under mutex
    absl::Status gradients;               // under mutex: the first error
    std::atomic<bool> spoke = false;      // something was logged
    size_t element_bytes = 0;             // of a weight
    std::shared_ptr<StepOutcome> ending;  // of an EndStep that was not seen to its end
    uint64_t ending_verb = 0;
    VerbQueue queue;  // last: its thread uses what is above
  };
  Live& live() const;
  // Runs `verb` on the queue and waits for it; raises its error.
  void Run(std::function<absl::Status(Session*)> verb);
  void Await(uint64_t verb);
  void LeaveBehind();

  std::shared_ptr<Live> live_;
  const pid_t pid_ = getpid();
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_NATIVE_SESSION_BINDING_H_

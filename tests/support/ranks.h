// Ranks of a small job as threads of the test's process, through the public client.
#ifndef SHARDD_TESTS_SUPPORT_RANKS_H_
#define SHARDD_TESTS_SUPPORT_RANKS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"

namespace shardd::test {

// fp32 everywhere, chunks of 4096 elements, short deadlines, one group whose exp_avg
// after the first step is the gradient itself (beta1 = 0).
JobOptions SmallJob(const std::string& name, uint32_t slots);

SessionOptions RankOptions(const std::string& socket, uint32_t rank, uint32_t world_size);

// Opens rank `rank`, uploads its share of zeros (or of `initial`) and finishes the upload.
// Aborts the process when something fails: a case about failures opens for itself.
std::unique_ptr<Session> OpenRank(const std::string& socket, uint32_t rank, uint32_t world_size,
                                  const JobOptions& job,
                                  const std::vector<ParameterSpec>& parameters,
                                  float initial = 0.0f);

// Runs fn(rank) on world_size threads and waits for all.
void ForEachRank(uint32_t world_size, const std::function<void(uint32_t rank)>& fn);

// Writes `value(parameter, element)` as the gradient of one slot, in the job's dtype.
using GradFunction = std::function<float(size_t parameter, uint64_t element)>;
absl::Status GiveGrad(Session* session, DType dtype, size_t parameter, uint32_t slot,
                      const GradFunction& value);

// One whole step: gradients of all parameters in all slots of the rank, last
// parameter first, then EndStep and WaitDecision.
absl::StatusOr<Decision> TakeStep(
    Session* session, DType dtype,
    const std::function<float(uint32_t slot, size_t parameter, uint64_t element)>& value,
    StepReport report = {});

// All of a parameter's state.
std::vector<float> ReadAll(Session* session, StateKind kind, size_t parameter);

// A float of `dtype` as the client stores it, and back.
void StoreAs(DType dtype, float value, void* out);
float LoadAs(DType dtype, const void* in);

}  // namespace shardd::test

#endif  // SHARDD_TESTS_SUPPORT_RANKS_H_

// What a trainer computes with. Shared: the daemon's segment itself. Private: what a
// GPU would hold; a full copy, or at stage 3 the own shard and the parameters that
// are gathered, in memory named "shardd-weights".
#ifndef SHARDD_CLIENT_WEIGHTS_VIEW_H_
#define SHARDD_CLIENT_WEIGHTS_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/dtype.h"
#include "proto/contract/layout.h"

namespace shardd {

// The daemon's weights as they become ready.
struct WeightsSource {
  const std::byte* weights = nullptr;  // [flat_elements] of dtype
  kernels::DType dtype = kernels::DType::kBFloat16;
  // The step whose update a bucket's weights carry.
  std::function<uint64_t(uint64_t bucket)> ready_step;
  // Waits until the predicate holds; it is asked again when ready steps have moved. An
  // error ends the wait and is what the calling verb returns.
  std::function<absl::Status(absl::FunctionRef<bool()>)> wait;
};

// Threads: Wait of different parameters may run in parallel, all else by one thread.
class WeightsView {
 public:
  virtual ~WeightsView() = default;
  // The parameter's [elements] of dtype that carry `step`, once they are there.
  virtual absl::StatusOr<const void*> Wait(size_t parameter, uint64_t step) = 0;
  virtual absl::Status Gather(std::span<const size_t> parameters, uint64_t step) = 0;
  virtual void Release(std::span<const size_t> parameters) = 0;
  // The daemon's weights are at another address from now on, and whatever was copied from the old
  // one is copied again before it is next handed out. Memory of this process stays.
  virtual void Rebase(const std::byte* weights) = 0;
};

// `layout` outlives the view.
std::unique_ptr<WeightsView> MakeSharedWeights(const contract::Layout& layout,
                                               WeightsSource source);
absl::StatusOr<std::unique_ptr<WeightsView>> MakePrivateWeights(const contract::Layout& layout,
                                                                WeightsSource source);
// Stage 3. `shard`: the elements of this rank.
absl::StatusOr<std::unique_ptr<WeightsView>> MakeShardedWeights(const contract::Layout& layout,
                                                                WeightsSource source,
                                                                contract::Range shard);

}  // namespace shardd

#endif  // SHARDD_CLIENT_WEIGHTS_VIEW_H_

#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/scalar_lane.h"
#include "kernels/targets.h"

#define SHARDD_LANE_FUNCTION inline

namespace shardd::kernels::scalar {

#include "kernels/reduce-inl.h"

void ReduceElements(const ReducePlan& plan, std::span<const ReduceInput> inputs, size_t count,
                    void* out, DType out_dtype, BlockStats* stats, ReduceWorkspace* workspace) {
  ReduceBlocks<ScalarLane, false>(plan, inputs, count, out, out_dtype, stats, workspace);
}

void AddElements(const ReduceInput& a, const ReduceInput& b, size_t count, float* out) {
  AddLoop<ScalarLane>(a, b, count, out);
}

}  // namespace shardd::kernels::scalar

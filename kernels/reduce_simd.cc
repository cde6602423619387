// The slot-tree reduction on Highway vectors.
#include "kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/reduce_simd.cc"
#include "hwy/foreach_target.h"  // includes this file once for each target

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/float_bits.h"
#include "kernels/targets.h"

#undef SHARDD_LANE_FUNCTION
#define SHARDD_LANE_FUNCTION HWY_INLINE

HWY_BEFORE_NAMESPACE();
namespace shardd::kernels::HWY_NAMESPACE {

#include "kernels/simd_lane-inl.h"

#include "kernels/reduce-inl.h"

void ReduceElements(const ReducePlan& plan, std::span<const ReduceInput> inputs, size_t count,
                    void* out, DType out_dtype, BlockStats* stats, ReduceWorkspace* workspace) {
  if (out_dtype == DType::kFloat32 && reinterpret_cast<uintptr_t>(out) % 64 == 0) {
    ReduceBlocks<SimdEvenOddLane, true>(plan, inputs, count, out, out_dtype, stats, workspace);
    hwy::FlushStream();
  } else {
    ReduceBlocks<SimdEvenOddLane, false>(plan, inputs, count, out, out_dtype, stats, workspace);
  }
}

void AddElements(const ReduceInput& a, const ReduceInput& b, size_t count, float* out) {
  AddLoop<SimdEvenOddLane>(a, b, count, out);
}

}  // namespace shardd::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

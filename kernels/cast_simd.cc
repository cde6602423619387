// The casts on Highway vectors.
#include "kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cast_simd.cc"
#include "hwy/foreach_target.h"  // includes this file once for each target

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include <cstring>

#include "kernels/float_bits.h"
#include "kernels/targets.h"

#undef SHARDD_LANE_FUNCTION
#define SHARDD_LANE_FUNCTION HWY_INLINE

HWY_BEFORE_NAMESPACE();
namespace shardd::kernels::HWY_NAMESPACE {

#include "kernels/simd_lane-inl.h"

#include "kernels/cast-inl.h"

void MasterToWeightElements(const float* master, size_t count, void* weight, DType dtype) {
  CastAny<SimdLane, WeightCast>(master, count, weight, dtype);
}

void Fp32ToGradElements(const float* in, size_t count, void* out, DType dtype) {
  CastAny<SimdLane, GradCast>(in, count, out, dtype);
}

void ToFp32Elements(const void* in, DType dtype, size_t count, float* out) {
  CastAny<SimdLane, WideningCast>(in, count, out, dtype);
}

}  // namespace shardd::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

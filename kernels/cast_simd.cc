// The casts on Highway vectors.
#include "kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cast_simd.cc"
#include "hwy/foreach_target.h"  // includes this file once for each target

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include <cstring>

#include "kernels/float_bits.h"
#include "kernels/rounding.h"
#include "kernels/targets.h"

#undef SHARDD_LANE_FUNCTION
#define SHARDD_LANE_FUNCTION HWY_INLINE

HWY_BEFORE_NAMESPACE();
namespace shardd::kernels::HWY_NAMESPACE {

#include "kernels/simd_lane-inl.h"

#include "kernels/cast-inl.h"
#include "kernels/rounding-inl.h"
#include "kernels/split_master-inl.h"

void MasterToWeightElements(const float* master, size_t count, void* weight, DType dtype) {
  CastAny<SimdLane, WeightCast>(master, count, weight, dtype);
}

void Fp32ToGradElements(const float* in, size_t count, void* out, DType dtype) {
  CastAny<SimdLane, GradCast>(in, count, out, dtype);
}

void ToFp32Elements(const void* in, DType dtype, size_t count, float* out) {
  CastAny<SimdLane, WideningCast>(in, count, out, dtype);
}

void SplitMasterElements(const float* master, size_t count, uint16_t* weights, uint16_t* low) {
  SplitLoop<SimdLane>(master, count, weights, low);
}

void StochasticElements(const float* in, size_t count, uint64_t block_key, uint32_t first,
                        uint16_t* out) {
  StochasticLoop<SimdLane>(in, count, block_key, first, out);
}

void JoinMasterElements(const uint16_t* weights, const uint16_t* low, size_t count, float* master) {
  JoinLoop<SimdLane>(weights, low, count, master);
}

}  // namespace shardd::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

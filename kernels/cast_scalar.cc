#include <cstring>

#include "kernels/scalar_lane.h"
#include "kernels/targets.h"

#define SHARDD_LANE_FUNCTION inline

namespace shardd::kernels::scalar {

#include "kernels/cast-inl.h"
#include "kernels/rounding-inl.h"
#include "kernels/split_master-inl.h"

void MasterToWeightElements(const float* master, size_t count, void* weight, DType dtype) {
  CastAny<ScalarLane, WeightCast>(master, count, weight, dtype);
}

void Fp32ToGradElements(const float* in, size_t count, void* out, DType dtype) {
  CastAny<ScalarLane, GradCast>(in, count, out, dtype);
}

void ToFp32Elements(const void* in, DType dtype, size_t count, float* out) {
  CastAny<ScalarLane, WideningCast>(in, count, out, dtype);
}

void SplitMasterElements(const float* master, size_t count, uint16_t* weights, uint16_t* low) {
  SplitLoop<ScalarLane>(master, count, weights, low);
}

void StochasticElements(const float* in, size_t count, uint64_t block_key, uint32_t first,
                        uint16_t* out) {
  StochasticLoop<ScalarLane>(in, count, block_key, first, out);
}

void JoinMasterElements(const uint16_t* weights, const uint16_t* low, size_t count, float* master) {
  JoinLoop<ScalarLane>(weights, low, count, master);
}

}  // namespace shardd::kernels::scalar

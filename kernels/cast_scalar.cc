#include <cstring>

#include "kernels/scalar_lane.h"
#include "kernels/targets.h"

#define SHARDD_LANE_FUNCTION inline

namespace shardd::kernels::scalar {

#include "kernels/cast-inl.h"

void MasterToWeightElements(const float* master, size_t count, void* weight, DType dtype) {
  CastAny<ScalarLane, WeightCast>(master, count, weight, dtype);
}

void Fp32ToGradElements(const float* in, size_t count, void* out, DType dtype) {
  CastAny<ScalarLane, GradCast>(in, count, out, dtype);
}

void ToFp32Elements(const void* in, DType dtype, size_t count, float* out) {
  CastAny<ScalarLane, WideningCast>(in, count, out, dtype);
}

}  // namespace shardd::kernels::scalar

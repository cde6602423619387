// The formulas of adam-inl.h on Highway vectors.
#include "kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/update_adam_simd.cc"
#include "hwy/foreach_target.h"  // includes this file once for each target

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include <cstring>

#include "kernels/float_bits.h"
#include "kernels/targets.h"
#include "kernels/undo_cursor.h"

#undef SHARDD_LANE_FUNCTION
#define SHARDD_LANE_FUNCTION HWY_INLINE

HWY_BEFORE_NAMESPACE();
namespace shardd::kernels::HWY_NAMESPACE {

#include "kernels/simd_lane-inl.h"

#include "kernels/adam-inl.h"
#include "kernels/update_loop-inl.h"

#undef SHARDD_DEFINE_UPDATE
#define SHARDD_DEFINE_UPDATE(Name)                              \
  void Update##Name(const UpdateRun& run) {                     \
    UpdateLoop<SimdQuadLane, Name##Formula<SimdQuadLane>>(run); \
  }
SHARDD_FOR_EACH_ADAM_FORMULA(SHARDD_DEFINE_UPDATE)

}  // namespace shardd::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

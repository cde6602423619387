// The formulas of adam-inl.h on single values: the reference for every other target.
#include <cstring>

#include "kernels/scalar_lane.h"
#include "kernels/targets.h"
#include "kernels/undo_cursor.h"

#define SHARDD_LANE_FUNCTION inline

namespace shardd::kernels::scalar {

#include "kernels/adam-inl.h"
#include "kernels/update_loop-inl.h"

#define SHARDD_DEFINE_UPDATE(Name)                          \
  void Update##Name(const UpdateRun& run) {                 \
    UpdateLoop<ScalarLane, Name##Formula<ScalarLane>>(run); \
  }
SHARDD_FOR_EACH_ADAM_FORMULA(SHARDD_DEFINE_UPDATE)

}  // namespace shardd::kernels::scalar

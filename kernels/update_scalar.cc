// The optimizers on single values: the reference for every other target.
#include <cstring>

#include "kernels/scalar_lane.h"
#include "kernels/targets.h"
#include "kernels/undo_cursor.h"

#define SHARDD_LANE_FUNCTION inline

namespace shardd::kernels::scalar {

#include "kernels/adamw-inl.h"
#include "kernels/update_loop-inl.h"

void UpdateAdamW(const UpdateRun& run) { UpdateLoop<ScalarLane, AdamWFormula<ScalarLane>>(run); }

}  // namespace shardd::kernels::scalar

// The loss-scale rule (docs/numerics.md, "Semantics"): part of each decision.
#ifndef SHARDD_SERVER_STEP_LOSS_SCALER_H_
#define SHARDD_SERVER_STEP_LOSS_SCALER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "proto/job_config.pb.h"

namespace shardd::step {

// What is recorded with each decision.
struct LossScaleState {
  double scale = 1.0;
  uint32_t clean_steps = 0;
  uint32_t hysteresis_left = 0;
  bool operator==(const LossScaleState&) const = default;
};

LossScaleState InitialLossScale(const v1::LossScale& rule);

// The state after a step that did or did not overflow. FailedPrecondition: an
// overflow with the scale at its floor, which ends the job; *state is unchanged.
absl::Status AdvanceLossScale(const v1::LossScale& rule, bool overflow, LossScaleState* state);

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_LOSS_SCALER_H_

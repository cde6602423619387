#include "server/step/loss_scaler.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardd::step {

LossScaleState InitialLossScale(const v1::LossScale& rule) {
  return {rule.initial(), 0, rule.hysteresis()};
}

absl::Status AdvanceLossScale(const v1::LossScale& rule, bool overflow, LossScaleState* state) {
  if (!rule.dynamic()) return absl::OkStatus();
  if (!overflow) {
    if (++state->clean_steps >= rule.growth_interval()) {
      // Beyond 2^24 a larger scale gains nothing in fp16 and can overflow the fp32 sum.
      state->scale = std::min(state->scale * 2, 16777216.0);
      state->clean_steps = 0;
      state->hysteresis_left = rule.hysteresis();
    }
    return absl::OkStatus();
  }
  state->clean_steps = 0;
  if (state->hysteresis_left > 1) {
    --state->hysteresis_left;
    return absl::OkStatus();
  }
  if (state->scale <= rule.floor()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the gradients overflow with the loss scale at its floor of ", rule.floor(),
                     "; lower the learning rate, clip, or train in bf16"));
  }
  state->scale = std::max(state->scale / 2, rule.floor());
  return absl::OkStatus();
}

}  // namespace shardd::step

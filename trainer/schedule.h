// Learning rate schedules.
#ifndef SHARDD_TRAINER_SCHEDULE_H_
#define SHARDD_TRAINER_SCHEDULE_H_

#include <cstdint>
#include <optional>
#include <string_view>

namespace shardd::trainer {

enum class ScheduleKind { kConstant, kCosine, kLinear };

std::optional<ScheduleKind> ParseScheduleKind(std::string_view name);

// Warms up linearly over the first `warmup` steps, then stays, or falls by half a
// cosine or a line to `final_fraction` of the peak at step `steps`.
struct Schedule {
  ScheduleKind kind = ScheduleKind::kCosine;
  double peak = 3e-3;
  double final_fraction = 0.1;
  uint64_t warmup = 0;
  uint64_t steps = 1;

  // The rate of step 1, 2, ...; rounded to fp32, in which the optimizer uses it.
  double At(uint64_t step) const;
};

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_SCHEDULE_H_

#include "trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace shardd::trainer {

std::optional<ScheduleKind> ParseScheduleKind(std::string_view name) {
  if (name == "constant") return ScheduleKind::kConstant;
  if (name == "cosine") return ScheduleKind::kCosine;
  if (name == "linear") return ScheduleKind::kLinear;
  return std::nullopt;
}

double Schedule::At(uint64_t step) const {
  double factor = 1.0;
  if (step <= warmup) {
    factor = static_cast<double>(step) / static_cast<double>(warmup);
  } else if (kind != ScheduleKind::kConstant && steps > warmup) {
    const double progress =
        std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(steps - warmup));
    const double remaining = kind == ScheduleKind::kLinear
                                 ? 1.0 - progress
                                 : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    factor = final_fraction + (1.0 - final_fraction) * remaining;
  }
  return static_cast<float>(peak * factor);
}

}  // namespace shardd::trainer

#include "server/step/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "absl/strings/str_cat.h"

namespace shardd::step {

namespace {

constexpr double kDefaultInitialFactor = 1.0 / 25;

absl::Status Refuse(const char* field, double value, const std::string& rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("schedule.", field, " is ", value, "; it must be ", rule));
}

double Ramp(uint64_t from, uint64_t to, uint64_t at) {
  if (at >= to) return 1;
  if (at <= from) return 0;
  return static_cast<double>(at - from) / static_cast<double>(to - from);
}

// From `a` at share 0 to `b` at share 1 by half a cosine.
double CosineBetween(double a, double b, double share) {
  return b + (a - b) * (1 + std::cos(std::numbers::pi * share)) / 2;
}

double LinearBetween(double a, double b, double share) { return a + (b - a) * share; }

double OneCycle(const v1::Schedule& s, uint64_t step) {
  if (step < s.warmup_steps()) {
    const double initial = s.initial_factor() > 0 ? s.initial_factor() : kDefaultInitialFactor;
    return CosineBetween(initial, 1, Ramp(1, s.warmup_steps(), step));
  }
  return CosineBetween(1, s.final_factor(), Ramp(s.warmup_steps(), s.total_steps(), step));
}

}  // namespace

absl::Status CheckSchedule(const v1::Schedule& s) {
  if (!v1::ScheduleKind_IsValid(s.kind())) {
    return Refuse("kind", s.kind(), "constant, linear, cosine, one_cycle or wsd");
  }
  const auto factor = [](double x) { return std::isfinite(x) && x >= 0; };
  if (!factor(s.initial_factor())) {
    return Refuse("initial_factor", s.initial_factor(), "finite and >= 0");
  }
  if (!factor(s.final_factor())) return Refuse("final_factor", s.final_factor(), "finite and >= 0");
  if (s.kind() == v1::SCHEDULE_UNSPECIFIED || s.kind() == v1::constant) return absl::OkStatus();
  if (s.total_steps() <= s.warmup_steps()) {
    return Refuse("total_steps", static_cast<double>(s.total_steps()),
                  absl::StrCat("above schedule.warmup_steps, ", s.warmup_steps()));
  }
  if (s.kind() == v1::wsd &&
      (s.decay_steps() == 0 || s.decay_steps() > s.total_steps() - s.warmup_steps())) {
    return Refuse("decay_steps", static_cast<double>(s.decay_steps()),
                  "from 1 to schedule.total_steps - schedule.warmup_steps");
  }
  return absl::OkStatus();
}

double LrFactor(const v1::Schedule& s, uint64_t step) {
  if (s.kind() == v1::one_cycle) return OneCycle(s, step);
  if (step < s.warmup_steps()) {
    return static_cast<double>(step) / static_cast<double>(s.warmup_steps());
  }
  switch (s.kind()) {
    case v1::linear:
      return LinearBetween(1, s.final_factor(), Ramp(s.warmup_steps(), s.total_steps(), step));
    case v1::cosine:
      return CosineBetween(1, s.final_factor(), Ramp(s.warmup_steps(), s.total_steps(), step));
    case v1::wsd:
      return LinearBetween(1, s.final_factor(),
                           Ramp(s.total_steps() - s.decay_steps(), s.total_steps(), step));
    default:
      return 1;
  }
}

}  // namespace shardd::step

// Schedules of the learning rate (`Schedule` in proto/job_config.proto).
#ifndef SHARDD_SERVER_STEP_SCHEDULE_H_
#define SHARDD_SERVER_STEP_SCHEDULE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "proto/job_config.pb.h"

namespace shardd::step {

// InvalidArgument names the field: "schedule.total_steps is 5; ...".
absl::Status CheckSchedule(const v1::Schedule& schedule);

// The factor of the optimizer step that is the `step`-th to be applied, counted from 1. `schedule`
// has passed CheckSchedule. Only the decider computes it: cos is libm's own, and the lr that comes
// of it is recorded with the decision.
double LrFactor(const v1::Schedule& schedule, uint64_t step);

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_SCHEDULE_H_

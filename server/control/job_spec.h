// Checks of a client's job configuration, its completion, and what may differ
// between two runs of a job.
#ifndef SHARDD_SERVER_CONTROL_JOB_SPEC_H_
#define SHARDD_SERVER_CONTROL_JOB_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/contract/layout.h"
#include "proto/control.pb.h"

namespace shardd::control {

// Names of jobs become names of files: 1..64 of [A-Za-z0-9._-], not beginning with '.'.
absl::Status CheckJobName(const std::string& name);

// Sets every field that was left 0 to its default (proto/job_config.proto) and checks
// all. `durability`: the best that this daemon offers, and the default. InvalidArgument names the
// field.
absl::Status CompleteJobConfig(v1::Durability durability, v1::JobConfig* config);

// Layout of the request's parameters. InvalidArgument names the parameter.
absl::StatusOr<contract::Layout> MakeLayout(const v1::OpenRequest& request);

// Over what two runs of a job must share.
uint64_t ConfigHash(const v1::JobConfig& config);

// One line per field in which two complete configurations may not differ but do:
// "max_norm: 1 there, 0.5 here".
std::vector<std::string> ConfigDifferences(const v1::JobConfig& there, const v1::JobConfig& here);

// The same for the parameters; at most a few lines.
std::vector<std::string> LayoutDifferences(const contract::Layout& there,
                                           const contract::Layout& here);

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_JOB_SPEC_H_

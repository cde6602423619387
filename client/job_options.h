// The public job description and its protobuf forms.
#ifndef SHARDD_CLIENT_JOB_OPTIONS_H_
#define SHARDD_CLIENT_JOB_OPTIONS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "proto/contract/layout.h"
#include "proto/contract/slot_tree.h"
#include "proto/control.pb.h"
#include "proto/job_config.pb.h"

namespace shardd {

v1::JobConfig ToProto(const JobOptions& options);
JobOptions FromProto(const v1::JobConfig& config);
v1::Hyperparameters ToProto(const ParameterGroup& group);

// Hash of the hyper-parameters of all groups, which ranks must agree on
// (docs/formats/segments.md).
uint64_t HyperHash(const std::vector<ParameterGroup>& groups);

// What the client itself must know to be right before it talks to the daemon; all else
// is the daemon's to check. InvalidArgument names the field or parameter.
absl::Status CheckOpen(const SessionOptions& options, const JobOptions& job,
                       const std::vector<ParameterSpec>& parameters);

std::vector<contract::ParameterSpec> LayoutSpecs(const std::vector<ParameterSpec>& parameters);

}  // namespace shardd

#endif  // SHARDD_CLIENT_JOB_OPTIONS_H_

// Checks and hashes of the hyper-parameters that a client sends.
#ifndef SHARDD_SERVER_STEP_HYPERPARAMETERS_H_
#define SHARDD_SERVER_STEP_HYPERPARAMETERS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/optimizer.h"
#include "proto/contract/layout.h"
#include "proto/contract/segments.h"
#include "proto/job_config.pb.h"

namespace shardd::step {

// InvalidArgument names `path` and the field: lr, eps and weight_decay finite and
// not negative, eps positive, betas in [0, 1).
absl::Status CheckHyperparameters(const v1::Hyperparameters& hyper, const std::string& path);

kernels::Hyperparameters ToKernel(const v1::Hyperparameters& hyper);
contract::DecisionGroup ToRecord(const v1::Hyperparameters& hyper);

// The hash that every rank sends with EndStep, over all groups in order.
template <typename Groups>
uint64_t HashHyperparameters(const Groups& groups) {
  contract::Hasher hasher;
  for (const v1::Hyperparameters& g : groups) {
    hasher.Add(g.lr()).Add(g.beta1()).Add(g.beta2()).Add(g.eps()).Add(g.weight_decay());
  }
  return hasher.value();
}

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_HYPERPARAMETERS_H_

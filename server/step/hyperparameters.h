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

// InvalidArgument names `path` and the field: lr, eps and weight_decay finite and not negative, eps
// positive where the optimizer may divide by it, betas in [0, 1), and so on.
absl::Status CheckHyperparameters(const v1::Hyperparameters& hyper,
                                  const kernels::Optimizer& optimizer, const std::string& path);

kernels::Hyperparameters ToKernel(const v1::Hyperparameters& hyper);
contract::DecisionGroup ToRecord(const v1::Hyperparameters& hyper);

// The hash that every rank sends with EndStep, over all groups in order.
template <typename Groups>
uint64_t HashHyperparameters(const Groups& groups) {
  contract::Hasher hasher;
  for (const v1::Hyperparameters& g : groups) {
    hasher.Add(g.lr()).Add(g.beta1()).Add(g.beta2()).Add(g.eps()).Add(g.weight_decay());
    // What clients knew first is hashed as they do it.
    if (g.momentum() == 0 && g.dampening() == 0 && !g.nesterov() && g.lr_decay() == 0 &&
        g.min_trust() == 0 && g.max_trust() == 0) {
      continue;
    }
    hasher.Add(g.momentum()).Add(g.dampening()).Add(g.nesterov() ? 1.0 : 0.0).Add(g.lr_decay());
    hasher.Add(g.min_trust()).Add(g.max_trust());
  }
  return hasher.value();
}

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_HYPERPARAMETERS_H_

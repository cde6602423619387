// Held-out evaluation.
#ifndef SHARDD_TRAINER_EVALUATE_H_
#define SHARDD_TRAINER_EVALUATE_H_

#include <vector>

#include "absl/status/statusor.h"
#include "trainer/models/model.h"
#include "trainer/tensor/graph.h"

namespace shardd::trainer {

// Mean loss over all targets of `batches`, each target weighing the same (nats a
// byte for a byte-level model). `access` as in Graph::Options.
absl::StatusOr<double> Evaluate(const models::Model& model,
                                const std::vector<models::Batch>& batches, tensor::Device* device,
                                tensor::DType compute, tensor::ParameterAccess* access);

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_EVALUATE_H_

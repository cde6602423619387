#include "trainer/evaluate.h"

#include "trainer/tensor/ops.h"

namespace shardd::trainer {

absl::StatusOr<double> Evaluate(const models::Model& model,
                                const std::vector<models::Batch>& batches, tensor::Device* device,
                                tensor::DType compute, tensor::ParameterAccess* access) {
  double sum = 0;
  int64_t targets = 0;
  for (const models::Batch& batch : batches) {
    tensor::Graph graph({.device = device, .compute = compute, .record = false, .access = access});
    const absl::StatusOr<tensor::Tensor> loss = model.Forward(graph, batch);
    if (!loss.ok()) return loss.status();
    sum += ToDouble(graph, *loss) * static_cast<double>(batch.targets());
    targets += batch.targets();
  }
  if (targets == 0) {
    return absl::InvalidArgumentError(
        "evaluate: the held-out text has fewer than two bytes; give a longer one");
  }
  return sum / static_cast<double>(targets);
}

}  // namespace shardd::trainer

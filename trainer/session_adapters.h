// The client's session as the tensor library sees it: weights come from it, and
// gradients go to it.
#ifndef SHARDD_TRAINER_SESSION_ADAPTERS_H_
#define SHARDD_TRAINER_SESSION_ADAPTERS_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "client/client.h"
#include "trainer/models/model.h"
#include "trainer/tensor/graph.h"

namespace shardd::trainer {

tensor::DType TensorDType(DType dtype);

// Index in registration order of each parameter of a model.
std::unordered_map<const tensor::Parameter*, size_t> ParameterIndex(const models::Model& model);

// Working weights, waited for just before their first use, so that a forward pass
// begins while later layers are still being updated.
class SessionWeights final : public tensor::ParameterAccess {
 public:
  SessionWeights(Session* session, const models::Model& model, DType weight_dtype);

  absl::Status Gather(tensor::ParameterSpan parameters) override;
  void Release(tensor::ParameterSpan parameters) override;

 private:
  Session* const session_;
  const tensor::DType dtype_;
  const std::unordered_map<const tensor::Parameter*, size_t> index_;
  std::vector<int> held_;  // by index; Gather and Release balance
};

// Hands each gradient over as soon as backward has completed it: built in the
// session's buffer if that is fp32, else rounded into it.
class SessionGradients final : public tensor::GradientSink {
 public:
  SessionGradients(Session* session, const models::Model& model, DType grad_dtype);

  // The gradients that follow are those of `slot`.
  void BeginSlot(uint32_t slot);
  // Parameters without any gradient since the last call.
  std::vector<size_t> TakeAbsent();

  absl::StatusOr<float*> Destination(const tensor::Parameter& parameter) override;
  absl::Status Complete(const tensor::Parameter& parameter, const float* grad) override;

 private:
  Session* const session_;
  const DType dtype_;
  const std::unordered_map<const tensor::Parameter*, size_t> index_;
  std::vector<bool> given_;    // by index, in any slot of this step
  std::vector<void*> buffer_;  // by index: acquired, not yet complete
  uint32_t slot_ = 0;
};

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_SESSION_ADAPTERS_H_

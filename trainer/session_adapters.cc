#include "trainer/session_adapters.h"

#include "kernels/cast.h"
#include "kernels/isa.h"

namespace shardd::trainer {

tensor::DType TensorDType(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return tensor::DType::kBFloat16;
    case DType::kFloat16:
      return tensor::DType::kFloat16;
    case DType::kFloat32:
      break;
  }
  return tensor::DType::kFloat32;
}

std::unordered_map<const tensor::Parameter*, size_t> ParameterIndex(const models::Model& model) {
  std::unordered_map<const tensor::Parameter*, size_t> index;
  for (const tensor::Parameter* parameter : model.parameters()) {
    index.emplace(parameter, index.size());
  }
  return index;
}

SessionWeights::SessionWeights(Session* session, const models::Model& model, DType weight_dtype)
    : session_(session),
      dtype_(TensorDType(weight_dtype)),
      index_(ParameterIndex(model)),
      held_(index_.size(), 0) {}

absl::Status SessionWeights::Gather(tensor::ParameterSpan parameters) {
  std::vector<size_t> wanted;
  for (const tensor::Parameter* parameter : parameters) {
    const size_t index = index_.at(parameter);
    if (held_[index] == 0) wanted.push_back(index);
  }
  if (absl::Status s = session_->Gather(wanted); !s.ok()) return s;
  for (tensor::Parameter* parameter : parameters) {
    const size_t index = index_.at(parameter);
    if (held_[index] > 0) continue;
    const absl::StatusOr<const void*> weights = session_->WaitWeights(index);
    if (!weights.ok()) {
      // Nothing of this call is held: undone by the session, or of no matter to it.
      (void)session_->Release(wanted);
      return weights.status();
    }
    parameter->Bind(*weights, dtype_);
  }
  for (const tensor::Parameter* parameter : parameters) ++held_[index_.at(parameter)];
  return absl::OkStatus();
}

void SessionWeights::Release(tensor::ParameterSpan parameters) {
  std::vector<size_t> unused;
  for (tensor::Parameter* parameter : parameters) {
    const size_t index = index_.at(parameter);
    if (--held_[index] > 0) continue;
    parameter->Bind(nullptr, dtype_);
    unused.push_back(index);
  }
  // A session that fails here fails again, with its reason, at its next verb.
  (void)session_->Release(unused);
}

SessionGradients::SessionGradients(Session* session, const models::Model& model, DType grad_dtype)
    : session_(session),
      dtype_(grad_dtype),
      index_(ParameterIndex(model)),
      given_(index_.size(), false),
      buffer_(index_.size(), nullptr) {}

void SessionGradients::BeginSlot(uint32_t slot) {
  slot_ = slot;
  buffer_.assign(buffer_.size(), nullptr);
}

std::vector<size_t> SessionGradients::TakeAbsent() {
  std::vector<size_t> absent;
  for (size_t i = 0; i < given_.size(); ++i) {
    if (!given_[i]) absent.push_back(i);
  }
  given_.assign(given_.size(), false);
  return absent;
}

absl::StatusOr<float*> SessionGradients::Destination(const tensor::Parameter& parameter) {
  if (dtype_ != DType::kFloat32) return nullptr;
  const size_t index = index_.at(&parameter);
  const absl::StatusOr<void*> buffer = session_->AcquireGrad(index, slot_);
  if (!buffer.ok()) return buffer.status();
  buffer_[index] = *buffer;
  return static_cast<float*>(*buffer);
}

absl::Status SessionGradients::Complete(const tensor::Parameter& parameter, const float* grad) {
  const size_t index = index_.at(&parameter);
  if (buffer_[index] == nullptr) {
    const absl::StatusOr<void*> buffer = session_->AcquireGrad(index, slot_);
    if (!buffer.ok()) return buffer.status();
    kernels::Fp32ToGrad(kernels::BestIsa(), grad, parameter.elements(), *buffer,
                        static_cast<kernels::DType>(dtype_));
  }
  buffer_[index] = nullptr;
  given_[index] = true;
  return session_->ReadyGrad(index, slot_);
}

}  // namespace shardd::trainer

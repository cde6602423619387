#include "trainer/tensor/tensor.h"

#include <utility>

namespace shardd::tensor {

int64_t NumElements(const Shape& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

Tensor::Tensor(Device* device, Shape shape, DType dtype) : impl_(std::make_shared<Impl>()) {
  impl_->device = device;
  impl_->elements = NumElements(shape);
  impl_->shape = std::move(shape);
  impl_->dtype = dtype;
  impl_->data = device->Allocate(bytes());
}

Tensor::Impl::~Impl() {
  if (device != nullptr) device->Free(data, elements * DTypeSize(dtype));
}

const Tensor& Tensor::grad() const {
  static const Tensor* const kNone = new Tensor;
  return impl_->grad != nullptr ? *impl_->grad : *kNone;
}

void Tensor::set_grad(Tensor grad) { impl_->grad = std::make_unique<Tensor>(std::move(grad)); }

Tensor Tensor::TakeGrad() {
  if (impl_->grad == nullptr) return {};
  Tensor grad = std::move(*impl_->grad);
  impl_->grad.reset();
  return grad;
}

Parameter::Parameter(std::string name, Shape shape)
    : name_(std::move(name)), shape_(std::move(shape)), elements_(NumElements(shape_)) {}

}  // namespace shardd::tensor

// Tensors, and the parameters that a model is made of.
#ifndef SHARDD_TRAINER_TENSOR_TENSOR_H_
#define SHARDD_TRAINER_TENSOR_TENSOR_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trainer/tensor/device.h"
#include "trainer/tensor/dtype.h"

namespace shardd::tensor {

using Shape = std::vector<int64_t>;

// Product of the extents; 1 for a scalar.
int64_t NumElements(const Shape& shape);

// A dense row-major tensor on a device: a counted reference. The memory goes back
// to the device with the last reference. Not thread-safe.
class Tensor {
 public:
  Tensor() = default;
  // Uninitialised.
  Tensor(Device* device, Shape shape, DType dtype);

  bool defined() const { return impl_ != nullptr; }
  const Shape& shape() const { return impl_->shape; }
  DType dtype() const { return impl_->dtype; }
  int64_t elements() const { return impl_->elements; }
  size_t bytes() const { return impl_->elements * DTypeSize(impl_->dtype); }
  // Extent of the last dimension, and the product of the others.
  int64_t cols() const { return impl_->shape.back(); }
  int64_t rows() const { return cols() == 0 ? 0 : elements() / cols(); }

  void* data() const { return impl_->data; }
  float* fp32() const { return static_cast<float*>(impl_->data); }
  Buffer buffer() const { return {impl_->data, impl_->dtype}; }

  // Whether this is the only reference.
  bool unique() const { return impl_.use_count() == 1; }

  // The gradient that Graph::Backward left; undefined when there is none. Its
  // dtype is the tensor's own, or fp32 for an fp64 scalar.
  const Tensor& grad() const;
  void set_grad(Tensor grad);
  // Moves the gradient out.
  Tensor TakeGrad();

 private:
  struct Impl {
    ~Impl();
    Device* device = nullptr;
    Shape shape;
    DType dtype = DType::kFloat32;
    int64_t elements = 0;
    void* data = nullptr;
    std::unique_ptr<Tensor> grad;
  };
  std::shared_ptr<Impl> impl_;
};

// A trainable parameter: a name, a shape, and a view of memory that somebody else
// owns and updates (the client library's mapping, or a test's vector). The
// address may change between uses; see ParameterAccess.
class Parameter {
 public:
  Parameter(std::string name, Shape shape);
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  const std::string& name() const { return name_; }
  const Shape& shape() const { return shape_; }
  int64_t elements() const { return elements_; }

  // Further names of the same parameter in files (tied weights); counted once
  // everywhere.
  const std::vector<std::string>& aliases() const { return aliases_; }
  void AddAlias(std::string alias) { aliases_.push_back(std::move(alias)); }

  // Points at the working weights: elements() values of fp32, bf16 or fp16, on
  // the device, unchanged while a graph uses them. Null: not present.
  void Bind(const void* data, DType dtype) {
    data_ = data;
    dtype_ = dtype;
  }
  ConstBuffer buffer() const { return {data_, dtype_}; }
  DType dtype() const { return dtype_; }

 private:
  const std::string name_;
  const Shape shape_;
  const int64_t elements_;
  std::vector<std::string> aliases_;
  const void* data_ = nullptr;
  DType dtype_ = DType::kFloat32;
};

using ParameterSpan = std::span<Parameter* const>;

}  // namespace shardd::tensor

#endif  // SHARDD_TRAINER_TENSOR_TENSOR_H_

// Element types of tensors.
#ifndef SHARDD_TRAINER_TENSOR_DTYPE_H_
#define SHARDD_TRAINER_TENSOR_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace shardd::tensor {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64, kInt32 };

constexpr size_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

}  // namespace shardd::tensor

#endif  // SHARDD_TRAINER_TENSOR_DTYPE_H_

// The element types that gradients and working weights travel in.
#ifndef SHARDD_KERNELS_DTYPE_H_
#define SHARDD_KERNELS_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace shardd::kernels {

// The values are part of the wire and segment formats; never renumber.
enum class DType : uint8_t { kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

// Bytes of one element; 0 for a value that is no DType.
constexpr size_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
  }
  return 0;
}

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_DTYPE_H_

// Casts between fp32 and the travelling dtypes, with the roundings that
// docs/numerics.md fixes.
#ifndef SHARDD_KERNELS_CAST_H_
#define SHARDD_KERNELS_CAST_H_

#include <cstddef>

#include "kernels/dtype.h"
#include "kernels/isa.h"

namespace shardd::kernels {

// Working weights from masters: bf16 to nearest, ties away from zero; fp16 to
// nearest even; fp32 unchanged but for canonical NaN and flushed subnormals.
// The same bits as the weight that an update writes.
void MasterToWeight(Isa isa, const float* master, size_t count, void* weight, DType dtype);

// Gradient leaves: to nearest even, NaN canonical; fp32 flushed.
void Fp32ToGrad(Isa isa, const float* in, size_t count, void* out, DType dtype);

// Exact widening (fp16 subnormals kept; fp32 copied).
void ToFp32(Isa isa, const void* in, DType dtype, size_t count, float* out);

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_CAST_H_

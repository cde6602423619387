#include "kernels/cast.h"

#include "kernels/targets.h"

namespace shardd::kernels {

void MasterToWeight(Isa isa, const float* master, size_t count, void* weight, DType dtype) {
  SHARDD_FOR_ISA(isa, MasterToWeightElements)(master, count, weight, dtype);
}

void Fp32ToGrad(Isa isa, const float* in, size_t count, void* out, DType dtype) {
  SHARDD_FOR_ISA(isa, Fp32ToGradElements)(in, count, out, dtype);
}

void ToFp32(Isa isa, const void* in, DType dtype, size_t count, float* out) {
  SHARDD_FOR_ISA(isa, ToFp32Elements)(in, dtype, count, out);
}

}  // namespace shardd::kernels

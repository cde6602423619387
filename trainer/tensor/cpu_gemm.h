// Matrix products on the CPU, over oneDNN.
#ifndef SHARDD_TRAINER_TENSOR_CPU_GEMM_H_
#define SHARDD_TRAINER_TENSOR_CPU_GEMM_H_

#include <cstdint>
#include <memory>

#include "trainer/tensor/device.h"

namespace shardd::tensor::cpu {

// fp32 products go to dnnl_sgemm; bf16 ones to matmul primitives, made once for
// each shape and kept, or, on a CPU without bf16 products, through fp32 copies.
// Runs on the calling thread's OpenMP team. Not thread-safe.
class GemmRunner {
 public:
  GemmRunner();
  ~GemmRunner();
  GemmRunner(const GemmRunner&) = delete;
  GemmRunner& operator=(const GemmRunner&) = delete;

  void Run(const GemmArgs& args);

  // Whether this CPU multiplies bf16 natively.
  bool native_bf16() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One fp32 product of strided matrices: C[m,n] = alpha op(A) op(B) + beta C.
// Thread-safe; inside a parallel region it uses the calling thread alone.
struct StridedGemm {
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t lda = 0;
  bool transpose_a = false;
  const float* b = nullptr;
  int64_t ldb = 0;
  bool transpose_b = false;
  float* c = nullptr;
  int64_t ldc = 0;
  float alpha = 1.0f;
  float beta = 0.0f;
};
void RunStrided(const StridedGemm& args);

}  // namespace shardd::tensor::cpu

#endif  // SHARDD_TRAINER_TENSOR_CPU_GEMM_H_

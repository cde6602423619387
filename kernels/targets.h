// The functions that exist once per instruction set, and the choice between them.
//
// Each is compiled in namespace scalar, N_AVX2 and N_AVX3 (Highway's names) from
// the same -inl.h text. With SHARDD_WITHOUT_HIGHWAY only the scalar ones exist.
#ifndef SHARDD_KERNELS_TARGETS_H_
#define SHARDD_KERNELS_TARGETS_H_

#include <cstddef>

#include "kernels/cast.h"
#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/optimizer.h"
#include "kernels/reduce.h"
#include "kernels/reduce_plan.h"

// The formulas of the -inl.h files: of each, NAMEFormula and UpdateNAME. In two parts, which are
// compiled side by side.
#define SHARDD_FOR_EACH_ADAM_FORMULA(F) \
  F(AdamW) F(AdamWAmsgrad) F(Adam) F(AdamAmsgrad) F(Lamb) F(LambDirection)
#define SHARDD_FOR_EACH_DESCENT_FORMULA(F) F(Sgd) F(Adagrad) F(RmsProp) F(Lion)

#define SHARDD_DECLARE_UPDATE(Name) void Update##Name(const UpdateRun& run);

#define SHARDD_DECLARE_TARGET_FUNCTIONS                                                           \
  SHARDD_FOR_EACH_ADAM_FORMULA(SHARDD_DECLARE_UPDATE)                                             \
  SHARDD_FOR_EACH_DESCENT_FORMULA(SHARDD_DECLARE_UPDATE)                                          \
  void ReduceElements(const ReducePlan& plan, std::span<const ReduceInput> inputs, size_t count,  \
                      void* out, DType out_dtype, BlockStats* stats, ReduceWorkspace* workspace); \
  void AddElements(const ReduceInput& a, const ReduceInput& b, size_t count, float* out);         \
  void MasterToWeightElements(const float* master, size_t count, void* weight, DType dtype);      \
  void Fp32ToGradElements(const float* in, size_t count, void* out, DType dtype);                 \
  void ToFp32Elements(const void* in, DType dtype, size_t count, float* out);                     \
  void SplitMasterElements(const float* master, size_t count, uint16_t* weights, uint16_t* low);  \
  void JoinMasterElements(const uint16_t* weights, const uint16_t* low, size_t count,             \
                          float* master);                                                         \
  void StochasticElements(const float* in, size_t count, uint64_t block_key, uint32_t first,      \
                          uint16_t* out);

namespace shardd::kernels {

namespace scalar {
SHARDD_DECLARE_TARGET_FUNCTIONS
}
namespace N_AVX2 {
SHARDD_DECLARE_TARGET_FUNCTIONS
}
namespace N_AVX3 {
SHARDD_DECLARE_TARGET_FUNCTIONS
}

}  // namespace shardd::kernels

#if defined(SHARDD_WITHOUT_HIGHWAY)
#define SHARDD_FOR_ISA(isa, function) (static_cast<void>(isa), &scalar::function)
#else
#define SHARDD_FOR_ISA(isa, function)        \
  ((isa) == Isa::kAvx512 ? &N_AVX3::function \
   : (isa) == Isa::kAvx2 ? &N_AVX2::function \
                         : &scalar::function)
#endif

#endif  // SHARDD_KERNELS_TARGETS_H_

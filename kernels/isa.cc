#include "kernels/isa.h"

#if !defined(SHARDD_WITHOUT_HIGHWAY)
#include "kernels/highway_targets.h"
// After it:
#include "hwy/targets.h"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shardd::kernels {
namespace {

// Flush-to-zero and denormals-are-zero.
constexpr unsigned kFlushBits = 0x8040;

}  // namespace

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<Isa> SupportedIsas() {
  std::vector<Isa> isas = {Isa::kScalar};
#if !defined(SHARDD_WITHOUT_HIGHWAY)
  const auto targets = hwy::SupportedTargets();
  if ((targets & HWY_AVX2) != 0) isas.push_back(Isa::kAvx2);
  if ((targets & HWY_AVX3) != 0) isas.push_back(Isa::kAvx512);
#endif
  return isas;
}

Isa BestIsa() {
  // Asked once: in a virtual machine each CPUID is a trap of tens of microseconds.
  static const Isa best = SupportedIsas().back();
  return best;
}

#if defined(__x86_64__)
ScopedFlushToZero::ScopedFlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushBits); }
ScopedFlushToZero::~ScopedFlushToZero() { _mm_setcsr(saved_); }
#else
ScopedFlushToZero::ScopedFlushToZero() : saved_(0) {}
ScopedFlushToZero::~ScopedFlushToZero() {}
#endif

}  // namespace shardd::kernels

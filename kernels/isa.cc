#include "kernels/isa.h"

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
  return isas;
}

Isa BestIsa() { return SupportedIsas().back(); }

#if defined(__x86_64__)
ScopedFlushToZero::ScopedFlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushBits); }
ScopedFlushToZero::~ScopedFlushToZero() { _mm_setcsr(saved_); }
#else
ScopedFlushToZero::ScopedFlushToZero() : saved_(0) {}
ScopedFlushToZero::~ScopedFlushToZero() {}
#endif

}  // namespace shardd::kernels

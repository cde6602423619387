// Which instruction set the kernels run on. Every kernel gives the same bits on
// all of them; the choice is one of speed, and tests compare them.
#ifndef SHARDD_KERNELS_ISA_H_
#define SHARDD_KERNELS_ISA_H_

#include <vector>

namespace shardd::kernels {

enum class Isa { kScalar, kAvx2, kAvx512 };

const char* IsaName(Isa isa);

// Those that this CPU can run and this build contains, slowest first. Never empty.
std::vector<Isa> SupportedIsas();

// The fastest of SupportedIsas().
Isa BestIsa();

// Sets flush-to-zero and denormals-are-zero on the calling thread until
// destruction. Only speed depends on it (state that decays into subnormals is
// several times slower without): the formulas flush explicitly.
class ScopedFlushToZero {
 public:
  ScopedFlushToZero();
  ~ScopedFlushToZero();
  ScopedFlushToZero(const ScopedFlushToZero&) = delete;
  ScopedFlushToZero& operator=(const ScopedFlushToZero&) = delete;

 private:
  unsigned saved_;
};

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_ISA_H_

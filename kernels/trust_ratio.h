// The norms that trust ratios need (Optimizer::has_trust_ratio).
#ifndef SHARDD_KERNELS_TRUST_RATIO_H_
#define SHARDD_KERNELS_TRUST_RATIO_H_

#include <memory>

#include "kernels/optimizer.h"
#include "kernels/state_format.h"

namespace shardd::kernels {

// Sums of squares of some elements of a parameter, in double.
struct TrustSums {
  double parameter = 0;
  double direction = 0;  // of the step before its trust ratio
};

// Measures leaves: parts of a parameter within one block (reduce.h), of which a parameter's sums
// are the slot tree's fold in ascending order. So they do not depend on who holds which chunks. One
// thread at a time.
class TrustMeter {
 public:
  TrustMeter();
  ~TrustMeter();

  // Of the elements of `run`, at most kBlockElements, as they are before the update; nothing of it
  // is changed. run.scalars came of Step; master and state are those of `arrays`, in `format`.
  TrustSums Measure(const Optimizer& optimizer, Isa isa, const StateFormat& format,
                    const StateArrays& arrays, const UpdateRun& run);

 private:
  struct Scratch;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_TRUST_RATIO_H_

// Checks an optimizer against float64 values of a golden file
// (generate_optimizer.py says what is in one).
#ifndef SHARDD_TESTS_GOLDEN_OPTIMIZER_GOLDEN_H_
#define SHARDD_TESTS_GOLDEN_OPTIMIZER_GOLDEN_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/isa.h"

namespace shardd::golden {

struct OptimizerResult {
  std::string optimizer;
  size_t steps = 0;
  size_t elements = 0;
  // The largest |value - golden| / (1e-7 + 2e-7 * |golden|) over all elements of
  // all steps, and where; a value that is not finite counts as infinite.
  double worst = 0;
  size_t worst_step = 0;
  size_t worst_element = 0;

  bool passed() const { return worst <= 1.0; }
};

// Runs every step of the file at `path` with fp32 state and gradients on `isa`.
// kNotFound, kInvalidArgument: the file is absent, is no golden file, or names an
// optimizer that does not exist.
absl::StatusOr<OptimizerResult> CheckOptimizer(const std::string& path, kernels::Isa isa);

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_OPTIMIZER_GOLDEN_H_

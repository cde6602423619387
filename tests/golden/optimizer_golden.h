// Runs an optimizer's kernel against a golden file.
#ifndef SHARDD_TESTS_GOLDEN_OPTIMIZER_GOLDEN_H_
#define SHARDD_TESTS_GOLDEN_OPTIMIZER_GOLDEN_H_

#include <string>

#include "absl/status/statusor.h"
#include "kernels/isa.h"
#include "tests/golden/optimizer_file.h"

namespace shardd::golden {

// Runs every step of the file at `path` with fp32 state and gradients on `isa`.
// Errors: those of safetensors::Reader::Open and ReadOptimizerFile.
absl::StatusOr<OptimizerResult> CheckOptimizer(const std::string& path, kernels::Isa isa);

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_OPTIMIZER_GOLDEN_H_

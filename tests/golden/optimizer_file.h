// Golden files of optimizers (generate_optimizer.py says what is in one), and how a
// float32 run is compared with one.
#ifndef SHARDD_TESTS_GOLDEN_OPTIMIZER_FILE_H_
#define SHARDD_TESTS_GOLDEN_OPTIMIZER_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "proto/safetensors/reader.h"

namespace shardd::golden {

struct OptimizerFile {
  std::string optimizer;  // of the registry of kernels/optimizer.h
  kernels::Hyperparameters hyper;
  std::vector<int64_t> shape;  // of the parameter
  size_t steps = 0, elements = 0;
  std::vector<float> param0;       // [elements]
  std::vector<float> grads;        // [steps, elements]
  std::vector<double> params_f64;  // [steps, elements], after each step

  std::span<const float> grad(size_t step) const {
    return std::span(grads).subspan(step * elements, elements);
  }
};

// kUnimplemented: there is no such optimizer; the message names those that there are.
// kInvalidArgument: something is missing, or shapes do not agree.
absl::StatusOr<OptimizerFile> ReadOptimizerFile(const safetensors::Reader& reader);

struct OptimizerResult {
  std::string optimizer;
  size_t steps = 0;
  size_t elements = 0;
  // The largest |value - golden| / (1e-7 + 2e-7 * |golden|) over all elements of
  // all steps, and where; a value that is not finite counts as infinite.
  double worst = 0;
  size_t worst_step = 0;
  size_t worst_element = 0;
  double worst_difference = 0;  // |value - golden| there

  bool passed() const { return worst <= 1.0; }
  // Compares `values`, the parameter [elements] after `step` (counted from 0).
  void Compare(const OptimizerFile& file, size_t step, std::span<const float> values);
};

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_OPTIMIZER_FILE_H_

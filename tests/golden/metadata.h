// What golden files say of themselves in the safetensors metadata.
#ifndef SHARDD_TESTS_GOLDEN_METADATA_H_
#define SHARDD_TESTS_GOLDEN_METADATA_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "proto/safetensors/reader.h"

namespace shardd::golden {

enum class Form { kOptimizer, kModel };

// By the metadata, else by the tensors. kInvalidArgument: neither form.
absl::StatusOr<Form> FormOf(const safetensors::Reader& reader);

// kInvalidArgument "golden file PATH: what".
absl::Status Malformed(const safetensors::Reader& reader, std::string_view what);

// kInvalidArgument: `key` is missing, or no number (integer of at least 1). "True" is 1, "False" 0.
absl::StatusOr<double> NumberOf(const safetensors::Reader& reader, std::string_view key);
absl::StatusOr<int64_t> CountOf(const safetensors::Reader& reader, std::string_view key);

// lr, weight_decay, eps where it is needed, beta1 and beta2 or betas = "(0.9, 0.999)", and those of
// other optimizers, each behind `prefix`. The first must be there, and both betas where one is: a
// default could be another one than the file's.
absl::StatusOr<kernels::Hyperparameters> HyperparametersOf(const safetensors::Reader& reader,
                                                           std::string_view prefix, bool needs_eps);

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_METADATA_H_

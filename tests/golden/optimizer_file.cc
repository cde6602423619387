#include "tests/golden/optimizer_file.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/golden/metadata.h"

namespace shardd::golden {
namespace {

using safetensors::DType;
using safetensors::Reader;

std::string KnownOptimizers() {
  std::string names;
  for (const std::string_view name : kernels::OptimizerNames()) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(name));
  }
  return names;
}

// The size of a tensor as its file says.
size_t ElementsOf(const Reader& reader, const char* name) {
  const safetensors::TensorInfo* info = reader.Find(name);
  return info == nullptr ? 0 : info->elements();
}

}  // namespace

absl::StatusOr<OptimizerFile> ReadOptimizerFile(const Reader& reader) {
  OptimizerFile file;
  const auto name = reader.metadata().find("optimizer");
  if (name == reader.metadata().end()) return Malformed(reader, "its metadata lacks optimizer");
  file.optimizer = name->second;
  const kernels::Optimizer* optimizer = kernels::FindOptimizer(file.optimizer);
  if (optimizer == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("golden file ", reader.path(), ": optimizer '", file.optimizer,
                     "' is not supported; supported: ", KnownOptimizers()));
  }
  const auto hyper = HyperparametersOf(reader, "", optimizer->divides_by_eps());
  if (!hyper.ok()) return hyper.status();
  file.hyper = *hyper;
  file.elements = ElementsOf(reader, "param0");
  const size_t total = ElementsOf(reader, "grads");
  if (file.elements == 0 || total == 0 || total % file.elements != 0 ||
      ElementsOf(reader, "params_f64") != total) {
    return Malformed(
        reader,
        "param0 [N], grads [steps,N] or params_f64 [steps,N] is missing or of another shape");
  }
  file.steps = total / file.elements;
  file.shape = reader.Find("param0")->shape;
  auto param0 = reader.Values<float>("param0", DType::kF32);
  if (!param0.ok()) return param0.status();
  auto grads = reader.Values<float>("grads", DType::kF32);
  if (!grads.ok()) return grads.status();
  auto params = reader.Values<double>("params_f64", DType::kF64);
  if (!params.ok()) return params.status();
  file.param0 = *std::move(param0);
  file.grads = *std::move(grads);
  file.params_f64 = *std::move(params);
  return file;
}

void OptimizerResult::Compare(const OptimizerFile& file, size_t step,
                              std::span<const float> values) {
  for (size_t i = 0; i < file.elements; ++i) {
    const double golden = file.params_f64[step * file.elements + i];
    const double difference = std::fabs(double{values[i]} - golden);
    double error = difference / (1e-7 + 2e-7 * std::fabs(golden));
    if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
    if (error <= worst) continue;
    worst = error;
    worst_step = step;
    worst_element = i;
    worst_difference = difference;
  }
}

}  // namespace shardd::golden

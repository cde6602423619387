#include "tests/golden/optimizer_golden.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/optimizer.h"

namespace shardd::golden {
namespace {

using kernels::BetaProducts;
using kernels::DType;
using kernels::Hyperparameters;
using kernels::Isa;
using kernels::Optimizer;
using kernels::StepScalars;
using kernels::UpdateRun;

struct GoldenFile {
  std::string optimizer;
  Hyperparameters hyper;
  size_t steps = 0, elements = 0;
  std::vector<float> param0;       // [elements]
  std::vector<float> grads;        // [steps, elements]
  std::vector<double> params_f64;  // [steps, elements]
};

absl::Status Malformed(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("golden file ", path, ": ", what, "; write it with generate_optimizer.py"));
}

// Copies tensor `name` of `dtype` out of the file's bytes; false if it is not there.
template <class T>
bool CopyTensor(const nlohmann::json& header, const std::string& body, const char* name,
                const char* dtype, std::vector<T>* out) {
  const auto entry = header.find(name);
  if (entry == header.end() || entry->value("dtype", "") != dtype) return false;
  const auto offsets = entry->value("data_offsets", std::vector<uint64_t>());
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > body.size()) return false;
  const size_t bytes = offsets[1] - offsets[0];
  if (bytes % sizeof(T) != 0) return false;
  out->resize(bytes / sizeof(T));
  if (bytes != 0) std::memcpy(out->data(), body.data() + offsets[0], bytes);
  return true;
}

// A hyper-parameter that the metadata lacks keeps its default.
bool ReadHyperparameter(const nlohmann::json& metadata, const char* name, double* value) {
  const auto entry = metadata.find(name);
  if (entry == metadata.end()) return true;
  return entry->is_string() && absl::SimpleAtod(entry->get<std::string>(), value);
}

absl::StatusOr<GoldenFile> ReadGoldenFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return absl::NotFoundError(absl::StrCat("golden file ", path, ": cannot be read"));
  const std::string bytes((std::istreambuf_iterator<char>(stream)), {});
  uint64_t header_size = 0;
  if (bytes.size() < 8) return Malformed(path, "shorter than its header");
  std::memcpy(&header_size, bytes.data(), 8);
  if (header_size > bytes.size() - 8) return Malformed(path, "shorter than its header");
  const auto header = nlohmann::json::parse(bytes.substr(8, header_size), nullptr, false);
  if (!header.is_object() || !header.contains("__metadata__")) {
    return Malformed(path, "its header is no JSON object with metadata");
  }
  const nlohmann::json& metadata = header["__metadata__"];
  GoldenFile file;
  file.optimizer = metadata.value("optimizer", "");
  Hyperparameters& hyper = file.hyper;
  if (!ReadHyperparameter(metadata, "lr", &hyper.lr) ||
      !ReadHyperparameter(metadata, "beta1", &hyper.beta1) ||
      !ReadHyperparameter(metadata, "beta2", &hyper.beta2) ||
      !ReadHyperparameter(metadata, "eps", &hyper.eps) ||
      !ReadHyperparameter(metadata, "weight_decay", &hyper.weight_decay)) {
    return Malformed(path, "a hyper-parameter is no number");
  }
  const std::string body = bytes.substr(8 + header_size);
  if (!CopyTensor(header, body, "param0", "F32", &file.param0) ||
      !CopyTensor(header, body, "grads", "F32", &file.grads) ||
      !CopyTensor(header, body, "params_f64", "F64", &file.params_f64)) {
    return Malformed(path, "param0, grads or params_f64 is missing or has another dtype");
  }
  file.elements = file.param0.size();
  if (file.elements == 0 || file.grads.empty() || file.grads.size() % file.elements != 0 ||
      file.params_f64.size() != file.grads.size()) {
    return Malformed(path, "the shapes of param0, grads and params_f64 do not agree");
  }
  file.steps = file.grads.size() / file.elements;
  return file;
}

double ErrorInTolerances(float value, double golden) {
  const double error = std::fabs(double{value} - golden) / (1e-7 + 2e-7 * std::fabs(golden));
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

}  // namespace

absl::StatusOr<OptimizerResult> CheckOptimizer(const std::string& path, Isa isa) {
  absl::StatusOr<GoldenFile> file = ReadGoldenFile(path);
  if (!file.ok()) return file.status();
  const Optimizer* optimizer = kernels::FindOptimizer(file->optimizer);
  if (optimizer == nullptr) {
    return Malformed(path, absl::StrCat("there is no optimizer \"", file->optimizer, "\""));
  }
  std::vector<float> master = file->param0, weight(file->elements);
  std::vector<float> state[2] = {std::vector<float>(file->elements),
                                 std::vector<float>(file->elements)};
  OptimizerResult result{
      .optimizer = file->optimizer, .steps = file->steps, .elements = file->elements};
  BetaProducts products;
  for (size_t step = 0; step < file->steps; ++step) {
    const StepScalars scalars = optimizer->Step(file->hyper, &products);
    UpdateRun run;
    run.master = master.data();
    for (int s = 0; s < optimizer->num_states(); ++s) run.state[s] = state[s].data();
    run.grad = &file->grads[step * file->elements];
    run.weight = weight.data();
    run.count = file->elements;
    run.weight_dtype = DType::kFloat32;
    run.scalars = &scalars;
    optimizer->Update(isa, run);
    for (size_t i = 0; i < file->elements; ++i) {
      const double error =
          ErrorInTolerances(master[i], file->params_f64[step * file->elements + i]);
      if (error <= result.worst) continue;
      result.worst = error;
      result.worst_step = step;
      result.worst_element = i;
    }
  }
  return result;
}

}  // namespace shardd::golden

#include "tests/golden/model_file.h"

#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/golden/metadata.h"
#include "trainer/models/gpt2.h"

namespace shardd::golden {
namespace {

using safetensors::DType;
using safetensors::Reader;

absl::StatusOr<std::unique_ptr<models::Model>> MakeGpt2(const Reader& reader) {
  models::Gpt2Config config;
  const std::pair<const char*, int64_t*> fields[] = {{"cfg.vocab", &config.vocabulary},
                                                     {"cfg.n_ctx", &config.context},
                                                     {"cfg.n_embd", &config.width},
                                                     {"cfg.n_layer", &config.layers},
                                                     {"cfg.n_head", &config.heads}};
  for (const auto& [key, field] : fields) {
    const absl::StatusOr<int64_t> count = CountOf(reader, key);
    if (!count.ok()) return count.status();
    *field = *count;
  }
  return models::Gpt2::Create(config);
}

struct Family {
  const char* name;
  absl::StatusOr<std::unique_ptr<models::Model>> (*make)(const Reader&);
};
constexpr Family kFamilies[] = {{"gpt2", MakeGpt2}};

absl::StatusOr<std::unique_ptr<models::Model>> MakeModel(const Reader& reader,
                                                         const std::string& name) {
  std::string known;
  for (const Family& family : kFamilies) {
    if (name == family.name) return family.make(reader);
    absl::StrAppend(&known, known.empty() ? "" : ", ", family.name);
  }
  return absl::UnimplementedError(absl::StrCat("golden file ", reader.path(), ": model '", name,
                                               "' is not supported; supported: ", known));
}

// param.* and grad1.* for every parameter and no others; final.* for some.
absl::Status CheckTensors(const Reader& reader, ModelFile* file) {
  for (const char* prefix : {"param.", "grad1."}) {
    size_t found = 0;
    for (const safetensors::TensorInfo& info : reader.tensors()) {
      found += absl::StartsWith(info.name, prefix) ? 1 : 0;
    }
    for (const tensor::Parameter* parameter : file->model->parameters()) {
      const std::string name = prefix + parameter->name();
      const safetensors::TensorInfo* info = reader.Find(name);
      if (info == nullptr) return Malformed(reader, absl::StrCat("it lacks the tensor ", name));
      if (info->shape != parameter->shape()) {
        return Malformed(reader, absl::StrCat(name, " has not the shape that the model has"));
      }
    }
    if (found != file->model->parameters().size()) {
      return Malformed(reader,
                       absl::StrCat("it has ", found, " tensors ", prefix, "* where the model has ",
                                    file->model->parameters().size(), " parameters"));
    }
  }
  for (const tensor::Parameter* parameter : file->model->parameters()) {
    const safetensors::TensorInfo* info = reader.Find("final." + parameter->name());
    if (info == nullptr) continue;
    if (info->shape != parameter->shape()) {
      return Malformed(reader, absl::StrCat(info->name, " has not the shape that the model has"));
    }
    file->final_names.push_back(parameter->name());
  }
  return absl::OkStatus();
}

// Takes the value out of `from`, or leaves its error in *status.
template <class T>
void Take(absl::StatusOr<T> from, T* out, absl::Status* status) {
  if (from.ok()) {
    *out = *std::move(from);
  } else {
    status->Update(from.status());
  }
}

}  // namespace

absl::StatusOr<ModelFile> ReadModelFile(const Reader& reader) {
  ModelFile file;
  file.reader = &reader;
  const auto name = reader.metadata().find("model");
  if (name == reader.metadata().end()) return Malformed(reader, "its metadata lacks model");
  file.name = name->second;
  auto model = MakeModel(reader, file.name);
  if (!model.ok()) return model.status();
  file.model = *std::move(model);

  absl::Status status;
  Take(HyperparametersOf(reader, "opt.", true), &file.hyper, &status);
  Take(NumberOf(reader, "clip"), &file.clip, &status);
  Take(CountOf(reader, "steps"), &file.steps, &status);
  Take(CountOf(reader, "batch"), &file.batch, &status);
  Take(CountOf(reader, "seq"), &file.length, &status);
  Take(reader.Values<int32_t>("inputs", DType::kI32), &file.inputs, &status);
  Take(reader.Values<int32_t>("labels", DType::kI32), &file.labels, &status);
  Take(reader.Values<double>("losses_f64", DType::kF64), &file.losses, &status);
  Take(reader.Values<double>("grad_norms_f64", DType::kF64), &file.norms, &status);
  if (!status.ok()) return status;
  if (std::isinf(file.clip)) file.clip = 0;
  const auto steps = static_cast<size_t>(file.steps);
  const size_t tokens = steps * static_cast<size_t>(file.batch * file.length);
  if (file.inputs.size() != tokens || file.labels.size() != tokens || file.losses.size() != steps ||
      file.norms.size() != steps) {
    return Malformed(reader,
                     "inputs, labels [steps,batch,seq], losses_f64 and grad_norms_f64 [steps] do "
                     "not agree with the metadata");
  }
  status = CheckTensors(reader, &file);
  if (!status.ok()) return status;
  return file;
}

models::Batch ModelFile::BatchOf(int64_t step, int64_t first, int64_t end) const {
  models::Batch out;
  out.sequences = end - first;
  out.length = length;
  const int64_t from = (step * batch + first) * length, to = (step * batch + end) * length;
  out.inputs.assign(inputs.begin() + from, inputs.begin() + to);
  out.labels.assign(labels.begin() + from, labels.begin() + to);
  return out;
}

absl::StatusOr<std::vector<float>> ModelFile::Tensor(const std::string& prefix,
                                                     const std::string& parameter) const {
  return reader->Values<float>(prefix + parameter, DType::kF32);
}

}  // namespace shardd::golden

#include <algorithm>
#include <cstring>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/cast.h"
#include "kernels/isa.h"
#include "proto/safetensors/reader.h"
#include "server/checkpoint/fill.h"
#include "server/env/fault_guard.h"

namespace shardd::checkpoint {

namespace {

using safetensors::TensorInfo;

constexpr char kFirstMoment[] = ".exp_avg";
constexpr char kSecondMoment[] = ".exp_avg_sq";
constexpr uint64_t kBlockElements = uint64_t{256} << 10;

std::optional<kernels::DType> KernelDType(safetensors::DType dtype) {
  switch (dtype) {
    case safetensors::DType::kF32:
      return kernels::DType::kFloat32;
    case safetensors::DType::kBF16:
      return kernels::DType::kBFloat16;
    case safetensors::DType::kF16:
      return kernels::DType::kFloat16;
    default:
      return std::nullopt;
  }
}

absl::Status WrongDType(const safetensors::Reader& file, const TensorInfo& tensor) {
  return absl::InvalidArgumentError(
      absl::StrCat(file.path(), ": tensor '", tensor.name, "' has dtype ",
                   std::string(safetensors::DTypeName(tensor.dtype)),
                   "; weights are imported from F32, BF16 or F16: convert the file"));
}

absl::Status Unreadable(const safetensors::Reader& file, const TensorInfo& tensor) {
  return absl::DataLossError(
      absl::StrCat(file.path(), ": tensor '", tensor.name, "' cannot be read; look at the disk"));
}

// What comes before the parameters' names in the file: nothing, or what a model that wraps this
// one adds to all of them ("transformer.").
std::string FindPrefix(const safetensors::Reader& file, const v1::OpenRequest& parameters) {
  const auto has_all = [&](const std::string& prefix) {
    return std::all_of(parameters.parameters().begin(), parameters.parameters().end(),
                       [&](const v1::Parameter& p) { return file.Find(prefix + p.name()); });
  };
  if (parameters.parameters().empty() || has_all("")) return "";
  const std::string last = absl::StrCat(".", parameters.parameters(0).name());
  for (const TensorInfo& tensor : file.tensors()) {
    if (!absl::EndsWith(tensor.name, last)) continue;
    const std::string prefix = tensor.name.substr(0, tensor.name.size() - last.size() + 1);
    if (has_all(prefix)) return prefix;
  }
  return "";
}

// The tensor of a parameter, by its own name or another of its names.
template <typename Parameter>
absl::StatusOr<const TensorInfo*> FindTensor(const safetensors::Reader& file,
                                             const std::string& prefix,
                                             const Parameter& parameter) {
  const TensorInfo* found = file.Find(prefix + parameter.name());
  for (const std::string& alias : parameter.aliases()) {
    if (found == nullptr) found = file.Find(prefix + alias);
    if (found == nullptr) found = file.Find(alias);
  }
  if (found == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(file.path(), ": has no tensor for parameter '", prefix, parameter.name(),
                     "'; import a file of this model, or open the job under another name"));
  }
  const std::vector<int64_t> shape(parameter.shape().begin(), parameter.shape().end());
  if (found->shape != shape) {
    return absl::InvalidArgumentError(absl::StrCat(
        file.path(), ": tensor '", found->name, "' has shape (", absl::StrJoin(found->shape, ", "),
        "), parameter '", parameter.name(), "' has (", absl::StrJoin(shape, ", "), ")"));
  }
  return found;
}

// Frozen parameters from the same file, in the dtype of their registration.
absl::Status FillFrozen(const safetensors::Reader& file, const std::string& prefix,
                        const v1::OpenRequest& parameters, store::JobSegments* segments) {
  const kernels::Isa isa = kernels::BestIsa();
  for (int f = 0; f < parameters.frozen_size(); ++f) {
    const v1::FrozenParameter& frozen = parameters.frozen(f);
    absl::StatusOr<const TensorInfo*> tensor = FindTensor(file, prefix, frozen);
    if (!tensor.ok()) return tensor.status();
    const std::optional<kernels::DType> from = KernelDType((*tensor)->dtype);
    if (!from.has_value()) return WrongDType(file, **tensor);
    absl::StatusOr<std::span<const std::byte>> bytes = file.Bytes((*tensor)->name);
    if (!bytes.ok()) return bytes.status();
    const auto to = static_cast<kernels::DType>(frozen.dtype());
    const size_t from_size = kernels::DTypeSize(*from), to_size = kernels::DTypeSize(to);
    std::vector<float> wide(kBlockElements);
    std::vector<std::byte> narrow(kBlockElements * sizeof(float));
    const uint64_t elements = (*tensor)->elements();
    for (uint64_t at = 0; at < elements; at += kBlockElements) {
      const uint64_t count = std::min(kBlockElements, elements - at);
      const void* fault = env::RunGuarded([&] {
        // Of the same dtype they are the same bits.
        if (*from == to) {
          std::memcpy(narrow.data(), bytes->data() + at * from_size, count * from_size);
        } else {
          kernels::ToFp32(isa, bytes->data() + at * from_size, *from, count, wide.data());
        }
      });
      if (fault != nullptr) return Unreadable(file, **tensor);
      if (*from != to) kernels::Fp32ToGrad(isa, wide.data(), count, narrow.data(), to);
      absl::Status status =
          segments->WriteFrozen(static_cast<size_t>(f), at * to_size,
                                std::span<const std::byte>(narrow.data(), count * to_size));
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ImportSummary> CheckImport(const std::string& path) {
  absl::StatusOr<std::unique_ptr<safetensors::Reader>> file = safetensors::Reader::Open(path);
  if (!file.ok()) return file.status();
  ImportSummary summary;
  for (const TensorInfo& tensor : (*file)->tensors()) {
    ++summary.tensors;
    summary.bytes += tensor.bytes();
    const std::string& name = tensor.name;
    const auto half = [&](const char* has, const char* lacks) {
      if (!absl::EndsWith(name, has)) return false;
      return (*file)->Find(name.substr(0, name.size() - strlen(has)) + lacks) == nullptr;
    };
    const bool first = half(kFirstMoment, kSecondMoment);
    if (first || half(kSecondMoment, kFirstMoment)) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": has '", name, "' without its ", first ? "exp_avg_sq" : "exp_avg",
          ": half of an optimizer's state; import a file of weights, or restore a checkpoint"));
    }
  }
  return summary;
}

absl::Status FillFromImport(const std::string& path, const contract::Layout& layout,
                            const v1::OpenRequest& parameters, store::JobSegments* segments) {
  absl::StatusOr<std::unique_ptr<safetensors::Reader>> file = safetensors::Reader::Open(path);
  if (!file.ok()) return file.status();
  const std::string prefix = FindPrefix(**file, parameters);
  const kernels::Isa isa = kernels::BestIsa();
  for (uint32_t p = 0; p < layout.num_parameters(); ++p) {
    absl::StatusOr<const TensorInfo*> tensor =
        FindTensor(**file, prefix, parameters.parameters(static_cast<int>(p)));
    if (!tensor.ok()) return tensor.status();
    const std::optional<kernels::DType> dtype = KernelDType((*tensor)->dtype);
    if (!dtype.has_value()) {
      return WrongDType(**file, **tensor);
    }
    absl::StatusOr<std::span<const std::byte>> bytes = (*file)->Bytes((*tensor)->name);
    if (!bytes.ok()) return bytes.status();
    const size_t size = kernels::DTypeSize(*dtype);
    std::vector<float> wide(std::min<uint64_t>(layout.parameter_elements(p), kBlockElements));
    const void* fault = env::RunGuarded([&] {
      const uint64_t begin = layout.parameter_range(p).begin;
      for (uint64_t at = 0; at < layout.parameter_elements(p);) {
        const uint64_t inside = (begin + at) % layout.chunk_elements();
        const uint64_t count = std::min(
            {layout.parameter_elements(p) - at, layout.chunk_elements() - inside, kBlockElements});
        kernels::ToFp32(isa, bytes->data() + at * size, *dtype, count, wide.data());
        segments->chunk((begin + at) / layout.chunk_elements())
            .Write(0, inside, count, wide.data());
        at += count;
      }
    });
    if (fault != nullptr) return Unreadable(**file, **tensor);
  }
  return FillFrozen(**file, prefix, parameters, segments);
}

}  // namespace shardd::checkpoint

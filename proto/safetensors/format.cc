#include "proto/safetensors/format.h"

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace shardd::safetensors {
namespace {

struct DTypeRow {
  DType dtype;
  std::string_view name;
  size_t size;
};

constexpr DTypeRow kDTypes[] = {
    {DType::kF64, "F64", 8}, {DType::kF32, "F32", 4}, {DType::kBF16, "BF16", 2},
    {DType::kF16, "F16", 2}, {DType::kI64, "I64", 8}, {DType::kI32, "I32", 4},
};

constexpr uint64_t kMaxTensorBytes = uint64_t{1} << 63;

}  // namespace

size_t DTypeSize(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.size;
  }
  return 1;
}

std::string_view DTypeName(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.name;
  }
  return "?";
}

std::optional<DType> ParseDType(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

absl::Status ShapeBytes(std::string_view object, const std::vector<int64_t>& shape, DType dtype,
                        uint64_t* bytes) {
  bool empty = false;
  for (int64_t extent : shape) {
    if (extent < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(object), ": extent ", extent, " is negative"));
    }
    empty = empty || extent == 0;
  }
  *bytes = 0;
  if (empty) return absl::OkStatus();
  uint64_t total = DTypeSize(dtype);
  for (int64_t extent : shape) {
    if (static_cast<uint64_t>(extent) > kMaxTensorBytes / total) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(object), ": its shape takes more than 2^63 bytes"));
    }
    total *= static_cast<uint64_t>(extent);
  }
  *bytes = total;
  return absl::OkStatus();
}

absl::StatusOr<std::string> EncodeHeader(const std::string& path,
                                         const std::map<std::string, std::string>& metadata,
                                         const std::vector<TensorInfo>& tensors, size_t alignment) {
  // ordered_json keeps the order of declaration, which is that of the data.
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const TensorInfo& tensor : tensors) {
    header.push_back({tensor.name,
                      {{"dtype", DTypeName(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"data_offsets", {tensor.begin, tensor.end}}}});
  }
  // Names are bytes to us; what is not UTF-8 is replaced rather than thrown at.
  const std::string json =
      header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  const uint64_t total = (sizeof(uint64_t) + json.size() + alignment - 1) / alignment * alignment;
  const uint64_t length = total - sizeof(uint64_t);
  if (length > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": the header would take ", length,
                                                   " bytes, more than ", kMaxHeaderBytes,
                                                   "; write fewer tensors to a file"));
  }
  std::string text(reinterpret_cast<const char*>(&length), sizeof(length));
  text += json;
  text.resize(total, ' ');
  return text;
}

}  // namespace shardd::safetensors

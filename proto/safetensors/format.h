// The safetensors file format: u64 header length (little endian), a JSON object
// that maps tensor names to {dtype, shape, data_offsets}, then the data.
#ifndef SHARDD_PROTO_SAFETENSORS_FORMAT_H_
#define SHARDD_PROTO_SAFETENSORS_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardd::safetensors {

enum class DType : uint8_t { kF64, kF32, kBF16, kF16, kI64, kI32 };

// Bytes of one element.
size_t DTypeSize(DType dtype);
// As in the header: "F32".
std::string_view DTypeName(DType dtype);
std::optional<DType> ParseDType(std::string_view name);

// The largest header that is read or written, as in the reference implementation.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;

// One tensor: dense, row-major.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // empty: a scalar
  uint64_t begin = 0;          // bytes from the start of the data
  uint64_t end = 0;

  uint64_t bytes() const { return end - begin; }
  // Elements; 1 for a scalar.
  uint64_t elements() const { return bytes() / DTypeSize(dtype); }
};

// Bytes that `shape` takes; an error naming `object` when an extent is negative
// or the product exceeds 2^63.
absl::Status ShapeBytes(std::string_view object, const std::vector<int64_t>& shape, DType dtype,
                        uint64_t* bytes);

// The bytes before the data: the length, then the JSON of `metadata` and of `tensors` in their
// order, padded with spaces so that the data begin at a multiple of `alignment` (a multiple of
// 8). InvalidArgument, beginning with `path`: longer than kMaxHeaderBytes.
absl::StatusOr<std::string> EncodeHeader(const std::string& path,
                                         const std::map<std::string, std::string>& metadata,
                                         const std::vector<TensorInfo>& tensors, size_t alignment);

}  // namespace shardd::safetensors

#endif  // SHARDD_PROTO_SAFETENSORS_FORMAT_H_

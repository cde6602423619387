// Reads safetensors files through a read-only mapping.
#ifndef SHARDD_PROTO_SAFETENSORS_READER_H_
#define SHARDD_PROTO_SAFETENSORS_READER_H_

#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/safetensors/format.h"

namespace shardd::safetensors {

// An open file. Everything is checked by Open, so accessors cannot run out of
// bounds; a file that another process truncates while it is open raises SIGBUS
// when read, as with any mapping. Thread-safe after Open.
class Reader {
 public:
  // Maps `path` and checks header length, JSON, names (no duplicates), dtypes,
  // shapes against offsets, and that the tensors cover the data without overlap,
  // hole or rest. Errors name file, tensor and remedy: kNotFound (no such file),
  // kDataLoss (malformed), kUnimplemented (a dtype that is not supported).
  static absl::StatusOr<std::unique_ptr<Reader>> Open(const std::string& path);

  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  const std::string& path() const { return path_; }
  // In the order of the data.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  // The header's "__metadata__"; empty when there is none.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Null when there is no tensor of that name.
  const TensorInfo* Find(std::string_view name) const;

  // The tensor's bytes, in the mapping; not necessarily aligned for its dtype.
  // kNotFound names the file and the tensor.
  absl::StatusOr<std::span<const std::byte>> Bytes(std::string_view name) const;

  // The tensor's elements, copied. kInvalidArgument unless it is of dtype
  // `dtype` and `sizeof(T)` fits.
  template <typename T>
  absl::StatusOr<std::vector<T>> Values(std::string_view name, DType dtype) const {
    static_assert(std::is_trivially_copyable_v<T>);
    absl::StatusOr<std::span<const std::byte>> bytes = CheckedBytes(name, dtype, sizeof(T));
    if (!bytes.ok()) return bytes.status();
    std::vector<T> values(bytes->size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes->data(), bytes->size());
    return values;
  }

 private:
  Reader() = default;
  absl::Status Map();
  absl::Status ReadHeader(int fd);
  absl::Status ParseHeader();
  absl::Status CheckLayout();
  absl::StatusOr<std::span<const std::byte>> CheckedBytes(std::string_view name, DType dtype,
                                                          size_t element_bytes) const;

  std::string path_;
  const std::byte* map_ = nullptr;
  uint64_t file_bytes_ = 0;
  uint64_t data_start_ = 0;
  std::string header_;  // until it is parsed
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace shardd::safetensors

#endif  // SHARDD_PROTO_SAFETENSORS_READER_H_

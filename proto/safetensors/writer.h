// Writes safetensors files, streaming: declare every tensor, then append the data
// in that order. Memory use does not depend on the size of the tensors.
#ifndef SHARDD_PROTO_SAFETENSORS_WRITER_H_
#define SHARDD_PROTO_SAFETENSORS_WRITER_H_

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/safetensors/format.h"

namespace shardd::safetensors {

// One file in the making. It is built beside its final place as
// "PATH.partial.PID" and appears under `path` only when Finish succeeds, so a
// reader never sees half a file; a writer destroyed before that removes it.
// Not thread-safe.
class Writer {
 public:
  struct Options {
    std::map<std::string, std::string> metadata;
    // How much is collected before a write(2).
    size_t buffer_bytes = size_t{1} << 20;
  };

  // Errors: those of open(2), naming the file.
  static absl::StatusOr<std::unique_ptr<Writer>> Create(const std::string& path, Options options);

  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Declares the next tensor. kInvalidArgument: a name given twice or reserved, a
  // shape that is none; kFailedPrecondition: data was already appended.
  absl::Status Declare(std::string_view name, DType dtype, const std::vector<int64_t>& shape);

  // Appends data: tensors in the order of their declaration, each in any number of
  // pieces, which may also span tensors. kOutOfRange: more than was declared.
  absl::Status Append(std::span<const std::byte> data);

  // Completes the file: fsync, rename to `path`, fsync of the directory. When it
  // returns OK the file is durable. kFailedPrecondition names the tensor whose
  // data is missing. No call may follow.
  absl::Status Finish();

 private:
  Writer() = default;
  absl::Status WriteHeader();
  absl::Status Flush();
  absl::Status WriteFully(const std::byte* data, size_t bytes);
  absl::Status Errno(const char* action) const;

  std::string path_;
  std::string partial_path_;
  Options options_;
  int fd_ = -1;
  bool header_written_ = false;
  uint64_t declared_bytes_ = 0;
  uint64_t appended_bytes_ = 0;
  std::vector<TensorInfo> tensors_;
  std::unordered_set<std::string> names_;
  std::vector<std::byte> buffer_;
};

}  // namespace shardd::safetensors

#endif  // SHARDD_PROTO_SAFETENSORS_WRITER_H_

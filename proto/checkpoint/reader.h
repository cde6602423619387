// Reads one checkpoint directory, and believes nothing that a checksum does not cover.
#ifndef SHARDD_PROTO_CHECKPOINT_READER_H_
#define SHARDD_PROTO_CHECKPOINT_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/checkpoint/manifest.h"

namespace shardd::checkpoint {

// How files are read: the system's own way, or through whatever the caller has. Thread-safe.
struct FileAccess {
  // Fills `out` from `offset` on; returns how many bytes, fewer only at the file's end.
  using ReadAt = std::function<absl::StatusOr<size_t>(uint64_t offset, std::span<std::byte> out)>;
  // Opens a file for reading and says how large it is.
  std::function<absl::StatusOr<ReadAt>(const std::string& path, uint64_t* bytes)> open;
};
// A link is not followed as the last part of a path.
FileAccess SystemFiles();

class Reader {
 public:
  // Called with bytes that were read since the last call, from any of the reading threads. An
  // error ends the reading.
  using Progress = std::function<absl::Status(uint64_t bytes)>;
  // Called with the bytes of a tensor, in order: `offset` bytes from its beginning.
  using Sink = absl::FunctionRef<absl::Status(uint64_t offset, std::span<const std::byte> data)>;

  // Reads the manifest and checks it (ParseManifest, CheckPieces), and that each file is there
  // with its size and the header that the manifest vouches for. NotFound: no such directory.
  // DataLoss names the file.
  static absl::StatusOr<Reader> Open(const std::string& directory, FileAccess files);

  const std::string& directory() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }

  // Gives the tensor's bytes to `sink`, then compares the checksum: DataLoss names file and
  // tensor, and then nothing that the sink was given may be used. Thread-safe.
  absl::Status Read(const FileEntry& file, const TensorEntry& tensor, Sink sink) const;

  // Reads the tensors of all files, or of those that are `wanted`, on up to `threads` threads,
  // `sink` being called from them. The first error is returned.
  using TensorSink = std::function<absl::Status(const FileEntry& file, const TensorEntry& tensor,
                                                uint64_t offset, std::span<const std::byte> data)>;
  using Wanted = std::function<bool(const FileEntry& file)>;
  absl::Status ReadAll(const TensorSink& sink, const Progress& progress, size_t threads,
                       const Wanted& wanted = nullptr) const;

  // Reads everything and compares all checksums.
  absl::Status Verify(const Progress& progress, size_t threads) const;

 private:
  Reader(std::string directory, FileAccess files)
      : directory_(std::move(directory)), files_(std::move(files)) {}
  absl::Status CheckHeader(const FileEntry& file) const;

  std::string directory_;
  FileAccess files_;
  Manifest manifest_;
};

}  // namespace shardd::checkpoint

#endif  // SHARDD_PROTO_CHECKPOINT_READER_H_

// The manifest of a checkpoint: docs/formats/checkpoint.md.
#ifndef SHARDD_PROTO_CHECKPOINT_MANIFEST_H_
#define SHARDD_PROTO_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/contract/layout.h"
#include "proto/contract/segments.h"
#include "proto/control.pb.h"

namespace shardd::checkpoint {

inline constexpr int kManifestVersion = 1;
inline constexpr char kManifestName[] = "manifest.json";
// Kinds of files besides the optimizer's states, whose kinds are their names.
inline constexpr char kModelKind[] = "model";
inline constexpr char kFrozenKind[] = "frozen";

// Bytes of one element.
uint64_t DTypeBytes(v1::DType dtype);

// One tensor of a file: a piece of a parameter.
struct TensorEntry {
  std::string name;
  uint32_t parameter = 0;  // index; of the frozen ones in a frozen file
  uint64_t offset = 0;     // the piece: elements in C order
  uint64_t elements = 0;
  uint64_t begin = 0;  // bytes from the start of the file
  uint64_t end = 0;
  uint32_t crc = 0;
};

struct FileEntry {
  std::string name;  // without a directory
  std::string kind;
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;
  uint32_t header_crc = 0;
  std::vector<TensorEntry> tensors;
};

struct ParameterState {
  uint64_t applied = 0;
  double beta1_product = 1;
  double beta2_product = 1;
};

struct Manifest {
  std::string writer;
  std::string job_id;
  uint32_t uid = 0;
  int64_t created_unix_nanos = 0;
  uint64_t step = 0;
  uint64_t applied = 0;
  uint64_t generation = 0;
  uint64_t timeline = 0;
  uint32_t member = 1;  // of `members`
  uint32_t members = 1;
  std::vector<std::string> states;  // of the optimizer, in its order
  v1::JobConfig config;
  v1::OpenRequest parameters;  // `parameters` and `frozen` only
  contract::Range chunks;      // that this member holds
  // Of the last decision; sequence 0: none. timeline, step, applied, generation and what counts
  // bytes are not kept here a second time.
  contract::DecisionHeader decision{};
  std::vector<uint64_t> presence;
  std::vector<contract::DecisionGroup> groups;
  std::string blob;
  std::optional<contract::StepRecordEntry> record;
  std::vector<ParameterState> parameter_states;  // of each parameter
  std::vector<FileEntry> files;

  const std::string& job() const { return config.name(); }
  // Of all files, without the manifest's own.
  uint64_t bytes() const;
};

// The whole file, with its checksum.
std::string SerializeManifest(const Manifest& manifest);

// DataLoss: the checksum, or what the text says, is wrong; FailedPrecondition: a version that
// this one does not read. `path` begins every message.
absl::StatusOr<Manifest> ParseManifest(const std::string& text, const std::string& path);

// The layout of the manifest's parameters. DataLoss begins with `path`.
absl::StatusOr<contract::Layout> ManifestLayout(const Manifest& manifest, const std::string& path);

// Whether the files' tensors are, for every kind, the pieces of all parameters in the member's
// chunks, each once and in its place. DataLoss names the first parameter that lacks one of its
// states, or the file and tensor that does not fit.
absl::Status CheckPieces(const Manifest& manifest, const std::string& path);

// "w" for a piece that is the whole parameter, else "w[0:4096]".
std::string PieceName(const std::string& parameter, uint64_t parameter_elements, uint64_t offset,
                      uint64_t elements);

}  // namespace shardd::checkpoint

#endif  // SHARDD_PROTO_CHECKPOINT_MANIFEST_H_

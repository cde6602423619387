#include "proto/checkpoint/manifest.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "proto/safetensors/format.h"

namespace shardd::checkpoint {

namespace {

absl::Status Wrong(const std::string& path, const std::string& what) {
  return absl::DataLossError(absl::StrCat(path, ": ", what, "; use another checkpoint"));
}

// The pieces of one kind that a member must hold, as (parameter, offset) -> elements.
using Pieces = std::map<std::pair<uint32_t, uint64_t>, uint64_t>;

Pieces PiecesOfChunks(const contract::Layout& layout, contract::Range chunks) {
  Pieces pieces;
  if (!chunks.empty()) {
    const contract::Range range{layout.chunk_range(chunks.begin).begin,
                                layout.chunk_range(chunks.end - 1).end};
    for (const contract::Run& run : layout.runs(range)) {
      pieces[{run.parameter, run.offset}] = run.range.size();
    }
  }
  for (uint32_t p = 0; p < layout.num_parameters(); ++p) {
    if (layout.parameter_elements(p) == 0) pieces[{p, 0}] = 0;
  }
  return pieces;
}

uint64_t FrozenElements(const v1::FrozenParameter& frozen) {
  uint64_t bytes = 0;
  const std::vector<int64_t> shape(frozen.shape().begin(), frozen.shape().end());
  return safetensors::ShapeBytes("", shape, safetensors::DType::kF32, &bytes).ok() ? bytes / 4 : 0;
}

// Of a tensor whose parameter is known to exist.
uint64_t ElementBytes(const Manifest& manifest, const FileEntry& file, const TensorEntry& tensor) {
  if (file.kind != kFrozenKind) return sizeof(float);
  return DTypeBytes(manifest.parameters.frozen(static_cast<int>(tensor.parameter)).dtype());
}

// What one file says of itself.
absl::Status CheckFile(const FileEntry& file, const std::string& path) {
  if (file.name.empty() || file.name[0] == '.' || file.name.find('/') != std::string::npos) {
    return Wrong(path, absl::StrCat("names a file '", file.name, "'"));
  }
  uint64_t at = file.header_bytes;
  for (const TensorEntry& tensor : file.tensors) {
    if (tensor.begin != at || tensor.end < tensor.begin) {
      return Wrong(path, absl::StrCat("file ", file.name, ", tensor '", tensor.name,
                                      "' does not lie where it should"));
    }
    at = tensor.end;
  }
  if (at != file.bytes) {
    return Wrong(path, absl::StrCat("file ", file.name, " does not end with its last tensor"));
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t DTypeBytes(v1::DType dtype) { return dtype == v1::fp32 ? 4 : 2; }

uint64_t Manifest::bytes() const {
  uint64_t sum = 0;
  for (const FileEntry& file : files) sum += file.bytes;
  return sum;
}

std::string PieceName(const std::string& parameter, uint64_t parameter_elements, uint64_t offset,
                      uint64_t elements) {
  if (offset == 0 && elements == parameter_elements) return parameter;
  return absl::StrCat(parameter, "[", offset, ":", offset + elements, "]");
}

absl::StatusOr<contract::Layout> ManifestLayout(const Manifest& manifest, const std::string& path) {
  std::vector<contract::ParameterSpec> specs;
  for (const v1::Parameter& p : manifest.parameters.parameters()) {
    specs.push_back({p.name(), {p.shape().begin(), p.shape().end()}, p.group()});
  }
  contract::Layout::Options options;
  options.chunk_elements = manifest.config.chunk_elements();
  options.bucket_elements = manifest.config.bucket_elements();
  options.groups = static_cast<uint32_t>(manifest.config.groups_size());
  absl::StatusOr<contract::Layout> layout = contract::Layout::Create(std::move(specs), options);
  if (!layout.ok()) return Wrong(path, std::string(layout.status().message()));
  return layout;
}

absl::Status CheckPieces(const Manifest& manifest, const std::string& path) {
  absl::StatusOr<contract::Layout> layout = ManifestLayout(manifest, path);
  if (!layout.ok()) return layout.status();
  if (manifest.chunks.begin > manifest.chunks.end || manifest.chunks.end > layout->num_chunks()) {
    return Wrong(path, "it holds chunks that the layout does not have");
  }
  std::vector<std::string> kinds = {kModelKind};
  kinds.insert(kinds.end(), manifest.states.begin(), manifest.states.end());
  std::map<std::string, Pieces> missing;
  for (const std::string& kind : kinds) {
    missing[kind] = PiecesOfChunks(*layout, manifest.chunks);
  }
  Pieces& frozen = missing[kFrozenKind];
  if (manifest.member == 1) {
    for (int f = 0; f < manifest.parameters.frozen_size(); ++f) {
      frozen[{static_cast<uint32_t>(f), 0}] = FrozenElements(manifest.parameters.frozen(f));
    }
  }
  for (const FileEntry& file : manifest.files) {
    if (absl::Status s = CheckFile(file, path); !s.ok()) return s;
    const auto pieces = missing.find(file.kind);
    if (pieces == missing.end()) {
      return Wrong(path,
                   absl::StrCat("file ", file.name, " is of the unknown kind '", file.kind, "'"));
    }
    for (const TensorEntry& tensor : file.tensors) {
      const auto piece = pieces->second.find({tensor.parameter, tensor.offset});
      if (piece == pieces->second.end() || piece->second != tensor.elements ||
          (tensor.end - tensor.begin) != tensor.elements * ElementBytes(manifest, file, tensor)) {
        return Wrong(path, absl::StrCat("file ", file.name, " has a tensor '", tensor.name,
                                        "' that belongs nowhere, or twice"));
      }
      pieces->second.erase(piece);
    }
  }
  for (const auto& [kind, pieces] : missing) {
    if (pieces.empty()) continue;
    const uint32_t parameter = pieces.begin()->first.first;
    const std::string name = kind == kFrozenKind
                                 ? manifest.parameters.frozen(static_cast<int>(parameter)).name()
                                 : layout->parameter(parameter).name;
    return Wrong(path, absl::StrCat("parameter '", name, "' has no ", kind,
                                    kind == kModelKind ? " weights" : ""));
  }
  return absl::OkStatus();
}

}  // namespace shardd::checkpoint

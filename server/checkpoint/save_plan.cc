#include "server/checkpoint/save_plan.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/optimizer.h"
#include "proto/contract/crc32c.h"
#include "proto/safetensors/format.h"

namespace shardd::checkpoint {

namespace {

// Data begin at a cache line.
constexpr size_t kHeaderAlignment = 64;

safetensors::DType FileDType(v1::DType dtype) {
  switch (dtype) {
    case v1::bf16:
      return safetensors::DType::kBF16;
    case v1::fp16:
      return safetensors::DType::kF16;
    default:
      return safetensors::DType::kF32;
  }
}

}  // namespace

// A tensor that has not found its file yet.
struct SavePlan::Tensor {
  TensorEntry entry;  // begin, end: unset
  safetensors::DType dtype = safetensors::DType::kF32;
  std::vector<int64_t> shape;
  uint64_t bytes() const { return entry.elements * safetensors::DTypeSize(dtype); }
};

std::vector<std::string> ArrayKinds(const v1::JobConfig& config) {
  std::vector<std::string> kinds = {kModelKind};
  for (std::string_view name : kernels::FindOptimizer(config.optimizer())->state_names()) {
    kinds.emplace_back(name);
  }
  return kinds;
}

absl::Status SavePlan::AddKind(const std::string& kind, const std::vector<Tensor>& tensors,
                               uint64_t file_bytes_max, std::vector<Place>* places) {
  // The files' first and last tensors.
  std::vector<size_t> ends;
  uint64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (bytes > 0 && bytes + tensors[i].bytes() > file_bytes_max) {
      ends.push_back(i);
      bytes = 0;
    }
    bytes += tensors[i].bytes();
  }
  ends.push_back(tensors.size());
  size_t first = 0;
  for (size_t n = 0; n < ends.size(); ++n) {
    FileEntry file;
    file.kind = kind;
    file.name = absl::StrFormat("%s-%05d-of-%05d.safetensors", kind, n + 1, ends.size());
    std::vector<safetensors::TensorInfo> infos;
    uint64_t at = 0;
    for (size_t i = first; i < ends[n]; ++i) {
      const Tensor& tensor = tensors[i];
      infos.push_back({tensor.entry.name, tensor.dtype, tensor.shape, at, at + tensor.bytes()});
      at += tensor.bytes();
    }
    absl::StatusOr<std::string> header =
        safetensors::EncodeHeader(file.name, {{"format", "pt"}}, infos, kHeaderAlignment);
    if (!header.ok()) return header.status();
    file.header_bytes = header->size();
    file.header_crc = contract::Crc32c(header->data(), header->size());
    file.bytes = header->size() + at;
    for (size_t i = first; i < ends[n]; ++i) {
      TensorEntry entry = tensors[i].entry;
      entry.begin = file.header_bytes + infos[i - first].begin;
      entry.end = file.header_bytes + infos[i - first].end;
      (*places)[entry.parameter] = {static_cast<uint32_t>(files_.size()),
                                    static_cast<uint32_t>(file.tensors.size())};
      file.tensors.push_back(std::move(entry));
    }
    files_.push_back(std::move(file));
    headers_.push_back(*std::move(header));
    first = ends[n];
  }
  return absl::OkStatus();
}

absl::StatusOr<SavePlan> SavePlan::Create(const step::StateSnapshot& snapshot, uint32_t member,
                                          uint64_t file_bytes_max) {
  const contract::Layout& layout = snapshot.layout;
  std::vector<Tensor> pieces;
  const auto add_piece = [&](uint32_t p, uint64_t offset, uint64_t elements) {
    Tensor tensor;
    const contract::ParameterSpec& spec = layout.parameter(p);
    const uint64_t all = layout.parameter_elements(p);
    tensor.entry.name = PieceName(spec.name, all, offset, elements);
    tensor.entry.parameter = p;
    tensor.entry.offset = offset;
    tensor.entry.elements = elements;
    tensor.shape =
        elements == all ? spec.shape : std::vector<int64_t>{static_cast<int64_t>(elements)};
    pieces.push_back(std::move(tensor));
  };
  contract::Range held;
  if (!snapshot.chunks.empty()) {
    held = {layout.chunk_range(snapshot.chunks.begin).begin,
            layout.chunk_range(snapshot.chunks.end - 1).end};
  }
  // In registration order; parameters without elements where they stand.
  for (uint32_t p = 0; p < layout.num_parameters(); ++p) {
    const contract::Range range = layout.parameter_range(p);
    if (layout.parameter_elements(p) == 0) {
      add_piece(p, 0, 0);
      continue;
    }
    const uint64_t begin = std::max(range.begin, held.begin), end = std::min(range.end, held.end);
    if (begin < end) add_piece(p, begin - range.begin, end - begin);
  }
  SavePlan plan;
  for (const std::string& kind : ArrayKinds(snapshot.config)) {
    std::vector<Tensor> tensors = pieces;
    if (kind != kModelKind) {
      for (Tensor& tensor : tensors) absl::StrAppend(&tensor.entry.name, ".", kind);
    }
    plan.places_.emplace_back(layout.num_parameters());
    absl::Status status = plan.AddKind(kind, tensors, file_bytes_max, &plan.places_.back());
    if (!status.ok()) return status;
  }
  const auto& frozen = snapshot.parameters.frozen();
  if (member == 1 && !frozen.empty()) {
    std::vector<Tensor> tensors;
    for (const v1::FrozenParameter& parameter : frozen) {
      Tensor tensor;
      tensor.entry.name = parameter.name();
      tensor.entry.parameter = static_cast<uint32_t>(tensors.size());
      tensor.dtype = FileDType(parameter.dtype());
      tensor.shape.assign(parameter.shape().begin(), parameter.shape().end());
      uint64_t bytes = 0;
      absl::Status status =
          safetensors::ShapeBytes(parameter.name(), tensor.shape, tensor.dtype, &bytes);
      if (!status.ok()) return status;
      tensor.entry.elements = bytes / safetensors::DTypeSize(tensor.dtype);
      tensors.push_back(std::move(tensor));
    }
    plan.frozen_places_.resize(tensors.size());
    absl::Status status = plan.AddKind(kFrozenKind, tensors, file_bytes_max, &plan.frozen_places_);
    if (!status.ok()) return status;
  }
  return plan;
}

uint64_t SavePlan::bytes() const {
  uint64_t sum = 0;
  for (const FileEntry& file : files_) sum += file.bytes;
  return sum;
}

}  // namespace shardd::checkpoint

#include "trainer/export_master.h"

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "proto/safetensors/writer.h"

namespace shardd::trainer {
namespace {

constexpr uint64_t kPieceElements = uint64_t{1} << 20;

}  // namespace

absl::Status ExportMaster(Session* session, const models::Model& model,
                          const std::map<std::string, std::string>& metadata,
                          const std::string& path) {
  auto writer = safetensors::Writer::Create(path, {.metadata = metadata});
  if (!writer.ok()) return writer.status();
  for (const tensor::Parameter* parameter : model.parameters()) {
    absl::Status status =
        (*writer)->Declare(parameter->name(), safetensors::DType::kF32, parameter->shape());
    if (!status.ok()) return status;
  }
  std::vector<float> piece;
  for (size_t index = 0; index < model.parameters().size(); ++index) {
    const uint64_t elements = static_cast<uint64_t>(model.parameters()[index]->elements());
    for (uint64_t offset = 0; offset < elements; offset += piece.size()) {
      piece.resize(std::min(kPieceElements, elements - offset));
      absl::Status status = session->ReadState(StateKind::kMaster, index, offset, piece);
      if (!status.ok()) return status;
      status = (*writer)->Append(std::as_bytes(std::span<const float>(piece)));
      if (!status.ok()) return status;
    }
  }
  return (*writer)->Finish();
}

}  // namespace shardd::trainer

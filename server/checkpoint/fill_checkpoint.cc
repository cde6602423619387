#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/optimizer.h"
#include "server/checkpoint/fill.h"
#include "server/checkpoint/save_plan.h"
#include "server/store/decision_log.h"

namespace shardd::checkpoint {

namespace {

// Copies elements of the flat space into one array (0: the master) of the chunks they lie in.
void CopyIn(const store::JobSegments& segments, const contract::Layout& layout, size_t array,
            uint64_t begin, std::span<const std::byte> data) {
  for (uint64_t at = 0; at < data.size();) {
    const uint64_t element = begin + at / sizeof(float);
    const uint64_t chunk = element / layout.chunk_elements();
    const uint64_t inside = element % layout.chunk_elements();
    const uint64_t part =
        std::min<uint64_t>(data.size() - at, (layout.chunk_elements() - inside) * sizeof(float));
    const store::ChunkView view = segments.chunk(chunk);
    view.Write(array, inside, part / sizeof(float),
               reinterpret_cast<const float*>(data.data() + at));
    at += part;
  }
}

void FillDecision(const Manifest& m, const contract::Layout& layout, store::JobSegments* segments) {
  contract::JobHeader* header = segments->header();
  header->generation.store(std::max<uint64_t>(m.generation, 1));
  for (uint64_t c = 0; c < layout.num_chunks(); ++c) {
    segments->chunk(c).header->applied.store(m.applied, std::memory_order_release);
  }
  store::DecisionLog log(&segments->job());
  const bool decided = m.decision.sequence != 0;
  const auto table = log.table(decided ? 1 : 0);
  for (size_t p = 0; p < m.parameter_states.size(); ++p) {
    table[p].applied = m.parameter_states[p].applied;
    table[p].beta1_product = m.parameter_states[p].beta1_product;
    table[p].beta2_product = m.parameter_states[p].beta2_product;
  }
  if (!decided) return;
  if (m.record.has_value()) log.PutRecord(*m.record);
  store::Decision decision;
  decision.header = m.decision;
  decision.header.sequence = 1;
  decision.header.step = m.step;
  decision.header.applied = m.applied;
  decision.header.generation = m.generation;
  decision.presence = m.presence;
  decision.groups = m.groups;
  decision.blob = m.blob;
  log.Write(&decision);
}

}  // namespace

FileAccess AccessThrough(env::FileSystem* files) {
  FileAccess access;
  access.open = [files](const std::string& path,
                        uint64_t* bytes) -> absl::StatusOr<FileAccess::ReadAt> {
    absl::StatusOr<std::unique_ptr<env::File>> file =
        files->Open(path, {.mode = env::OpenMode::kRead});
    if (!file.ok()) return file.status();
    absl::StatusOr<uint64_t> size = (*file)->Size();
    if (!size.ok()) return size.status();
    *bytes = *size;
    const std::shared_ptr<env::File> shared = *std::move(file);
    return
        [shared](uint64_t offset, std::span<std::byte> out) { return shared->ReadAt(offset, out); };
  };
  return access;
}

absl::StatusOr<store::JobSpec> SpecOf(const Reader& reader) {
  const Manifest& m = reader.manifest();
  const kernels::Optimizer* optimizer = kernels::FindOptimizer(m.config.optimizer());
  if (optimizer == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(reader.directory(), ": was trained with the optimizer '", m.config.optimizer(),
                     "', which this daemon does not have"));
  }
  std::vector<std::string> kinds = ArrayKinds(m.config);
  kinds.erase(kinds.begin());
  for (const std::string& kind : kinds) {
    if (std::find(m.states.begin(), m.states.end(), kind) != m.states.end()) continue;
    return absl::DataLossError(absl::StrCat(
        reader.directory(), ": has no ", kind, " (of ", m.config.optimizer(), "), only ",
        m.states.empty() ? "weights" : absl::StrJoin(m.states, ", "), "; use another checkpoint"));
  }
  if (m.states != kinds) {
    return absl::DataLossError(absl::StrCat(reader.directory(), ": its states are ",
                                            absl::StrJoin(m.states, ", "), ", not those of ",
                                            m.config.optimizer()));
  }
  store::JobSpec spec;
  spec.config = m.config;
  spec.parameters = m.parameters.SerializeAsString();
  spec.uid = m.uid;
  spec.moments = optimizer->num_states();
  absl::StatusOr<std::vector<uint64_t>> frozen = store::FrozenBytes(m.parameters);
  if (!frozen.ok()) return frozen.status();
  spec.frozen_bytes = *std::move(frozen);
  return spec;
}

absl::Status FillFromCheckpoint(const Reader& reader, const contract::Layout& layout,
                                Operation* operation, size_t threads,
                                store::JobSegments* segments) {
  const Manifest& m = reader.manifest();
  const std::vector<std::string> kinds = ArrayKinds(m.config);
  const auto sink = [&](const FileEntry& file, const TensorEntry& tensor, uint64_t offset,
                        std::span<const std::byte> data) -> absl::Status {
    if (file.kind == kFrozenKind) return segments->WriteFrozen(tensor.parameter, offset, data);
    const auto kind = std::find(kinds.begin(), kinds.end(), file.kind);
    const uint64_t element =
        layout.parameter_range(tensor.parameter).begin + tensor.offset + offset / sizeof(float);
    CopyIn(*segments, layout, static_cast<size_t>(kind - kinds.begin()), element, data);
    return absl::OkStatus();
  };
  absl::Status status = reader.ReadAll(
      sink, [operation](uint64_t bytes) { return operation->Advance(bytes); }, threads);
  if (!status.ok()) return status;
  FillDecision(m, layout, segments);
  segments->header()->initialised.store(1, std::memory_order_release);
  return absl::OkStatus();
}

}  // namespace shardd::checkpoint

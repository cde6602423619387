#include "server/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/contract/crc32c.h"
#include "server/checkpoint/owner.h"
#include "server/checkpoint/staged_writer.h"

namespace shardd::checkpoint {

namespace {

using contract::Crc32c;

constexpr size_t kFrozenBlockBytes = size_t{1} << 20;

// Of files that are written at the same time: one of each kind.
size_t MaxOpenFiles(const v1::JobConfig& config) { return ArrayKinds(config).size(); }

class PartWriter final : public CheckpointWriter {
 public:
  // `snapshot` has the part's chunks alone.
  PartWriter(const WriteOptions& options, step::StateCopy* copy, step::StateSnapshot snapshot,
             uint32_t member, Operation* operation, SavePlan plan)
      : options_(options),
        copy_(copy),
        snapshot_(std::move(snapshot)),
        operation_(operation),
        plan_(std::move(plan)),
        throttle_(options.rate_bytes_per_second, operation),
        directory_{snapshot_.decision.header.step, member, snapshot_.members},
        temporary_(env::JoinPath(options.job_directory, TemporaryName(directory_))),
        final_(env::JoinPath(options.job_directory, DirectoryName(directory_))),
        appended_(plan_.files().size()) {}

  ~PartWriter() override {
    if (published_) return;
    writer_.reset();
    // Whatever it cannot remove, the next save does.
    env::RemoveTree(options_.files, temporary_).IgnoreError();
  }

  absl::Status Write() override {
    absl::Status status = CheckSpace(options_.files, options_.job_directory, plan_.bytes());
    if (!status.ok()) return status;
    status = env::RemoveTree(options_.files, temporary_);
    if (status.ok()) status = options_.files->MakeDirectory(temporary_);
    if (status.ok()) status = CreateFiles();
    if (status.ok()) status = WriteChunks();
    if (status.ok()) status = WriteFrozen();
    if (status.ok()) status = FinishFiles();
    if (status.ok()) status = WriteManifest();
    if (status.ok()) status = options_.files->SyncDirectory(temporary_);
    return status;
  }

  absl::StatusOr<std::string> Publish() override {
    if (absl::Status status = GiveName(); !status.ok()) return status;
    published_ = true;
    return final_;
  }

 private:
  absl::Status CreateFiles() {
    // One of each kind at a time: tensors lie in a kind's files in the order of the chunks.
    writer_.emplace(MaxOpenFiles(snapshot_.config));
    for (const FileEntry& entry : plan_.files()) {
      absl::StatusOr<std::unique_ptr<env::File>> file = options_.files->Open(
          env::JoinPath(temporary_, entry.name), {.mode = env::OpenMode::kCreate, .direct = true});
      if (!file.ok()) return file.status();
      absl::Status status = writer_->AddFile(*std::move(file), entry.bytes);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // The header comes before the first of a file's data.
  absl::Status BeginFile(uint32_t file) {
    if (appended_[file] > 0) return absl::OkStatus();
    const std::string& header = plan_.header(file);
    appended_[file] = header.size();
    return writer_->Append(file, std::as_bytes(std::span(header)));
  }

  // `data` of a tensor that begin `offset` bytes behind the tensor's own beginning.
  absl::Status Append(SavePlan::Place place, uint64_t offset, std::span<const std::byte> data) {
    if (data.empty()) return absl::OkStatus();
    TensorEntry& tensor = plan_.files()[place.file].tensors[place.tensor];
    if (absl::Status status = BeginFile(place.file); !status.ok()) return status;
    if (appended_[place.file] != tensor.begin + offset) {
      return absl::InternalError(absl::StrCat("tensor '", tensor.name, "' is out of turn"));
    }
    tensor.crc = Crc32c(data.data(), data.size(), tensor.crc);
    appended_[place.file] += data.size();
    return writer_->Append(place.file, data);
  }

  absl::Status WriteChunks() {
    const size_t arrays = static_cast<size_t>(snapshot_.moments) + 1;
    for (uint64_t c = snapshot_.chunks.begin; c < snapshot_.chunks.end; ++c) {
      uint64_t bytes = 0;  // without what lies between parameters
      for (const contract::Run& run : snapshot_.layout.runs(snapshot_.layout.chunk_range(c))) {
        bytes += run.range.size() * sizeof(float) * arrays;
      }
      absl::Status status = throttle_.Spend(bytes);
      if (status.ok()) {
        status = copy_->Take(
            c, [&](const step::ChunkArrays& chunk) { return WriteChunk(c, arrays, chunk); });
      }
      if (status.ok()) status = operation_->Advance(bytes);
      if (!status.ok()) return operation_->cancelled() ? operation_->CancelledStatus() : status;
    }
    return absl::OkStatus();
  }

  absl::Status WriteChunk(uint64_t c, size_t arrays, const step::ChunkArrays& chunk) {
    const contract::Range range = snapshot_.layout.chunk_range(c);
    const std::vector<contract::Run> runs = snapshot_.layout.runs(range);
    for (size_t a = 0; a < arrays; ++a) {
      const float* array = a == 0 ? chunk.master : chunk.moment[a - 1];
      for (const contract::Run& run : runs) {
        const SavePlan::Place place = plan_.place(a, run.parameter);
        const TensorEntry& tensor = plan_.files()[place.file].tensors[place.tensor];
        absl::Status status = Append(
            place, (run.offset - tensor.offset) * sizeof(float),
            std::as_bytes(std::span(array + (run.range.begin - range.begin), run.range.size())));
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status WriteFrozen() {
    if (directory_.member != 1 || snapshot_.parameters.frozen().empty()) return absl::OkStatus();
    std::vector<std::byte> block(kFrozenBlockBytes);
    for (uint32_t f = 0; f < static_cast<uint32_t>(snapshot_.parameters.frozen_size()); ++f) {
      const SavePlan::Place place = plan_.frozen_place(f);
      const TensorEntry& tensor = plan_.files()[place.file].tensors[place.tensor];
      const uint64_t size = tensor.end - tensor.begin;
      for (uint64_t at = 0; at < size; at += block.size()) {
        const std::span<std::byte> part(block.data(), std::min<uint64_t>(block.size(), size - at));
        absl::Status status = throttle_.Spend(part.size());
        if (status.ok()) status = options_.read_frozen(f, at, part);
        if (!status.ok()) return status;
        status = Append(place, at, part);
        if (status.ok()) status = operation_->Advance(part.size());
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status FinishFiles() {
    for (uint32_t f = 0; f < plan_.files().size(); ++f) {  // those without any data
      if (absl::Status status = BeginFile(f); !status.ok()) return status;
    }
    if (operation_->cancelled()) return operation_->CancelledStatus();
    if (absl::Status status = writer_->Finish(); !status.ok()) return status;
    writer_.reset();
    return operation_->cancelled() ? operation_->CancelledStatus() : absl::OkStatus();
  }

  absl::Status WriteManifest() {
    const std::string text = SerializeManifest(MakeManifest());
    const std::string path = env::JoinPath(temporary_, kManifestName);
    absl::StatusOr<std::unique_ptr<env::File>> file =
        options_.files->Open(path, {.mode = env::OpenMode::kCreate});
    if (!file.ok()) return file.status();
    absl::Status status = (*file)->WriteAt(0, std::as_bytes(std::span(text)));
    if (status.ok()) status = (*file)->Sync();
    if (status.ok()) status = GiveTo(snapshot_.uid, temporary_, plan_.files());
    return status;
  }

  Manifest MakeManifest() const {
    Manifest m;
    const contract::DecisionHeader& decision = snapshot_.decision.header;
    m.writer = options_.writer;
    m.job_id = snapshot_.job_id;
    m.uid = snapshot_.uid;
    m.created_unix_nanos = snapshot_.unix_nanos;
    m.step = decision.step;
    m.applied = decision.applied;
    m.generation = snapshot_.generation;
    m.timeline = snapshot_.timeline;
    m.member = directory_.member;
    m.members = directory_.members;
    m.states = ArrayKinds(snapshot_.config);
    m.states.erase(m.states.begin());
    m.config = snapshot_.config;
    m.parameters = snapshot_.parameters;
    m.chunks = snapshot_.chunks;
    m.decision = decision;
    m.presence = snapshot_.decision.presence;
    m.groups = snapshot_.decision.groups;
    m.blob = snapshot_.decision.blob;
    m.record = snapshot_.record;
    for (const contract::ParameterEntry& entry : snapshot_.table) {
      m.parameter_states.push_back({entry.applied, entry.beta1_product, entry.beta2_product});
    }
    m.files = plan_.files();
    return m;
  }

  // From here on the new one is complete; until the rename the old one is.
  absl::Status GiveName() {
    const std::string old = absl::StrCat(temporary_, ".old.new");
    absl::Status status = absl::OkStatus();
    const bool replaces = options_.files->Stat(final_).ok();
    // A directory is not replaced at once by a rename: the old one steps aside under a name that
    // the next save removes.
    if (replaces) status = options_.files->Rename(final_, old);
    if (!status.ok()) return status;
    status = options_.files->Rename(temporary_, final_);
    if (!status.ok()) {
      if (replaces) options_.files->Rename(old, final_).IgnoreError();
      return status;
    }
    status = options_.files->SyncDirectory(options_.job_directory);
    if (status.ok() && replaces) status = env::RemoveTree(options_.files, old);
    return status;
  }

  const WriteOptions& options_;
  step::StateCopy* const copy_;
  const step::StateSnapshot snapshot_;
  Operation* const operation_;
  SavePlan plan_;
  Throttle throttle_;
  const StepDirectory directory_;
  const std::string temporary_, final_;
  std::optional<StagedWriter> writer_;
  std::vector<uint64_t> appended_;  // [files], bytes
  bool published_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointWriter>> CheckpointWriter::Create(
    const WriteOptions& options, step::StateCopy* copy, const step::StateSnapshot::Part& part,
    Operation* operation) {
  step::StateSnapshot snapshot = copy->snapshot();
  snapshot.chunks = part.chunks;
  absl::StatusOr<SavePlan> plan = SavePlan::Create(snapshot, part.member, options.file_bytes_max);
  if (!plan.ok()) return plan.status();
  operation->Update([&](v1::CheckpointProgress* p) {
    uint64_t data = 0;
    for (const FileEntry& file : plan->files()) data += file.bytes - file.header_bytes;
    p->set_stage("writing");
    p->set_step(snapshot.decision.header.step);
    p->set_total_bytes(p->total_bytes() + data);
  });
  return std::make_unique<PartWriter>(options, copy, std::move(snapshot), part.member, operation,
                                      *std::move(plan));
}

uint64_t StagingBytes(const v1::JobConfig& config) {
  return StagedWriter::MemoryBytes(MaxOpenFiles(config));
}

uint64_t EstimateBytes(const contract::Layout& layout, const v1::JobConfig& config,
                       const v1::OpenRequest& parameters) {
  uint64_t bytes = layout.trainable_elements() * sizeof(float) * ArrayKinds(config).size();
  for (const v1::FrozenParameter& frozen : parameters.frozen()) {
    uint64_t elements = 1;
    for (int64_t extent : frozen.shape()) elements *= static_cast<uint64_t>(extent);
    bytes += elements * DTypeBytes(frozen.dtype());
  }
  return bytes;
}

absl::Status CheckSpace(env::FileSystem* files, const std::string& directory, uint64_t bytes) {
  absl::StatusOr<uint64_t> free = files->FreeBytes(directory);
  if (!free.ok()) return free.status();
  if (bytes <= *free) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(directory, ": ", bytes, " bytes are to be written, but its file system has ",
                   *free, " free; remove old checkpoints there (save with --keep), or enlarge it"));
}

absl::StatusOr<int> RemoveLeftovers(env::FileSystem* files, const std::string& job_directory) {
  absl::StatusOr<std::vector<std::string>> names = files->List(job_directory);
  if (!names.ok()) return names.status();
  // A checkpoint that stepped aside for its successor, which then did not come: it comes back.
  const std::set<std::string> present(names->begin(), names->end());
  int removed = 0;
  for (const std::string& name : *names) {
    if (!IsTemporaryName(name)) continue;
    const std::string path = env::JoinPath(job_directory, name);
    const std::string aside = ".new.old.new";
    if (name.size() > aside.size() &&
        name.compare(name.size() - aside.size(), aside.size(), aside) == 0) {
      const std::string original = name.substr(1, name.size() - aside.size() - 1);
      if (ParseDirectoryName(original).has_value() && !present.contains(original)) {
        absl::Status status = files->Rename(path, env::JoinPath(job_directory, original));
        if (status.ok()) status = files->SyncDirectory(job_directory);
        if (!status.ok()) return status;
        continue;
      }
    }
    absl::StatusOr<env::FileInfo> info = files->Stat(path);
    if (!info.ok()) return info.status();
    absl::Status status = info->is_directory ? env::RemoveTree(files, path) : files->Remove(path);
    if (!status.ok()) return status;
    ++removed;
  }
  return removed;
}

absl::Status RemoveOldSteps(env::FileSystem* files, const std::string& job_directory,
                            uint32_t keep) {
  if (keep == 0) return absl::OkStatus();
  absl::StatusOr<std::vector<std::string>> names = files->List(job_directory);
  if (!names.ok()) return names.status();
  const std::vector<StepDirectory> directories = StepsAmong(*names);
  std::set<uint64_t> steps;
  for (const StepDirectory& directory : directories) steps.insert(directory.step);
  if (steps.size() <= keep) return absl::OkStatus();
  const uint64_t oldest_kept =
      *std::next(steps.begin(), static_cast<ptrdiff_t>(steps.size() - keep));
  for (const StepDirectory& directory : directories) {
    if (directory.step >= oldest_kept) continue;
    // Under a name that no reader takes, before the first of its files goes.
    const std::string aside = env::JoinPath(job_directory, TemporaryName(directory));
    absl::Status status =
        files->Rename(env::JoinPath(job_directory, DirectoryName(directory)), aside);
    if (absl::IsNotFound(status)) continue;  // another daemon of the job was first
    if (status.ok()) status = files->SyncDirectory(job_directory);
    if (status.ok()) status = env::RemoveTree(files, aside);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace shardd::checkpoint

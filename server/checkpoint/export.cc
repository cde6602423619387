// Manager::Export.
#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "kernels/isa.h"
#include "proto/checkpoint/export_plan.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/manager_parts.h"
#include "server/checkpoint/owner.h"

namespace shardd::checkpoint {

namespace {

constexpr uint64_t kFrozenBlockElements = uint64_t{256} << 10;

// A name for a file beside the checkpoints, that is none of theirs.
absl::Status CheckFileName(const std::string& name) {
  if (name.empty() || name.size() > 200 || name.front() == '.' ||
      name.find('/') != std::string::npos || absl::StartsWith(name, "step-")) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", name,
                     "' cannot be the name of an exported file: 1 to 200 bytes, no '/', "
                     "not beginning with '.' or 'step-'"));
  }
  return absl::OkStatus();
}

kernels::DType ToKernel(v1::DType dtype) { return static_cast<kernels::DType>(dtype); }

class Export {
 public:
  Export(const ExportPlan& plan, env::File* file, step::StateCopy* copy, Operation* operation)
      : plan_(plan), file_(file), copy_(copy), operation_(operation) {}

  // All chunks, on `threads` threads; the first error is returned.
  absl::Status WriteChunks(size_t threads) {
    const contract::Range chunks = copy_->snapshot().chunks;
    std::atomic<uint64_t> next{chunks.begin};
    std::mutex mutex;
    absl::Status first;  // under mutex
    const auto work = [&] {
      for (uint64_t c = next++; c < chunks.end; c = next++) {
        absl::Status status =
            copy_->Take(c, [&](const step::ChunkArrays& chunk) { return WriteChunk(c, chunk); });
        if (status.ok()) continue;
        next = chunks.end;
        const std::lock_guard lock(mutex);
        if (first.ok()) first = std::move(status);
      }
    };
    std::vector<std::thread> others;
    for (size_t t = 1; t < threads; ++t) others.emplace_back(work);
    work();
    for (std::thread& thread : others) thread.join();
    return first;
  }

  absl::Status WriteFrozen(const store::JobSegments& segments) {
    const auto& frozen = copy_->snapshot().parameters.frozen();
    std::vector<std::byte> raw(kFrozenBlockElements * sizeof(float));
    std::vector<float> wide(kFrozenBlockElements);
    for (int f = 0; f < frozen.size(); ++f) {
      const size_t index = static_cast<size_t>(f);
      const kernels::DType dtype = ToKernel(frozen[f].dtype());
      const uint64_t size = kernels::DTypeSize(dtype);
      const uint64_t elements = segments.frozen_bytes(index) / size;
      for (uint64_t at = 0; at < elements; at += kFrozenBlockElements) {
        const uint64_t count = std::min(kFrozenBlockElements, elements - at);
        const std::span<std::byte> part(raw.data(), count * size);
        absl::Status status = segments.ReadFrozen(index, at * size, part);
        if (!status.ok()) return status;
        kernels::ToFp32(isa_, raw.data(), dtype, count, wide.data());
        for (const uint64_t place : plan_.frozen[index]) {
          status = Write(place + at * plan_.element_bytes(), wide.data(), count);
          if (!status.ok()) return status;
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status WriteChunk(uint64_t c, const step::ChunkArrays& chunk) {
    const contract::Layout& layout = copy_->snapshot().layout;
    const contract::Range range = layout.chunk_range(c);
    for (const contract::Run& run : layout.runs(range)) {
      for (const uint64_t place : plan_.parameters[run.parameter]) {
        absl::Status status =
            Write(place + run.offset * plan_.element_bytes(),
                  chunk.master + (run.range.begin - range.begin), run.range.size());
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Write(uint64_t offset, const float* values, uint64_t count) {
    std::span<const std::byte> data = std::as_bytes(std::span(values, count));
    std::vector<uint16_t> narrow;
    if (plan_.dtype == safetensors::DType::kBF16) {
      narrow.resize(count);
      kernels::MasterToWeight(isa_, values, count, narrow.data(), kernels::DType::kBFloat16);
      data = std::as_bytes(std::span(narrow));
    }
    absl::Status status = file_->WriteAt(offset, data);
    return status.ok() ? operation_->Advance(data.size()) : status;
  }

  const ExportPlan& plan_;
  env::File* const file_;
  step::StateCopy* const copy_;
  Operation* const operation_;
  const kernels::Isa isa_ = kernels::BestIsa();
};

}  // namespace

std::shared_ptr<Operation> Manager::Export(Caller caller, v1::ExportWeightsRequest request,
                                           Report report, Done done) {
  return Begin(request.job(), std::move(report), std::move(done),
               [this, caller, request](const auto& operation, const Done&) {
                 return RunExport(caller, request, operation);
               });
}

absl::Status Manager::RunExport(Caller caller, const v1::ExportWeightsRequest& request,
                                const std::shared_ptr<Operation>& operation) {
  if (absl::Status s = CheckConfigured(); !s.ok()) return s;
  absl::StatusOr<std::shared_ptr<step::Job>> found =
      options_.jobs->Find(request.job(), caller.uid, caller.privileged);
  if (!found.ok()) return found.status();
  const std::shared_ptr<step::Job>& job = *found;
  absl::StatusOr<std::unique_ptr<Claim>> claim = Claim::Take(this, request.job(), operation);
  if (!claim.ok()) return claim.status();
  const v1::DType dtype = request.dtype() == 0 ? v1::fp32 : request.dtype();
  if (absl::Status s = PrepareDirectory(*job); !s.ok()) return s;
  absl::StatusOr<Copy> copy = TakeCopy(job, 0, true, false, nullptr, operation);
  if (!copy.ok()) return copy.status();
  const step::StateSnapshot& snapshot = copy->copy->snapshot();
  const uint64_t step = snapshot.decision.header.step;
  const std::string name =
      !request.file().empty()
          ? request.file()
          : absl::StrCat("export-step-", step, "-", v1::DType_Name(dtype), ".safetensors");
  if (absl::Status s = CheckFileName(name); !s.ok()) return s;
  absl::StatusOr<ExportPlan> plan =
      PlanExport(snapshot.parameters, dtype, request.prefix(),
                 {{"format", "pt"}, {"job", job->name()}, {"step", absl::StrCat(step)}});
  if (!plan.ok()) return plan.status();
  const std::string directory = JobDirectory(job->name());
  absl::Status status = CheckSpace(options_.files, directory, plan->bytes);
  if (!status.ok()) return status;
  operation->Update([&](v1::CheckpointProgress* p) {
    p->set_stage("writing");
    p->set_total_bytes(plan->bytes - plan->header.size());
  });
  const std::string temporary = env::JoinPath(directory, absl::StrCat(".", name, ".new"));
  const std::string path = env::JoinPath(directory, name);
  absl::StatusOr<std::unique_ptr<env::File>> file =
      options_.files->Open(temporary, {.mode = env::OpenMode::kCreateOrEmpty});
  if (!file.ok()) return file.status();
  status = (*file)->WriteAt(0, std::as_bytes(std::span(plan->header)));
  class Export writer(*plan, file->get(), copy->copy.get(), operation.get());
  if (status.ok()) status = writer.WriteChunks(options_.threads);
  if (status.ok()) status = writer.WriteFrozen(job->segments());
  if (status.ok()) status = (*file)->Sync();
  file->reset();
  if (status.ok()) status = GiveFileTo(snapshot.uid, temporary);
  if (status.ok() && operation->cancelled()) status = operation->CancelledStatus();
  if (status.ok()) status = options_.files->Rename(temporary, path);
  if (status.ok()) status = options_.files->SyncDirectory(directory);
  if (!status.ok()) {
    options_.files->Remove(temporary).IgnoreError();
    return operation->cancelled() ? operation->CancelledStatus() : status;
  }
  operation->Update([&](v1::CheckpointProgress* p) { p->set_path(path); });
  return absl::OkStatus();
}

}  // namespace shardd::checkpoint

// Verbs about the job as a whole: checkpoints, and parameters that are not trained.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/session_impl.h"

namespace shardd {

namespace {

// Parts of a frozen upload, so that the daemon reads one while the next is written.
constexpr uint64_t kUploadParts = 4;

uint64_t FrozenBytes(const FrozenSpec& spec) {
  uint64_t bytes = DTypeBytes(spec.dtype);
  for (int64_t extent : spec.shape) bytes *= static_cast<uint64_t>(extent);
  return bytes;
}

}  // namespace

absl::Status SessionImpl::CheckFrozen(size_t index, uint64_t offset, uint64_t bytes) const {
  if (index >= parts_.job.frozen.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("frozen parameter ", index, ": the job has ", parts_.job.frozen.size()));
  }
  const uint64_t all = FrozenBytes(parts_.job.frozen[index]);
  if (offset <= all && bytes <= all - offset) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(bytes, " bytes at ", offset, " of frozen parameter '",
                   parts_.job.frozen[index].name, "', which has ", all));
}

absl::Status SessionImpl::UploadFrozen(size_t index, uint64_t offset,
                                       std::span<const std::byte> bytes) {
  return RunVerb([&]() -> absl::Status {
    absl::Status status = CheckFrozen(index, offset, bytes.size());
    if (!status.ok()) return status;
    const uint64_t unit = contract::kLineBytes;
    const bool ends = offset + bytes.size() == FrozenBytes(parts_.job.frozen[index]);
    if (offset % unit != 0 || (bytes.size() % unit != 0 && !ends)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "an upload of ", bytes.size(), " bytes at ", offset, " of frozen parameter '",
          parts_.job.frozen[index].name, "': a part begins at a multiple of ", unit,
          " and ends at one or at the parameter's end"));
    }
    if (bytes.empty()) return absl::OkStatus();
    if (!initialising()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job '", parts_.job.name, "' has its weights; upload only while initialising()"));
    }
    const uint64_t part = parts_.ring->data_bytes() / kUploadParts / unit * unit;
    for (uint64_t at = 0; at < bytes.size() && status.ok(); at += part) {
      const auto some = bytes.subspan(at, std::min<uint64_t>(part, bytes.size() - at));
      contract::Descriptor descriptor{};
      descriptor.bucket = static_cast<uint32_t>(index);
      descriptor.begin = offset + at;
      descriptor.count = some.size();
      descriptor.kind = static_cast<uint8_t>(contract::DescriptorKind::kFrozen);
      status = PublishUpload(descriptor, some);
    }
    return status;
  });
}

absl::Status SessionImpl::ReadFrozen(size_t index, uint64_t offset, std::span<std::byte> out) {
  if (absl::Status s = CheckFrozen(index, offset, out.size()); !s.ok()) return s;
  return RunRead([&]() -> absl::Status {
    const uint64_t room = parts_.daemon.window.size();
    for (size_t at = 0; at < out.size();) {
      const size_t count = std::min<size_t>(out.size() - at, room);
      v1::FillWindowRequest request;
      request.set_kind(v1::STATE_FROZEN);
      request.set_parameter(static_cast<uint32_t>(index));
      request.set_offset(offset + at);
      request.set_count(count);
      absl::Status status = parts_.daemon.control->FillWindow(request).status();
      if (!status.ok()) return status;
      std::memcpy(out.data() + at, parts_.daemon.window.data(), count);
      at += count;
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<SavedCheckpoint> SessionImpl::SaveCheckpoint(const SaveOptions& options) {
  v1::SaveCheckpointRequest request;
  request.set_job(parts_.job.name);
  request.set_keep(options.keep);
  request.set_rate_bytes_per_second(options.rate_bytes_per_second);
  request.set_detach(!options.wait);
  absl::StatusOr<v1::CheckpointProgress> progress;
  absl::Status status = RunRead([&] {
    progress = parts_.daemon.control->SaveCheckpoint(request);
    return progress.status();
  });
  if (!status.ok()) return status;
  return SavedCheckpoint{progress->step(), progress->path()};
}

}  // namespace shardd

#include "client/export_weights.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "kernels/isa.h"
#include "proto/checkpoint/directory.h"
#include "proto/checkpoint/export_plan.h"
#include "proto/contract/fd_passing.h"

namespace shardd {

namespace {

using checkpoint::ExportPlan;
using checkpoint::FileEntry;
using checkpoint::Reader;
using checkpoint::TensorEntry;

bool HoldsWeights(const FileEntry& file) {
  return file.kind == checkpoint::kModelKind || file.kind == checkpoint::kFrozenKind;
}

// The file in the making: "PATH.partial.PID", removed unless it was finished.
class PartialFile {
 public:
  explicit PartialFile(const std::string& path)
      : path_(path), partial_(absl::StrCat(path, ".partial.", getpid())) {}
  ~PartialFile() {
    if (fd_.get() >= 0) unlink(partial_.c_str());
  }
  absl::Status Open() {
    fd_ =
        contract::UniqueFd(open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    return fd_.get() >= 0 ? absl::OkStatus() : Failed("create");
  }
  absl::Status WriteAt(uint64_t offset, const void* data, size_t bytes) const {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t n = pwrite(fd_.get(), from, bytes, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Failed("write (is the disk full?)");
      from += n;
      offset += static_cast<uint64_t>(n);
      bytes -= static_cast<size_t>(n);
    }
    return absl::OkStatus();
  }
  absl::Status Finish() {
    if (fsync(fd_.get()) != 0) return Failed("fsync");
    if (rename(partial_.c_str(), path_.c_str()) != 0) return Failed("rename into place");
    fd_ = contract::UniqueFd();
    const size_t slash = path_.rfind('/');
    const std::string parent = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const contract::UniqueFd directory(open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.get() < 0 || fsync(directory.get()) != 0) return Failed("sync the directory of");
    return absl::OkStatus();
  }

 private:
  absl::Status Failed(const char* action) const {
    return absl::ErrnoToStatus(errno, absl::StrCat(path_, ": cannot ", action));
  }
  const std::string path_, partial_;
  contract::UniqueFd fd_;
};

// One reader's tensors to their places.
absl::Status CopyWeights(const Reader& reader, const ExportPlan& plan, const PartialFile& file,
                         size_t threads, const Reader::Progress& progress) {
  const kernels::Isa isa = kernels::BestIsa();
  const auto sink = [&](const FileEntry& from, const TensorEntry& tensor, uint64_t offset,
                        std::span<const std::byte> data) -> absl::Status {
    const bool frozen = from.kind == checkpoint::kFrozenKind;
    const auto dtype =
        frozen
            ? static_cast<kernels::DType>(
                  reader.manifest().parameters.frozen(static_cast<int>(tensor.parameter)).dtype())
            : kernels::DType::kFloat32;
    const uint64_t size = kernels::DTypeSize(dtype);
    const uint64_t count = data.size() / size;
    std::vector<float> wide(count);
    kernels::ToFp32(isa, data.data(), dtype, count, wide.data());
    std::vector<uint16_t> narrow;
    const void* out = wide.data();
    if (plan.dtype == safetensors::DType::kBF16) {
      narrow.resize(count);
      kernels::MasterToWeight(isa, wide.data(), count, narrow.data(), kernels::DType::kBFloat16);
      out = narrow.data();
    }
    const uint64_t element = tensor.offset + offset / size;
    for (const uint64_t place : (frozen ? plan.frozen : plan.parameters)[tensor.parameter]) {
      absl::Status status =
          file.WriteAt(place + element * plan.element_bytes(), out, count * plan.element_bytes());
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  return reader.ReadAll(sink, progress, threads, HoldsWeights);
}

}  // namespace

absl::StatusOr<std::vector<Reader>> OpenCheckpointSet(const std::string& directory) {
  std::string path = directory;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  absl::StatusOr<Reader> given = Reader::Open(path, checkpoint::SystemFiles());
  if (!given.ok()) return given.status();
  const checkpoint::Manifest manifest = given->manifest();
  std::vector<Reader> members;
  if (manifest.members == 1) {
    members.push_back(*std::move(given));
    return members;
  }
  const size_t slash = path.rfind('/');
  const std::string parent = slash == std::string::npos ? "." : path.substr(0, slash);
  for (uint32_t member = 1; member <= manifest.members; ++member) {
    const std::string name = checkpoint::DirectoryName({manifest.step, member, manifest.members});
    absl::StatusOr<Reader> reader =
        Reader::Open(absl::StrCat(parent, "/", name), checkpoint::SystemFiles());
    if (absl::IsNotFound(reader.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": is one of ", manifest.members, " members, and ", name,
                       " does not lie beside it; bring it from the daemon that wrote it"));
    }
    if (!reader.ok()) return reader.status();
    members.push_back(*std::move(reader));
  }
  return members;
}

absl::Status ExportWeights(const std::vector<Reader>& members, v1::DType dtype,
                           const std::string& prefix, const std::string& path, size_t threads,
                           const std::function<void(uint64_t bytes, uint64_t total)>& progress) {
  const checkpoint::Manifest& first = members[0].manifest();
  absl::StatusOr<ExportPlan> plan = checkpoint::PlanExport(
      first.parameters, dtype, prefix,
      {{"format", "pt"}, {"job", first.job()}, {"step", absl::StrCat(first.step)}});
  if (!plan.ok()) return plan.status();
  uint64_t total = 0;
  for (const Reader& reader : members) {
    for (const FileEntry& file : reader.manifest().files) {
      if (HoldsWeights(file)) total += file.bytes - file.header_bytes;
    }
  }
  PartialFile file(path);
  absl::Status status = file.Open();
  if (status.ok()) status = file.WriteAt(0, plan->header.data(), plan->header.size());
  for (const Reader& reader : members) {
    if (!status.ok()) return status;
    status = CopyWeights(reader, *plan, file, threads, [&](uint64_t bytes) {
      progress(bytes, total);
      return absl::OkStatus();
    });
  }
  return status.ok() ? file.Finish() : status;
}

}  // namespace shardd

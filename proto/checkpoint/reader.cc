#include "proto/checkpoint/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/contract/crc32c.h"

namespace shardd::checkpoint {

namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;
// A manifest of a million parameters is smaller.
constexpr uint64_t kMaxManifestBytes = uint64_t{2} << 30;

absl::StatusOr<FileAccess::ReadAt> OpenSystemFile(const std::string& path, uint64_t* bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot open for reading"));
  const std::shared_ptr<const int> shared(new int(fd), [](const int* owned) {
    close(*owned);
    delete owned;
  });
  struct stat info = {};
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot stat"));
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is not a regular file"));
  }
  *bytes = static_cast<uint64_t>(info.st_size);
  return [shared, path](uint64_t offset, std::span<std::byte> out) -> absl::StatusOr<size_t> {
    size_t got = 0;
    while (got < out.size()) {
      const ssize_t n =
          pread(*shared, out.data() + got, out.size() - got, static_cast<off_t>(offset + got));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot read"));
      if (n == 0) break;
      got += static_cast<size_t>(n);
    }
    return got;
  };
}

// Reads [begin, end) in blocks; a file that ends before is DataLoss.
absl::Status ReadBlocks(const std::string& path, const FileAccess::ReadAt& read, uint64_t begin,
                        uint64_t end, Reader::Sink sink) {
  std::vector<std::byte> block(std::min<uint64_t>(kBlockBytes, end - begin));
  for (uint64_t at = begin; at < end; at += block.size()) {
    const std::span<std::byte> out(block.data(), std::min<uint64_t>(block.size(), end - at));
    absl::StatusOr<size_t> got = read(at, out);
    if (!got.ok()) return got.status();
    if (*got != out.size()) {
      return absl::DataLossError(absl::StrCat(path, ": ends at byte ", at + *got, " of ", end,
                                              "; use another checkpoint"));
    }
    if (absl::Status status = sink(at - begin, out); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

FileAccess SystemFiles() { return {OpenSystemFile}; }

absl::StatusOr<Reader> Reader::Open(const std::string& directory, FileAccess files) {
  Reader reader(directory, std::move(files));
  const std::string path = absl::StrCat(directory, "/", kManifestName);
  uint64_t bytes = 0;
  absl::StatusOr<FileAccess::ReadAt> read = reader.files_.open(path, &bytes);
  if (absl::IsNotFound(read.status())) {
    return absl::NotFoundError(
        absl::StrCat(directory, ": is no checkpoint: it has no ", kManifestName));
  }
  if (!read.ok()) return read.status();
  if (bytes > kMaxManifestBytes) {
    return absl::DataLossError(absl::StrCat(path, ": has ", bytes, " bytes, more than it may"));
  }
  std::string text(bytes, '\0');
  absl::StatusOr<size_t> got =
      (*read)(0, std::as_writable_bytes(std::span<char>(text.data(), text.size())));
  if (!got.ok()) return got.status();
  text.resize(*got);
  absl::StatusOr<Manifest> manifest = ParseManifest(text, path);
  if (!manifest.ok()) return manifest.status();
  if (absl::Status status = CheckPieces(*manifest, path); !status.ok()) return status;
  reader.manifest_ = *std::move(manifest);
  for (const FileEntry& file : reader.manifest_.files) {
    if (absl::Status status = reader.CheckHeader(file); !status.ok()) return status;
  }
  return reader;
}

absl::Status Reader::CheckHeader(const FileEntry& file) const {
  const std::string path = absl::StrCat(directory_, "/", file.name);
  uint64_t bytes = 0;
  absl::StatusOr<FileAccess::ReadAt> read = files_.open(path, &bytes);
  if (absl::IsNotFound(read.status())) {
    return absl::DataLossError(absl::StrCat(path, ": is missing; use another checkpoint"));
  }
  if (!read.ok()) return read.status();
  if (bytes != file.bytes) {
    return absl::DataLossError(absl::StrCat(path, ": has ", bytes, " bytes, but its manifest says ",
                                            file.bytes, "; use another checkpoint"));
  }
  uint32_t crc = 0;
  absl::Status status =
      ReadBlocks(path, *read, 0, file.header_bytes, [&](uint64_t, std::span<const std::byte> data) {
        crc = contract::Crc32c(data.data(), data.size(), crc);
        return absl::OkStatus();
      });
  if (status.ok() && crc != file.header_crc) {
    return absl::DataLossError(absl::StrCat(
        path,
        ": its header does not have the checksum that its manifest says: it is damaged; use "
        "another checkpoint"));
  }
  return status;
}

absl::Status Reader::Read(const FileEntry& file, const TensorEntry& tensor, Sink sink) const {
  const std::string path = absl::StrCat(directory_, "/", file.name);
  uint64_t bytes = 0;
  absl::StatusOr<FileAccess::ReadAt> read = files_.open(path, &bytes);
  if (!read.ok()) return read.status();
  uint32_t crc = 0;
  absl::Status status = ReadBlocks(path, *read, tensor.begin, tensor.end,
                                   [&](uint64_t offset, std::span<const std::byte> data) {
                                     crc = contract::Crc32c(data.data(), data.size(), crc);
                                     return sink(offset, data);
                                   });
  if (status.ok() && crc != tensor.crc) {
    return absl::DataLossError(absl::StrCat(
        path, ": tensor '", tensor.name,
        "' does not have the checksum that its manifest says: it is damaged; use another "
        "checkpoint"));
  }
  return status;
}

absl::Status Reader::ReadAll(const TensorSink& sink, const Progress& progress, size_t threads,
                             const Wanted& wanted) const {
  std::vector<std::pair<const FileEntry*, const TensorEntry*>> tensors;
  for (const FileEntry& file : manifest_.files) {
    if (wanted && !wanted(file)) continue;
    for (const TensorEntry& tensor : file.tensors) tensors.emplace_back(&file, &tensor);
  }
  std::atomic<size_t> next{0};
  std::mutex mutex;
  absl::Status first;  // under mutex
  const auto work = [&] {
    for (size_t i = next++; i < tensors.size(); i = next++) {
      const FileEntry* const file = tensors[i].first;  // clang captures no structured binding
      const TensorEntry* const tensor = tensors[i].second;
      absl::Status status =
          Read(*file, *tensor, [&](uint64_t offset, std::span<const std::byte> data) {
            absl::Status given = sink(*file, *tensor, offset, data);
            return given.ok() ? progress(data.size()) : given;
          });
      if (status.ok()) continue;
      next = tensors.size();
      const std::lock_guard lock(mutex);
      if (first.ok()) first = std::move(status);
    }
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < std::min(threads, tensors.size()); ++t) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  return first;
}

absl::Status Reader::Verify(const Progress& progress, size_t threads) const {
  return ReadAll([](const FileEntry&, const TensorEntry&, uint64_t,
                    std::span<const std::byte>) { return absl::OkStatus(); },
                 progress, threads);
}

}  // namespace shardd::checkpoint

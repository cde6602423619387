#include "client/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/contract/segments.h"

namespace shardd {

namespace {

constexpr uint64_t kPage = contract::kSegmentPage;

}  // namespace

absl::StatusOr<MemoryFile> MemoryFile::Create(const std::string& name, uint64_t bytes,
                                              bool sealed) {
  const std::string what =
      absl::StrCat("cannot make ", bytes, " bytes of shared memory '", name, "'");
  MemoryFile file;
  file.fd_.Reset(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.fd_) return contract::ErrnoStatus(errno, what);
  const uint64_t size = contract::RoundUpTo(std::max<uint64_t>(bytes, 1), kPage);
  if (ftruncate(file.fd_.get(), static_cast<off_t>(size)) != 0) {
    return contract::ErrnoStatus(errno, what);
  }
  if (sealed &&
      fcntl(file.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot seal shared memory '", name, "'"));
  }
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd_.get(), 0);
  if (data == MAP_FAILED) return contract::ErrnoStatus(errno, what);
  madvise(data, size, MADV_DONTFORK);
  file.data_ = static_cast<std::byte*>(data);
  file.size_ = size;
  return file;
}

MemoryFile::MemoryFile(MemoryFile&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MemoryFile& MemoryFile::operator=(MemoryFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MemoryFile::~MemoryFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

void MemoryFile::Discard(uint64_t begin, uint64_t end) {
  begin = contract::RoundUpTo(begin, kPage);
  end = std::min(end, size_) / kPage * kPage;
  // Punches a hole: for shared memory MADV_DONTNEED would only unmap the pages.
  if (begin < end) madvise(data_ + begin, end - begin, MADV_REMOVE);
}

absl::StatusOr<ReadOnlyMapping> ReadOnlyMapping::Map(contract::UniqueFd fd, uint64_t bytes,
                                                     const std::string& what) {
  struct stat info;
  if (fstat(fd.get(), &info) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot look at ", what));
  }
  if (bytes == 0 || static_cast<uint64_t>(info.st_size) < bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, " has ", info.st_size, " bytes where the daemon announced ", bytes,
        ": the daemon is of another version, or its state directory was tampered with"));
  }
  void* data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return contract::ErrnoStatus(errno, absl::StrCat("cannot map ", what));
  madvise(data, bytes, MADV_DONTFORK);
  ReadOnlyMapping mapping;
  mapping.data_ = static_cast<const std::byte*>(data);
  mapping.size_ = bytes;
  return mapping;
}

ReadOnlyMapping::ReadOnlyMapping(ReadOnlyMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

ReadOnlyMapping& ReadOnlyMapping::operator=(ReadOnlyMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

ReadOnlyMapping::~ReadOnlyMapping() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace shardd

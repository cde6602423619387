#include "server/store/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

// Linux 5.14; older C libraries do not name it.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace shardd::store {

namespace {

absl::StatusOr<std::byte*> MapBytes(int fd, uint64_t bytes, const std::string& path) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return contract::ErrnoStatus(errno, absl::StrCat("cannot map ", path));
  return static_cast<std::byte*>(data);
}

}  // namespace

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

absl::StatusOr<Segment> Segment::CreateSparse(const std::string& path, uint64_t bytes,
                                              uint64_t resident_bytes) {
  contract::UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) return contract::ErrnoStatus(errno, absl::StrCat("cannot create ", path));
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    unlink(path.c_str());
    return contract::ErrnoStatus(error, absl::StrCat("cannot size ", path));
  }
  absl::StatusOr<std::byte*> data = MapBytes(fd.get(), bytes, path);
  if (!data.ok()) {
    unlink(path.c_str());
    return data.status();
  }
  Segment segment(*data, bytes);
  madvise(*data, bytes, MADV_HUGEPAGE);  // a wish: only a tmpfs mounted huge= heeds it
  if (absl::Status status = segment.Populate(0, resident_bytes); !status.ok()) {
    unlink(path.c_str());
    return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  }
  return segment;
}

absl::Status Segment::Populate(uint64_t offset, uint64_t bytes) const {
  constexpr uint64_t kPage = 4096;
  const uint64_t begin = offset / kPage * kPage;
  const uint64_t end = std::min((offset + bytes + kPage - 1) / kPage * kPage, bytes_);
  if (begin >= end || madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) {
    return absl::OkStatus();
  }
  const int error = errno;
  const std::string what = absl::StrCat("cannot make ", bytes, " bytes resident");
  // A full tmpfs says EFAULT, a cgroup at its limit ENOMEM.
  if (error == EFAULT || error == ENOMEM || error == ENOSPC) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": ", std::strerror(error), "; give the state directory more space"));
  }
  return contract::ErrnoStatus(error, what);
}

void Segment::Punch(uint64_t offset, uint64_t bytes) const {
  constexpr uint64_t kPage = 4096;
  const uint64_t begin = (offset + kPage - 1) / kPage * kPage;
  const uint64_t end = std::min(offset + bytes, bytes_) / kPage * kPage;
  if (begin < end) madvise(data_ + begin, end - begin, MADV_REMOVE);
}

absl::StatusOr<Segment> Segment::Open(const std::string& path) {
  contract::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) return contract::ErrnoStatus(errno, absl::StrCat("cannot open ", path));
  return Map(fd.get(), path);
}

absl::StatusOr<Segment> Segment::Map(int fd, const std::string& name) {
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot stat ", name));
  }
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes == 0) return absl::DataLossError(absl::StrCat(name, " is empty"));
  absl::StatusOr<std::byte*> data = MapBytes(fd, bytes, name);
  if (!data.ok()) return data.status();
  return Segment(*data, bytes);
}

absl::StatusOr<contract::UniqueFd> Segment::OpenReadOnly(const std::string& path) {
  // Not O_NOFOLLOW: what lies under /proc/self/fd is a link. The directory is the daemon's own.
  contract::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return contract::ErrnoStatus(errno, absl::StrCat("cannot open ", path));
  return fd;
}

}  // namespace shardd::store

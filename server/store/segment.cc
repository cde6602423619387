#include "server/store/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

absl::StatusOr<std::byte*> Map(int fd, uint64_t bytes, const std::string& path) {
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

absl::StatusOr<Segment> Segment::Create(const std::string& path, uint64_t bytes) {
  contract::UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) return contract::ErrnoStatus(errno, absl::StrCat("cannot create ", path));
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    unlink(path.c_str());
    return contract::ErrnoStatus(error, absl::StrCat("cannot size ", path));
  }
  absl::StatusOr<std::byte*> data = Map(fd.get(), bytes, path);
  if (!data.ok()) {
    unlink(path.c_str());
    return data.status();
  }
  Segment segment(*data, bytes);
  madvise(*data, bytes, MADV_HUGEPAGE);  // a wish: only a tmpfs mounted huge= heeds it
  if (madvise(*data, bytes, MADV_POPULATE_WRITE) != 0) {
    const int error = errno;
    unlink(path.c_str());
    // A full tmpfs says EFAULT, a cgroup at its limit ENOMEM.
    if (error == EFAULT || error == ENOMEM || error == ENOSPC) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot make ", bytes, " bytes of ", path,
                                                       " resident: ", std::strerror(error),
                                                       "; give the state directory more space"));
    }
    return contract::ErrnoStatus(error, absl::StrCat("cannot make ", path, " resident"));
  }
  return segment;
}

absl::StatusOr<Segment> Segment::Open(const std::string& path) {
  contract::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) return contract::ErrnoStatus(errno, absl::StrCat("cannot open ", path));
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot stat ", path));
  }
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes == 0) return absl::DataLossError(absl::StrCat(path, " is empty"));
  absl::StatusOr<std::byte*> data = Map(fd.get(), bytes, path);
  if (!data.ok()) return data.status();
  return Segment(*data, bytes);
}

absl::StatusOr<contract::UniqueFd> Segment::OpenReadOnly(const std::string& path) {
  contract::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) return contract::ErrnoStatus(errno, absl::StrCat("cannot open ", path));
  return fd;
}

}  // namespace shardd::store

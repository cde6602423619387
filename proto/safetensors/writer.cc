#include "proto/safetensors/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd::safetensors {
namespace {

// Directory part of `path`, for fsync after rename.
std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

absl::Status Writer::Errno(const char* action) const {
  return absl::ErrnoToStatus(errno, absl::StrCat(path_, ": cannot ", action));
}

absl::StatusOr<std::unique_ptr<Writer>> Writer::Create(const std::string& path, Options options) {
  std::unique_ptr<Writer> writer(new Writer);
  writer->path_ = path;
  writer->partial_path_ = absl::StrCat(path, ".partial.", getpid());
  writer->options_ = std::move(options);
  writer->fd_ = open(writer->partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (writer->fd_ < 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(writer->partial_path_, ": cannot create"));
  }
  writer->buffer_.reserve(writer->options_.buffer_bytes);
  return writer;
}

Writer::~Writer() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(partial_path_.c_str());
}

absl::Status Writer::Declare(std::string_view name, DType dtype,
                             const std::vector<int64_t>& shape) {
  const std::string object = absl::StrCat(path_, ": tensor '", std::string(name), "'");
  if (header_written_) {
    return absl::FailedPreconditionError(
        absl::StrCat(object, " is declared after data; declare all tensors first"));
  }
  if (name == "__metadata__" || name.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(object, " has a reserved name; rename it"));
  }
  TensorInfo tensor{std::string(name), dtype, shape, declared_bytes_, 0};
  uint64_t bytes = 0;
  if (absl::Status s = ShapeBytes(object, shape, dtype, &bytes); !s.ok()) return s;
  if (!names_.insert(tensor.name).second) {
    return absl::InvalidArgumentError(absl::StrCat(object, " is declared twice; rename one"));
  }
  tensor.end = declared_bytes_ += bytes;
  tensors_.push_back(std::move(tensor));
  return absl::OkStatus();
}

absl::Status Writer::WriteHeader() {
  header_written_ = true;
  const absl::StatusOr<std::string> header = EncodeHeader(path_, options_.metadata, tensors_, 8);
  if (!header.ok()) return header.status();
  return WriteFully(reinterpret_cast<const std::byte*>(header->data()), header->size());
}

absl::Status Writer::Append(std::span<const std::byte> data) {
  if (!header_written_) {
    if (absl::Status s = WriteHeader(); !s.ok()) return s;
  }
  if (data.size() > declared_bytes_ - appended_bytes_) {
    return absl::OutOfRangeError(absl::StrCat(path_, ": ", appended_bytes_ + data.size(),
                                              " bytes appended where ", declared_bytes_,
                                              " are declared; declare every tensor first"));
  }
  appended_bytes_ += data.size();
  if (buffer_.size() + data.size() > options_.buffer_bytes) {
    if (absl::Status s = Flush(); !s.ok()) return s;
  }
  if (data.size() > options_.buffer_bytes) return WriteFully(data.data(), data.size());
  buffer_.insert(buffer_.end(), data.begin(), data.end());
  return absl::OkStatus();
}

absl::Status Writer::Flush() {
  absl::Status status = WriteFully(buffer_.data(), buffer_.size());
  buffer_.clear();
  return status;
}

absl::Status Writer::WriteFully(const std::byte* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = write(fd_, data, bytes);
    if (written < 0) {
      if (errno == EINTR) continue;
      return Errno("write (is the disk full?)");
    }
    data += written;
    bytes -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

absl::Status Writer::Finish() {
  if (!header_written_) {
    if (absl::Status s = WriteHeader(); !s.ok()) return s;
  }
  if (appended_bytes_ != declared_bytes_) {
    for (const TensorInfo& tensor : tensors_) {
      if (tensor.end <= appended_bytes_) continue;
      return absl::FailedPreconditionError(absl::StrCat(path_, ": data of tensor '", tensor.name,
                                                        "' is missing (", appended_bytes_, " of ",
                                                        declared_bytes_, " bytes were appended)"));
    }
  }
  if (absl::Status s = Flush(); !s.ok()) return s;
  if (fsync(fd_) != 0) return Errno("fsync");
  if (rename(partial_path_.c_str(), path_.c_str()) != 0) return Errno("rename into place");
  close(std::exchange(fd_, -1));
  const int directory = open(DirectoryOf(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return Errno("open the directory of");
  const int rc = fsync(directory);
  const int saved_errno = errno;
  close(directory);
  errno = saved_errno;
  return rc == 0 ? absl::OkStatus() : Errno("fsync the directory of");
}

}  // namespace shardd::safetensors

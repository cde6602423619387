#include "server/env/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardd::env {

namespace {

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::StatusCode::kResourceExhausted;
    case EIO:
    case EUCLEAN:
      return absl::StatusCode::kDataLoss;
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    default:
      return absl::StatusCode::kFailedPrecondition;
  }
}

const char* RemedyFor(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; make room on its file system";
    case EIO:
    case EUCLEAN:
      return "; its device fails: see the kernel's log, use another";
    case EMFILE:
    case ENFILE:
      return "; raise the limit of open files";
    case EACCES:
    case EPERM:
      return "; see who owns it";
    case EROFS:
      return "; its file system is mounted read-only";
    default:
      return "";
  }
}

absl::Status Failed(int error, const std::string& action, const std::string& path) {
  return absl::Status(CodeOf(error), absl::StrCat("cannot ", action, " ", path, ": ",
                                                  std::strerror(error), RemedyFor(error)));
}

// The offset where a vector of parts stands, advanced by what the system took of it.
class Cursor {
 public:
  explicit Cursor(std::span<const std::span<const std::byte>> parts) {
    for (const auto& part : parts) {
      if (part.empty()) continue;
      vector_.push_back({const_cast<std::byte*>(part.data()), part.size()});
    }
  }
  bool done() const { return at_ == vector_.size(); }
  const iovec* data() const { return vector_.data() + at_; }
  int count() const { return static_cast<int>(std::min<size_t>(vector_.size() - at_, IOV_MAX)); }
  void Advance(size_t bytes) {
    while (bytes > 0) {
      const size_t part = std::min(bytes, vector_[at_].iov_len);
      vector_[at_].iov_base = static_cast<char*>(vector_[at_].iov_base) + part;
      vector_[at_].iov_len -= part;
      bytes -= part;
      if (vector_[at_].iov_len == 0) ++at_;
    }
  }

 private:
  std::vector<iovec> vector_;
  size_t at_ = 0;
};

class PosixFile final : public File {
 public:
  PosixFile(std::string path, int fd, bool direct)
      : path_(std::move(path)), fd_(fd), direct_(direct) {}
  ~PosixFile() override { close(fd_); }

  const std::string& path() const override { return path_; }
  bool direct() const override { return direct_; }

  absl::StatusOr<size_t> ReadAt(uint64_t offset, std::span<std::byte> out) override {
    size_t done = 0;
    while (done < out.size()) {
      const ssize_t n =
          pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0)
        return Failed(errno, absl::StrCat("read ", out.size(), " bytes at ", offset, " of"), path_);
      if (n == 0) break;
      done += static_cast<size_t>(n);
      // A direct read ends short of the alignment only at the end of the file.
      if (direct_ && static_cast<size_t>(n) % kDirectAlignment != 0) break;
    }
    return done;
  }

  absl::Status WriteAt(uint64_t offset,
                       std::span<const std::span<const std::byte>> parts) override {
    Cursor cursor(parts);
    while (!cursor.done()) {
      const ssize_t n = pwritev(fd_, cursor.data(), cursor.count(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        return Failed(n < 0 ? errno : EIO, absl::StrCat("write at ", offset, " of"), path_);
      }
      cursor.Advance(static_cast<size_t>(n));
      offset += static_cast<uint64_t>(n);
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    if (fdatasync(fd_) != 0) return Failed(errno, "fdatasync", path_);
    return absl::OkStatus();
  }

  absl::Status Preallocate(uint64_t bytes) override {
    int error = 0;
    do {
      error = posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error == 0) return absl::OkStatus();
    return Failed(error, absl::StrCat("reserve ", bytes, " bytes for"), path_);
  }

  absl::Status Truncate(uint64_t bytes) override {
    if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) return Failed(errno, "truncate", path_);
    return absl::OkStatus();
  }

  absl::StatusOr<uint64_t> Size() override {
    struct stat info {};
    if (fstat(fd_, &info) != 0) return Failed(errno, "stat", path_);
    return static_cast<uint64_t>(info.st_size);
  }

  void DropCache(uint64_t offset, uint64_t bytes) override {
    posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  }

 private:
  const std::string path_;
  const int fd_;
  const bool direct_;
};

int FlagsOf(OpenMode mode) {
  switch (mode) {
    case OpenMode::kRead:
      return O_RDONLY;
    case OpenMode::kReadWrite:
      return O_RDWR;
    case OpenMode::kCreate:
      return O_RDWR | O_CREAT | O_EXCL;
    case OpenMode::kCreateOrEmpty:
      return O_RDWR | O_CREAT | O_TRUNC;
  }
  return O_RDONLY;
}

class Posix final : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path,
                                             const OpenOptions& options) override {
    const int flags = FlagsOf(options.mode) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = open(path.c_str(), flags, 0600);
    if (fd < 0) return Failed(errno, (flags & O_CREAT) != 0 ? "create" : "open", path);
    struct stat info {};
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
      close(fd);
      return absl::DataLossError(absl::StrCat(path, " is not a regular file"));
    }
    // Set afterwards, since an open that is refused O_DIRECT may have created the file.
    const bool direct = options.direct && fcntl(fd, F_SETFL, O_DIRECT) == 0;
    return std::make_unique<PosixFile>(path, fd, direct);
  }

  absl::Status MakeDirectory(const std::string& path) override {
    if (mkdir(path.c_str(), 0700) == 0) return absl::OkStatus();
    if (errno != EEXIST) return Failed(errno, "make the directory", path);
    struct stat info {};
    if (stat(path.c_str(), &info) != 0) return Failed(errno, "stat", path);
    if (!S_ISDIR(info.st_mode)) return Failed(ENOTDIR, "make the directory", path);
    return absl::OkStatus();
  }

  absl::Status SyncDirectory(const std::string& path) override {
    const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return Failed(errno, "open the directory", path);
    const int error = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    if (error != 0) return Failed(error, "fsync the directory", path);
    return absl::OkStatus();
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
    return Failed(errno, absl::StrCat("rename ", from, " to"), to);
  }

  absl::Status Remove(const std::string& path) override {
    if (unlink(path.c_str()) == 0) return absl::OkStatus();
    return Failed(errno, "remove", path);
  }

  absl::Status RemoveDirectory(const std::string& path) override {
    if (rmdir(path.c_str()) == 0) return absl::OkStatus();
    return Failed(errno, "remove the directory", path);
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    DIR* directory = opendir(path.c_str());
    if (directory == nullptr) return Failed(errno, "list", path);
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = readdir(directory)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    const int error = errno;
    closedir(directory);
    if (error != 0) return Failed(error, "list", path);
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::StatusOr<FileInfo> Stat(const std::string& path) override {
    struct stat info {};
    if (lstat(path.c_str(), &info) != 0) return Failed(errno, "stat", path);
    return FileInfo{static_cast<uint64_t>(info.st_size),
                    static_cast<uint64_t>(info.st_blocks) * 512, S_ISDIR(info.st_mode)};
  }

  absl::StatusOr<uint64_t> FreeBytes(const std::string& path) override {
    struct statvfs info {};
    if (statvfs(path.c_str(), &info) != 0) return Failed(errno, "statvfs", path);
    return uint64_t{info.f_bavail} * info.f_frsize;
  }
};

}  // namespace

FileSystem* PosixFileSystem() {
  static Posix* posix = new Posix();
  return posix;
}

std::string JoinPath(const std::string& directory, const std::string& name) {
  if (!directory.empty() && directory.back() == '/') return directory + name;
  return directory + "/" + name;
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status ReplaceFile(FileSystem* files, const std::string& path,
                         std::span<const std::byte> data) {
  const std::string building = path + ".new";
  {
    absl::StatusOr<std::unique_ptr<File>> file =
        files->Open(building, {.mode = OpenMode::kCreateOrEmpty});
    if (!file.ok()) return file.status();
    if (absl::Status status = (*file)->WriteAt(0, data); !status.ok()) return status;
    if (absl::Status status = (*file)->Sync(); !status.ok()) return status;
  }
  if (absl::Status status = files->Rename(building, path); !status.ok()) return status;
  return files->SyncDirectory(ParentOf(path));
}

absl::StatusOr<std::vector<std::byte>> ReadFile(FileSystem* files, const std::string& path,
                                                uint64_t bytes_max) {
  absl::StatusOr<std::unique_ptr<File>> file = files->Open(path, {});
  if (!file.ok()) return file.status();
  absl::StatusOr<uint64_t> size = (*file)->Size();
  if (!size.ok()) return size.status();
  if (*size > bytes_max) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", *size, " bytes where ", bytes_max, " are the most"));
  }
  std::vector<std::byte> data(*size);
  absl::StatusOr<size_t> read = (*file)->ReadAt(0, data);
  if (!read.ok()) return read.status();
  data.resize(*read);
  return data;
}

absl::Status MakeDirectories(FileSystem* files, const std::string& path) {
  if (absl::StatusOr<FileInfo> info = files->Stat(path); info.ok() && info->is_directory) {
    return absl::OkStatus();
  }
  const std::string parent = ParentOf(path);
  if (parent != path && parent != ".") {
    if (absl::Status status = MakeDirectories(files, parent); !status.ok()) return status;
  }
  if (absl::Status status = files->MakeDirectory(path); !status.ok()) return status;
  return files->SyncDirectory(parent);
}

namespace {

absl::Status RemoveEntries(FileSystem* files, const std::string& path) {
  absl::StatusOr<std::vector<std::string>> names = files->List(path);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const std::string entry = JoinPath(path, name);
    absl::StatusOr<FileInfo> info = files->Stat(entry);
    if (!info.ok()) return info.status();
    if (info->is_directory) {
      if (absl::Status status = RemoveEntries(files, entry); !status.ok()) return status;
    } else if (absl::Status status = files->Remove(entry); !status.ok()) {
      return status;
    }
  }
  return files->RemoveDirectory(path);
}

}  // namespace

absl::Status RemoveTree(FileSystem* files, const std::string& path) {
  absl::StatusOr<FileInfo> info = files->Stat(path);
  if (absl::IsNotFound(info.status())) return absl::OkStatus();
  if (!info.ok()) return info.status();
  const absl::Status status = info->is_directory ? RemoveEntries(files, path) : files->Remove(path);
  return status.ok() ? files->SyncDirectory(ParentOf(path)) : status;
}

}  // namespace shardd::env

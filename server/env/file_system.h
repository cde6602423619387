// All access to files that must outlive the machine: one interface, so that tests can make
// every call fail and drop what was not made durable (faulty_file_system.h).
//
// Errors are absl::Status whose message says object, action and remedy. Codes: NotFound,
// AlreadyExists, PermissionDenied as errno has them; ResourceExhausted: no space (ENOSPC, EDQUOT);
// DataLoss: the device failed (EIO).
#ifndef SHARDD_SERVER_ENV_FILE_SYSTEM_H_
#define SHARDD_SERVER_ENV_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardd::env {

// What offset, length and address must be a multiple of where File::direct().
inline constexpr size_t kDirectAlignment = 4096;

// An open file. Thread-safe as far as its ranges do not overlap. Closed when destroyed, which
// makes nothing durable.
class File {
 public:
  virtual ~File() = default;
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // As opened.
  virtual const std::string& path() const = 0;
  // Whether reads and writes go around the page cache; then kDirectAlignment holds.
  virtual bool direct() const = 0;
  // Reads at `offset`. Returns how many bytes: less than out.size() only at the end of the file.
  virtual absl::StatusOr<size_t> ReadAt(uint64_t offset, std::span<std::byte> out) = 0;
  // Writes all parts, one after the other, from `offset` on. Durable after the next Sync. After
  // an error any of the bytes may have been written.
  virtual absl::Status WriteAt(uint64_t offset,
                               std::span<const std::span<const std::byte>> parts) = 0;
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) {
    return WriteAt(offset, std::span<const std::span<const std::byte>>(&data, 1));
  }
  // fdatasync: contents and size are durable; the name is with the directory. After an error
  // nobody knows what of the file is durable: write it anew elsewhere.
  virtual absl::Status Sync() = 0;
  // Reserves space for the first `bytes` of the file, and makes it at least so long (zeros).
  virtual absl::Status Preallocate(uint64_t bytes) = 0;
  virtual absl::Status Truncate(uint64_t bytes) = 0;
  virtual absl::StatusOr<uint64_t> Size() = 0;
  // Tells the system that the pages of [offset, offset + bytes) are not read again. A hint.
  virtual void DropCache(uint64_t offset, uint64_t bytes) = 0;
};

enum class OpenMode {
  kRead,           // must exist
  kReadWrite,      // must exist
  kCreate,         // must not exist; mode 0600
  kCreateOrEmpty,  // made, or emptied
};

struct OpenOptions {
  OpenMode mode = OpenMode::kRead;
  // Go around the page cache where the file system can; File::direct() says whether it does.
  bool direct = false;
};

struct FileInfo {
  uint64_t bytes = 0;
  uint64_t allocated_bytes = 0;
  bool is_directory = false;
};

// Thread-safe. Paths are absolute, or relative to the process's directory; a link as the last
// part of a file's path is not followed, and what is no regular file is not opened: a pipe would
// be waited for.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  virtual absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path,
                                                     const OpenOptions& options) = 0;
  // OK if the directory is there (mode 0700). Durable with the parent's SyncDirectory.
  virtual absl::Status MakeDirectory(const std::string& path) = 0;
  // Makes the names in `path` durable: what was created, renamed and removed there.
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  // Replaces `to` at once. Both in one file system.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status Remove(const std::string& path) = 0;           // a file
  virtual absl::Status RemoveDirectory(const std::string& path) = 0;  // an empty directory
  // Names in `path`, sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& path) = 0;
  virtual absl::StatusOr<FileInfo> Stat(const std::string& path) = 0;
  // What an unprivileged process may still write to the file system that holds `path`.
  virtual absl::StatusOr<uint64_t> FreeBytes(const std::string& path) = 0;
};

// The system's own. Lives for ever.
FileSystem* PosixFileSystem();

// Joins with one '/'.
std::string JoinPath(const std::string& directory, const std::string& name);
// "/a/b" of "/a/b/c"; "." when there is no '/'.
std::string ParentOf(const std::string& path);

// Writes `data` so that a crash at any moment leaves the old or the new content under `path`:
// to `path`.new, fsync, rename, fsync of the directory. Durable on return.
absl::Status ReplaceFile(FileSystem* files, const std::string& path,
                         std::span<const std::byte> data);
// A whole file. DataLoss: it has more than `bytes_max`.
absl::StatusOr<std::vector<std::byte>> ReadFile(FileSystem* files, const std::string& path,
                                                uint64_t bytes_max);
// Makes `path` and the parents that are missing, each durable.
absl::Status MakeDirectories(FileSystem* files, const std::string& path);
// Removes `path`, a file or a directory with all that is in it. OK when it is not there. The parent
// is synced.
absl::Status RemoveTree(FileSystem* files, const std::string& path);

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_FILE_SYSTEM_H_

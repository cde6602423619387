#include "server/store/state_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace shardd::store {

namespace {

using contract::ErrnoStatus;
using contract::UniqueFd;

absl::Status MakeDirectory(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, absl::StrCat("cannot make the state directory ", path));
  }
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0)
    return ErrnoStatus(errno, absl::StrCat("cannot stat ", path));
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a directory; choose another store.directory"));
  }
  if (info.st_uid != geteuid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the state directory ", path, " belongs to uid ", info.st_uid,
                     ", but the daemon runs as ", geteuid(), "; choose another store.directory"));
  }
  return absl::OkStatus();
}

std::vector<std::string> Entries(const std::string& path) {
  std::vector<std::string> names;
  DIR* dir = opendir(path.c_str());
  if (dir == nullptr) return names;
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

// Whether the mount that holds `device` has huge=always, from mountinfo.
bool IsHugeAlways(dev_t device) {
  std::ifstream mounts("/proc/self/mountinfo");
  const std::string wanted = absl::StrCat(major(device), ":", minor(device));
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string id, parent, dev;
    fields >> id >> parent >> dev;
    if (dev == wanted && absl::StrContains(line, "huge=always")) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<StateDirectory> StateDirectory::Open(const std::string& path) {
  StateDirectory dir;
  dir.path_ = path;
  if (absl::Status status = MakeDirectory(path); !status.ok()) return status;
  struct statfs fs {};
  if (statfs(path.c_str(), &fs) != 0)
    return ErrnoStatus(errno, absl::StrCat("cannot statfs ", path));
  if (fs.f_type != TMPFS_MAGIC) {
    return absl::FailedPreconditionError(
        absl::StrCat("the state directory ", path,
                     " is not on a tmpfs; mount one there (run-shardd-state.mount) or set "
                     "store.directory to a directory under /dev/shm"));
  }
  dir.lock_ =
      UniqueFd(open((path + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!dir.lock_) return ErrnoStatus(errno, absl::StrCat("cannot open ", path, "/lock"));
  if (flock(dir.lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("another daemon holds the state directory ", path,
                     "; stop it, or give this one a store.directory of its own"));
  }
  if (absl::Status status = MakeDirectory(path + "/jobs"); !status.ok()) return status;
  for (const std::string& name : Entries(path + "/jobs")) {
    if (absl::StartsWith(name, ".") && absl::EndsWith(name, ".new")) {
      if (absl::Status status = RemoveJobDirectory(path + "/jobs/" + name); !status.ok()) {
        return status;
      }
    }
  }
  struct stat info {};
  if (stat(path.c_str(), &info) == 0 && IsHugeAlways(info.st_dev)) dir.page_bytes_ = 2 << 20;
  return dir;
}

absl::StatusOr<uint64_t> StateDirectory::FreeBytes() const {
  struct statfs fs {};
  if (statfs(path_.c_str(), &fs) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot statfs ", path_));
  }
  return uint64_t{fs.f_bavail} * static_cast<uint64_t>(fs.f_bsize);
}

uint64_t StateDirectory::JobBytes() const {
  uint64_t bytes = 0;
  for (const std::string& job : JobNames()) {
    for (const std::string& file : Entries(JobPath(job))) {
      struct stat info {};
      if (stat((JobPath(job) + "/" + file).c_str(), &info) == 0) {
        bytes += static_cast<uint64_t>(info.st_size);
      }
    }
  }
  return bytes;
}

std::vector<std::string> StateDirectory::JobNames() const {
  std::vector<std::string> names = Entries(path_ + "/jobs");
  std::erase_if(names, [](const std::string& name) { return name.front() == '.'; });
  return names;
}

absl::Status StateDirectory::LeaveDrainNote(absl::Time when) const {
  const std::string path = path_ + "/drained";
  std::ofstream file(path, std::ios::trunc);
  file << absl::ToUnixNanos(when) << "\n";
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write the note ", path));
  return absl::OkStatus();
}

absl::Time StateDirectory::TakeDrainNote() const {
  const std::string path = path_ + "/drained";
  std::ifstream file(path);
  int64_t nanos = 0;
  if (!(file >> nanos)) return absl::InfinitePast();
  unlink(path.c_str());
  return absl::FromUnixNanos(nanos);
}

bool StateDirectory::Holds(const std::string& job) const {
  return access(JobPath(job).c_str(), F_OK) == 0;
}

absl::Status RemoveJobDirectory(const std::string& path) {
  for (const std::string& name : Entries(path)) {
    const std::string file = path + "/" + name;
    if (unlink(file.c_str()) != 0 && errno != ENOENT) {
      return ErrnoStatus(errno, absl::StrCat("cannot remove ", file));
    }
  }
  if (rmdir(path.c_str()) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, absl::StrCat("cannot remove ", path));
  }
  return absl::OkStatus();
}

}  // namespace shardd::store

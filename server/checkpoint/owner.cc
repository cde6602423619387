#include "server/checkpoint/owner.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace shardd::checkpoint {

absl::Status GiveFileTo(uint32_t uid, const std::string& path) {
  if (geteuid() != 0 || uid == 0) return absl::OkStatus();
  if (lchown(path.c_str(), uid, static_cast<gid_t>(-1)) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be given to user ", uid));
}

absl::Status OpenDirectoryToAll(const std::string& directory) {
  if (geteuid() != 0) return absl::OkStatus();
  if (chmod(directory.c_str(), 0755) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat(directory, ": cannot change its mode"));
}

absl::Status GiveTo(uint32_t uid, const std::string& directory,
                    const std::vector<FileEntry>& files) {
  absl::Status status = OpenDirectoryToAll(directory);
  if (status.ok()) status = GiveFileTo(uid, absl::StrCat(directory, "/", kManifestName));
  for (const FileEntry& file : files) {
    if (status.ok()) status = GiveFileTo(uid, absl::StrCat(directory, "/", file.name));
  }
  return status;
}

}  // namespace shardd::checkpoint

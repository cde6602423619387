#include "server/checkpoint/imports.h"

#include <sys/stat.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace shardd::checkpoint {

using Json = nlohmann::json;

std::string Imports::Path(const std::string& job) const { return env::JoinPath(directory_, job); }

absl::Status Imports::Put(const std::string& job, const PendingImport& import) {
  if (absl::Status s = env::MakeDirectories(files_, directory_); !s.ok()) return s;
  const std::string text =
      Json({{"path", import.path}, {"uid", import.uid}, {"bytes", import.bytes}}).dump();
  return env::ReplaceFile(files_, Path(job), std::as_bytes(std::span(text)));
}

absl::StatusOr<std::optional<PendingImport>> Imports::Find(const std::string& job) const {
  absl::StatusOr<std::vector<std::byte>> data = env::ReadFile(files_, Path(job), 1 << 20);
  if (absl::IsNotFound(data.status())) return std::optional<PendingImport>();
  if (!data.ok()) return data.status();
  const Json json = Json::parse(reinterpret_cast<const char*>(data->data()),
                                reinterpret_cast<const char*>(data->data()) + data->size(), nullptr,
                                /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("path") || !json["path"].is_string() ||
      !json.contains("uid") || !json["uid"].is_number_unsigned() || !json.contains("bytes") ||
      !json["bytes"].is_number_unsigned()) {
    return absl::DataLossError(absl::StrCat(Path(job), ": is damaged; import the weights of job '",
                                            job, "' again, or remove it"));
  }
  PendingImport import;
  import.path = json["path"].get<std::string>();
  import.uid = json["uid"].get<uint32_t>();
  import.bytes = json["bytes"].get<uint64_t>();
  return std::optional<PendingImport>(import);
}

absl::Status Imports::Remove(const std::string& job) {
  const absl::Status status = files_->Remove(Path(job));
  if (absl::IsNotFound(status)) return absl::OkStatus();
  return status.ok() ? files_->SyncDirectory(directory_) : status;
}

absl::StatusOr<std::string> ResolveBelow(const std::string& root, const std::string& path) {
  const std::string full = absl::StartsWith(path, "/") ? path : env::JoinPath(root, path);
  char real[PATH_MAX], real_root[PATH_MAX];
  if (realpath(root.c_str(), real_root) == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat(root, ": cannot be looked up"));
  }
  if (realpath(full.c_str(), real) == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat(full, ": cannot be looked up"));
  }
  if (!absl::StartsWith(real, absl::StrCat(real_root, "/"))) {
    return absl::PermissionDeniedError(
        absl::StrCat(path, " does not lie below ", root,
                     ", which is all that the daemon opens (checkpoint.directory); put it there"));
  }
  return std::string(real);
}

absl::Status CheckMayRead(const std::string& root, const std::string& path, uint32_t uid) {
  char real_root[PATH_MAX];
  if (realpath(root.c_str(), real_root) == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat(root, ": cannot be looked up"));
  }
  const std::string below = absl::StrCat(real_root, "/");
  for (std::string at = path; absl::StartsWith(at, below); at = env::ParentOf(at)) {
    struct stat info {};
    if (lstat(at.c_str(), &info) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat(at, ": cannot be looked up"));
    }
    const mode_t needed = at == path ? S_IROTH : S_IXOTH;
    if (S_ISLNK(info.st_mode) || (info.st_uid != uid && (info.st_mode & needed) == 0)) {
      return absl::PermissionDeniedError(
          absl::StrCat(path, " cannot be read by user ", uid, ": ", at, " belongs to user ",
                       info.st_uid, "; have it given to you, or made readable for all"));
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd::checkpoint

// Files of weights that wait for the jobs that are to begin with them.
#ifndef SHARDD_SERVER_CHECKPOINT_IMPORTS_H_
#define SHARDD_SERVER_CHECKPOINT_IMPORTS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/env/file_system.h"

namespace shardd::checkpoint {

struct PendingImport {
  std::string path;
  uint32_t uid = 0;    // whose job it is for
  uint64_t bytes = 0;  // of the file when it was imported
};

// Kept durably, one small file a job, below the checkpoint directory: they outlive the daemon.
class Imports {
 public:
  Imports(env::FileSystem* files, std::string directory)
      : files_(files), directory_(std::move(directory)) {}

  // Replaces what waits for that job.
  absl::Status Put(const std::string& job, const PendingImport& import);
  absl::StatusOr<std::optional<PendingImport>> Find(const std::string& job) const;
  // OK when there is none.
  absl::Status Remove(const std::string& job);

 private:
  std::string Path(const std::string& job) const;
  env::FileSystem* files_;
  std::string directory_;
};

// The real path of `path` (absolute, or relative to `root`), which must lie below `root`, links
// followed: PermissionDenied else.
absl::StatusOr<std::string> ResolveBelow(const std::string& root, const std::string& path);

// Whether user `uid` could read the file at `path` (from ResolveBelow) without the daemon: it is
// theirs or everybody's, and so is the way to it from `root` on. What belongs to a group does not
// count. PermissionDenied else; for who may read everything, do not ask.
absl::Status CheckMayRead(const std::string& root, const std::string& path, uint32_t uid);

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_IMPORTS_H_

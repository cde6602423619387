// The file system that a mirrored journal is written through (job_mirror.h).
#ifndef SHARDD_SERVER_PEER_MIRRORED_FILES_H_
#define SHARDD_SERVER_PEER_MIRRORED_FILES_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/peer/job_mirror.h"

namespace shardd::peer {

// All is done by `base`; what changes the files of `directory` is forwarded to `mirror`, and Sync
// and SyncDirectory wait for it too. All three outlive it and its files.
class MirroredFileSystem final : public env::FileSystem {
 public:
  MirroredFileSystem(env::FileSystem* base, env::Failpoints* failpoints, std::string directory,
                     JobMirror* mirror)
      : base_(base), failpoints_(failpoints), directory_(std::move(directory)), mirror_(mirror) {}

  absl::StatusOr<std::unique_ptr<env::File>> Open(const std::string& path,
                                                  const env::OpenOptions& options) override;
  absl::Status MakeDirectory(const std::string& path) override {
    return base_->MakeDirectory(path);
  }
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    return base_->List(path);
  }
  absl::StatusOr<env::FileInfo> Stat(const std::string& path) override { return base_->Stat(path); }
  absl::StatusOr<uint64_t> FreeBytes(const std::string& path) override {
    return base_->FreeBytes(path);
  }

 private:
  friend class JobMirror;
  // The name of a file that is used under it, which Rename changes. With the order held alone.
  std::shared_ptr<std::string> Track(const std::string& name);
  // The name of a file that is mirrored; none: it is not.
  std::optional<std::string> NameOf(const std::string& path) const;

  env::FileSystem* base_;
  env::Failpoints* failpoints_;
  const std::string directory_;
  JobMirror* mirror_;
  std::vector<std::weak_ptr<std::string>> tracked_;  // with the order held alone
};

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_MIRRORED_FILES_H_

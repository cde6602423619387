// Whose the files are that the daemon writes for a job.
#ifndef SHARDD_SERVER_CHECKPOINT_OWNER_H_
#define SHARDD_SERVER_CHECKPOINT_OWNER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/checkpoint/manifest.h"

namespace shardd::checkpoint {

// A daemon that runs as root gives the files of a checkpoint (the manifest too) to the job's
// user, who may then read and copy them; the directory stays its own, so that nobody else puts
// links where it writes. Without such a right, or when it is the user, nothing changes.
absl::Status GiveTo(uint32_t uid, const std::string& directory,
                    const std::vector<FileEntry>& files);
absl::Status GiveFileTo(uint32_t uid, const std::string& path);
// Everybody may look up names in it; the files have their own modes.
absl::Status OpenDirectoryToAll(const std::string& directory);

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_OWNER_H_

// Which snapshots of a job count.
#ifndef SHARDD_SERVER_JOURNAL_MANIFEST_H_
#define SHARDD_SERVER_JOURNAL_MANIFEST_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/env/file_system.h"
#include "server/journal/format.h"

namespace shardd::journal {

struct Manifest {
  JobIdentity job;
  uint64_t durable_lsn = 0;
  std::vector<ManifestSnapshot> snapshots;  // oldest first, at most kMaxSnapshots
};

// Replaces the manifest of the journal in `directory`, durably; a crash leaves the old or the new
// one. `before_rename` is called when the new one is durable under its temporary name.
absl::Status WriteManifest(env::FileSystem* files, const std::string& directory,
                           const Manifest& manifest, const std::function<void()>& before_rename);
// NotFound: there is none. DataLoss: damaged. FailedPrecondition: of another format version.
absl::StatusOr<Manifest> ReadManifest(env::FileSystem* files, const std::string& directory);

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_MANIFEST_H_

// Jobs that nobody has used for long, on disk instead of in memory (docs/formats/spill.md).
#ifndef SHARDD_SERVER_STORE_SPILL_H_
#define SHARDD_SERVER_STORE_SPILL_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/contract/layout.h"
#include "proto/control.pb.h"
#include "server/env/file_system.h"
#include "server/store/job_segments.h"
#include "server/store/state_directory.h"

namespace shardd::store {

// Where in a spill a test may hold or kill the daemon.
using SpillPoint = std::function<void(const char* name)>;

// Thread-safe: it holds no state; one job's calls must not overlap.
class SpillDirectory {
 public:
  // Makes the directory (0700) with its parents, takes its lock for the object's life, and removes
  // what an interrupted spill left. FailedPrecondition: it belongs to somebody else, or others may
  // write to it.
  static absl::StatusOr<std::unique_ptr<SpillDirectory>> Open(env::FileSystem* files,
                                                              const std::string& path,
                                                              SpillPoint reach);

  const std::string& path() const { return path_; }
  // The jobs that lie here, with the status that Spill was given and state "spilled". One that
  // cannot be read is there with `failure` set.
  std::map<std::string, v1::JobStatus> Jobs() const;

  // Writes a job that stands still, under status.name(); durable on return. ResourceExhausted: too
  // little space; then, as on any failure, nothing is left of it and an older spill of the job is
  // untouched.
  absl::Status Spill(const JobSegments& segments, const contract::Layout& layout,
                     const v1::JobStatus& status) const;
  // Builds the job's segments again. DataLoss names the file that is damaged. The spill stays
  // until Remove.
  absl::StatusOr<AdoptedJob> Restore(const StateDirectory& directory, const std::string& job) const;
  absl::Status Remove(const std::string& job) const;

 private:
  SpillDirectory(env::FileSystem* files, std::string path, SpillPoint reach,
                 contract::UniqueFd lock)
      : files_(files), path_(std::move(path)), reach_(std::move(reach)), lock_(std::move(lock)) {}
  absl::StatusOr<v1::JobStatus> ReadStatus(const std::string& job) const;

  env::FileSystem* files_;
  const std::string path_;
  const SpillPoint reach_;
  contract::UniqueFd lock_;
};

}  // namespace shardd::store

#endif  // SHARDD_SERVER_STORE_SPILL_H_

// The tmpfs directory that holds the segments of all jobs.
#ifndef SHARDD_SERVER_STORE_STATE_DIRECTORY_H_
#define SHARDD_SERVER_STORE_STATE_DIRECTORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/contract/fd_passing.h"

namespace shardd::store {

// Thread-safe after Open: it does not change.
class StateDirectory {
 public:
  // Makes the directory (0700) if it is missing and takes its lock for the life of the object.
  // FailedPrecondition: not tmpfs, owned by somebody else, or another daemon holds it.
  // Removes what an interrupted job creation left ("jobs/.NAME.new"); touches nothing else.
  static absl::StatusOr<StateDirectory> Open(const std::string& path);

  const std::string& path() const { return path_; }
  // What pages of new files are made of: 2 MiB on a tmpfs mounted huge=always, else 4 KiB.
  uint64_t page_bytes() const { return page_bytes_; }
  // Free space of the file system now.
  absl::StatusOr<uint64_t> FreeBytes() const;
  // What the files of all jobs here take.
  uint64_t JobBytes() const;
  // Names of the jobs that lie here.
  std::vector<std::string> JobNames() const;
  bool Holds(const std::string& job) const;
  std::string JobPath(const std::string& job) const { return path_ + "/jobs/" + job; }
  std::string NewJobPath(const std::string& job) const { return path_ + "/jobs/." + job + ".new"; }

  // A note that a daemon was drained at `when`, for its successor.
  absl::Status LeaveDrainNote(absl::Time when) const;
  // Reads and removes it; InfinitePast: there is none.
  absl::Time TakeDrainNote() const;

 private:
  StateDirectory() = default;
  std::string path_;
  uint64_t page_bytes_ = 4096;
  contract::UniqueFd lock_;
};

// Removes a directory of plain files. OK when it is not there.
absl::Status RemoveJobDirectory(const std::string& path);

}  // namespace shardd::store

#endif  // SHARDD_SERVER_STORE_STATE_DIRECTORY_H_

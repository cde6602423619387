// The directory that holds the journals of all jobs of a daemon.
#ifndef SHARDD_SERVER_JOURNAL_JOURNAL_DIRECTORY_H_
#define SHARDD_SERVER_JOURNAL_JOURNAL_DIRECTORY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/contract/fd_passing.h"
#include "server/env/file_system.h"

namespace shardd::journal {

// Thread-safe after Open.
class JournalDirectory {
 public:
  // Makes the directory if it is missing and takes its lock for the life of the object.
  // FailedPrecondition: another daemon holds it, or it belongs to somebody else. Removes what an
  // interrupted creation or removal left (".JOB.new", ".JOB.deleted"); touches nothing else.
  static absl::StatusOr<JournalDirectory> Open(env::FileSystem* files, const std::string& path);

  const std::string& path() const { return path_; }
  std::string JobPath(const std::string& job) const { return path_ + "/" + job; }
  // Names of the jobs that have journals here.
  absl::StatusOr<std::vector<std::string>> JobNames() const;
  bool Holds(const std::string& job) const;
  // Removes a job's journal, so that a crash meanwhile leaves all or nothing that counts. OK if
  // there is none.
  absl::Status Remove(const std::string& job) const;

 private:
  JournalDirectory() = default;
  env::FileSystem* files_ = nullptr;
  std::string path_;
  contract::UniqueFd lock_;
};

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_JOURNAL_DIRECTORY_H_

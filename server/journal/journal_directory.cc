#include "server/journal/journal_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace shardd::journal {

absl::StatusOr<JournalDirectory> JournalDirectory::Open(env::FileSystem* files,
                                                        const std::string& path) {
  if (absl::Status status = env::MakeDirectories(files, path); !status.ok()) return status;
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot stat ", path));
  }
  if (info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the journal directory ", path, " belongs to uid ", info.st_uid,
        " or can be written by others (the daemon runs as ", geteuid(),
        "); choose another journal.directory, or take the right to write from others"));
  }
  JournalDirectory directory;
  directory.files_ = files;
  directory.path_ = path;
  const std::string lock = path + "/.lock";  // no job has such a name
  directory.lock_ =
      contract::UniqueFd(open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!directory.lock_) return contract::ErrnoStatus(errno, absl::StrCat("cannot open ", lock));
  if (flock(directory.lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("another daemon holds the journal directory ", path,
                     "; stop it, or give this one a journal.directory of its own"));
  }
  absl::StatusOr<std::vector<std::string>> names = files->List(path);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    if (name.front() != '.' || (!name.ends_with(".new") && !name.ends_with(".deleted"))) continue;
    if (absl::Status s = env::RemoveTree(files, directory.JobPath(name)); !s.ok()) return s;
  }
  return directory;
}

absl::StatusOr<std::vector<std::string>> JournalDirectory::JobNames() const {
  absl::StatusOr<std::vector<std::string>> names = files_->List(path_);
  if (!names.ok()) return names.status();
  std::vector<std::string> jobs;
  for (const std::string& name : *names) {
    if (name.front() == '.') continue;
    absl::StatusOr<env::FileInfo> info = files_->Stat(JobPath(name));
    if (info.ok() && info->is_directory) jobs.push_back(name);
  }
  return jobs;
}

bool JournalDirectory::Holds(const std::string& job) const {
  return !absl::IsNotFound(files_->Stat(JobPath(job)).status());
}

absl::Status JournalDirectory::Remove(const std::string& job) const {
  const std::string going = absl::StrCat(path_, "/.", job, ".deleted");
  if (absl::Status status = env::RemoveTree(files_, going); !status.ok()) return status;
  // A journal that was to take its place while chunks moved.
  for (const char* beside : {".next", ".last"}) {
    const std::string path = absl::StrCat(path_, "/.", job, beside);
    if (absl::Status status = env::RemoveTree(files_, path); !status.ok()) return status;
  }
  if (!Holds(job)) return absl::OkStatus();
  if (absl::Status status = files_->Rename(JobPath(job), going); !status.ok()) return status;
  if (absl::Status status = files_->SyncDirectory(path_); !status.ok()) return status;
  return env::RemoveTree(files_, going);
}

}  // namespace shardd::journal

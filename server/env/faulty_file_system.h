// A file system that fails when and how a test wants, and that forgets on a machine's death what
// was not made durable.
//
// A plan is a text of rules separated by ',':
//
//   PATTERN:OP:N:ACTION   PATTERN  shell pattern of the whole path ('*' also matches '/')
//                         OP       open create read write sync preallocate truncate mkdir syncdir
//                                  rename remove list stat, or * for all
//                         N        which matching call, from 1: "3", "3-5", "3+" (and all later)
//                         ACTION   eio, enospc: fails, nothing done
//                                  short=K: a write puts K bytes there and fails with EIO; a read
//                                           gives only K
//                                  wait: holds the caller until Release
//                                  kill: SIGKILL of this process before the call
//   unsynced              keep, beside the files, what the machine would have without all that
//                         was not synced, for DropUnsynced
//
// With `unsynced`, old contents are logged before they are overwritten, in ".unsynced-INODE" and
// ".unsynced-names" of the file's directory; Sync and SyncDirectory remove them. That holds for
// a process that is killed at any moment: a test drops what was not synced after its death. List
// does not show these files. Files are then read and written through the system's own calls, so
// the base must be the PosixFileSystem.
#ifndef SHARDD_SERVER_ENV_FAULTY_FILE_SYSTEM_H_
#define SHARDD_SERVER_ENV_FAULTY_FILE_SYSTEM_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/env/file_system.h"

namespace shardd::env {

struct FaultRule {
  enum class Action { kEio, kEnospc, kShort, kWait, kKill };
  std::string pattern;
  std::string operation;
  uint64_t first = 1;
  uint64_t last = 1;
  Action action = Action::kEio;
  uint64_t short_bytes = 0;
  uint64_t seen = 0;  // matching calls so far
};

struct FaultPlan {
  std::vector<FaultRule> rules;
  bool unsynced = false;
};

// InvalidArgument says which rule is wrong and how rules look. Empty: no faults.
absl::StatusOr<FaultPlan> ParseFaultPlan(const std::string& text);

// Thread-safe, as its base is. The base outlives it.
class FaultyFileSystem final : public FileSystem {
 public:
  FaultyFileSystem(FileSystem* base, FaultPlan plan);
  ~FaultyFileSystem() override;

  // Rules of now on; the counts begin anew. Held callers go on.
  void SetRules(std::vector<FaultRule> rules);
  // Lets held callers go on.
  void Release();
  // Waits until a caller is held.
  void AwaitHeld();

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path,
                                             const OpenOptions& options) override;
  absl::Status MakeDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override;
  absl::StatusOr<FileInfo> Stat(const std::string& path) override;
  absl::StatusOr<uint64_t> FreeBytes(const std::string& path) override;

 private:
  friend class FaultyFile;
  // What to do instead of the call, if anything.
  struct Fault {
    absl::Status status;
    bool is_short = false;
    uint64_t short_bytes = 0;
  };
  Fault Check(const std::string& operation, const std::string& path);

  FileSystem* base_;
  const bool unsynced_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<FaultRule> rules_;  // under mutex_
  uint64_t released_ = 0;         // under mutex_
  int held_ = 0;                  // under mutex_
  std::mutex log_mutex_;          // one change at a time, so that logs have an order
};

// Takes back under `directory` all that was not synced when the process that used it through an
// `unsynced` FaultyFileSystem ended. `seed` 0: all of it; else, of what was written into files,
// a random half of the 4 KiB pages stays, as a disk may have it. Posix only.
absl::Status DropUnsynced(const std::string& directory, uint64_t seed = 0);

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_FAULTY_FILE_SYSTEM_H_

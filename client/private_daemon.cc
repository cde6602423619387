#include "client/private_daemon.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/daemon_starter.h"
#include "proto/contract/layout.h"
#include "proto/contract/version.h"

namespace shardd {

namespace {

using contract::UniqueFd;

// How long memory is kept for a trainer that does not come back; then the job goes to disk, and
// the daemon, which holds nothing any more, ends.
constexpr int kJobTtlSeconds = 24 * 3600;
constexpr int kExitSeconds = kJobTtlSeconds + 3600;
// An orderly end writes nothing to disk: it is quick.
constexpr absl::Duration kEnd = absl::Seconds(10);
// Socket paths end at 107 bytes; longer job names are replaced by their hash.
constexpr size_t kLongestName = 40;

// PARENT/shardd-UID/JOB, both made.
absl::StatusOr<std::string> JobDirectory(const std::string& parent, const std::string& job) {
  std::string name = job;
  if (name.size() > kLongestName) {
    name = absl::StrFormat("%016x", contract::Hasher().Add(job).value());
  }
  const std::string user = absl::StrCat(parent, "/shardd-", geteuid(), "-private");
  const std::string directory = absl::StrCat(user, "/", name);
  absl::Status status = MakePrivateDirectory(user);
  if (status.ok()) status = MakePrivateDirectory(directory);
  if (!status.ok()) return status;
  return directory;
}

// Of the daemon in `directory`: on a disk, and under the same name whenever it is started.
std::string SpillDirectory(const std::string& directory) {
  return absl::StrCat("/var/tmp/shardd-", geteuid(), "-private/",
                      directory.substr(directory.rfind('/') + 1));
}

// The given binary, else "shardd" beside this executable, else of PATH.
std::string DaemonBinary(const SessionOptions& options) {
  if (!options.daemon_binary.empty()) return options.daemon_binary;
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self));
  if (length > 0) {
    const std::string path(self, static_cast<size_t>(length));
    const std::string beside = absl::StrCat(path.substr(0, path.rfind('/')), "/shardd");
    if (access(beside.c_str(), X_OK) == 0) return beside;
  }
  return "shardd";
}

absl::Status CheckVersion(const AttachConnection& attach, const std::string& socket) {
  if (attach.version() == contract::kVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the private daemon at ", socket, " has version ", attach.version(),
                   ", this library ", contract::kVersion, "; end it (pid ", attach.daemon_pid(),
                   ") or use the version that started it"));
}

}  // namespace

absl::StatusOr<FoundDaemon> StartPrivateDaemon(const SessionOptions& options,
                                               const std::string& job, const DaemonPlaces& places) {
  absl::StatusOr<std::string> directory = JobDirectory(places.private_sockets, job);
  if (!directory.ok()) return directory.status();
  absl::StatusOr<std::string> state = JobDirectory(places.private_states, job);
  if (!state.ok()) return state.status();
  absl::StatusOr<DaemonInDirectory> daemon =
      AttachOrStartDaemon({.directory = *directory,
                           .binary = DaemonBinary(options),
                           .flags = {absl::StrCat("--store.directory=", *state),
                                     absl::StrCat("--job_ttl_seconds=", kJobTtlSeconds),
                                     absl::StrCat("--spill.directory=", SpillDirectory(*directory)),
                                     absl::StrCat("--exit_when_idle_seconds=", kExitSeconds)},
                           .timeout = options.connect_timeout});
  if (!daemon.ok()) return daemon.status();
  absl::Status status = CheckVersion(*daemon->attach, daemon->socket_path);
  if (!status.ok()) return status;
  FoundDaemon found;
  found.private_directory = *directory;
  found.socket_path = daemon->socket_path;
  found.attach = std::move(daemon->attach);
  return found;
}

absl::Status EndPrivateDaemon(const std::string& directory, pid_t pid,
                              const std::function<absl::StatusOr<bool>()>& may_end) {
  absl::StatusOr<UniqueFd> lock = LockDaemonDirectory(directory);
  if (!lock.ok()) return lock.status();
  // A pidfd before the question: the answer then proves that it is the daemon's.
  UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!process) return absl::OkStatus();
  absl::StatusOr<bool> end = may_end();
  if (!end.ok()) return end.status();
  if (!*end) return absl::OkStatus();
  // One that takes longer to end has been told to: that is not this session's error.
  absl::Status ended = EndDaemon(process, pid, kEnd);
  return absl::IsDeadlineExceeded(ended) ? absl::OkStatus() : ended;
}

}  // namespace shardd

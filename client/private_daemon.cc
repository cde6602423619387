#include "client/private_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/contract/layout.h"
#include "proto/contract/version.h"

extern char** environ;

namespace shardd {

namespace {

using contract::ErrnoStatus;
using contract::UniqueFd;

// How long state is kept for a trainer that does not come back.
constexpr int kJobTtlSeconds = 24 * 3600;
// An orderly end writes nothing to disk: it is quick.
constexpr int kEndMilliseconds = 10'000;
// Socket paths end at 107 bytes; longer job names are replaced by their hash.
constexpr size_t kLongestName = 40;

// A directory that only this user can write to, made if it is not there.
absl::Status MakePrivateDirectory(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, absl::StrCat("cannot make the directory ", path));
  }
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot look at ", path));
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(path, " is not a directory that belongs to user ", geteuid(),
                     " alone; remove it, or set SHARDD_ADDRESS to a daemon's socket"));
  }
  return absl::OkStatus();
}

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

absl::StatusOr<UniqueFd> Lock(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/start.lock");
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return ErrnoStatus(errno, absl::StrCat("cannot open ", path));
  int result;
  do {
    result = flock(fd.get(), LOCK_EX);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return ErrnoStatus(errno, absl::StrCat("cannot lock ", path));
  return fd;
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

absl::StatusOr<pid_t> Spawn(const std::string& binary, const std::vector<std::string>& flags,
                            const std::string& log_path) {
  std::vector<char*> argv = {const_cast<char*>(binary.c_str())};
  for (const std::string& flag : flags) argv.push_back(const_cast<char*>(flag.c_str()));
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                   0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, binary.c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    return ErrnoStatus(error, absl::StrCat("cannot start the daemon '", binary,
                                           "' (install shardd, set SHARDD_DAEMON_BINARY to it, or "
                                           "SHARDD_ADDRESS to a running one)"));
  }
  return pid;
}

std::string LastLine(const std::string& path) {
  std::ifstream file(path);
  std::string line, last;
  while (std::getline(file, line)) {
    if (!line.empty()) last = line;
  }
  return last;
}

// Attaches to a daemon that was just started; notices when it ends instead.
absl::StatusOr<std::unique_ptr<AttachConnection>> AwaitStart(pid_t pid, const std::string& socket,
                                                             const std::string& log_path,
                                                             absl::Time deadline) {
  while (true) {
    absl::StatusOr<std::unique_ptr<AttachConnection>> attach = AttachConnection::Connect(
        socket, std::min(deadline, absl::Now() + absl::Milliseconds(100)));
    if (attach.ok() || !absl::IsUnavailable(attach.status())) return attach;
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) {
      return absl::UnavailableError(absl::StrCat(
          "the private daemon ended while it started: ", LastLine(log_path), " (", log_path, ")"));
    }
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(absl::StrCat("the private daemon (pid ", pid,
                                                 ") did not come up in time; see ", log_path));
    }
  }
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
  absl::StatusOr<UniqueFd> lock = Lock(*directory);
  if (!lock.ok()) return lock.status();

  FoundDaemon found;
  found.private_directory = *directory;
  found.socket_path = absl::StrCat(*directory, "/shardd.sock");
  absl::StatusOr<std::unique_ptr<AttachConnection>> attach =
      AttachConnection::Connect(found.socket_path, absl::Now());
  if (!attach.ok()) {
    const std::string log_path = absl::StrCat(*directory, "/shardd.log");
    const std::vector<std::string> flags = {
        absl::StrCat("--listen.socket=", found.socket_path),
        absl::StrCat("--store.directory=", *state),
        absl::StrCat("--exit_when_idle_seconds=", kJobTtlSeconds),
    };
    absl::StatusOr<pid_t> pid = Spawn(DaemonBinary(options), flags, log_path);
    if (!pid.ok()) return pid.status();
    attach = AwaitStart(*pid, found.socket_path, log_path, absl::Now() + options.connect_timeout);
    if (!attach.ok()) return attach.status();
  }
  absl::Status status = CheckVersion(**attach, found.socket_path);
  if (!status.ok()) return status;
  found.attach = *std::move(attach);
  return found;
}

absl::Status EndPrivateDaemon(const std::string& directory, pid_t pid,
                              const std::function<absl::StatusOr<bool>()>& may_end) {
  absl::StatusOr<UniqueFd> lock = Lock(directory);
  if (!lock.ok()) return lock.status();
  // A pidfd before the question: the answer then proves that it is the daemon's.
  UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!process) return absl::OkStatus();
  absl::StatusOr<bool> end = may_end();
  if (!end.ok()) return end.status();
  if (!*end) return absl::OkStatus();
  if (syscall(SYS_pidfd_send_signal, process.get(), SIGTERM, nullptr, 0) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot end the private daemon ", pid));
  }
  pollfd poller{process.get(), POLLIN, 0};
  if (poll(&poller, 1, kEndMilliseconds) == 1) waitpid(pid, nullptr, WNOHANG);
  return absl::OkStatus();
}

}  // namespace shardd

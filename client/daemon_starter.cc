#include "client/daemon_starter.h"

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

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

extern char** environ;

namespace shardd {

namespace {

using contract::ErrnoStatus;
using contract::UniqueFd;

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
          "the daemon ended while it started: ", LastLine(log_path), " (", log_path, ")"));
    }
    if (absl::Now() >= deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return absl::UnavailableError(
          absl::StrCat("the daemon that was started did not answer in time; see ", log_path));
    }
  }
}

}  // namespace

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

absl::StatusOr<UniqueFd> LockDaemonDirectory(const std::string& directory) {
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

absl::StatusOr<DaemonInDirectory> AttachOrStartDaemon(const DaemonStart& start) {
  absl::StatusOr<UniqueFd> lock = LockDaemonDirectory(start.directory);
  if (!lock.ok()) return lock.status();
  DaemonInDirectory found;
  found.socket_path = absl::StrCat(start.directory, "/shardd.sock");
  absl::StatusOr<std::unique_ptr<AttachConnection>> attach =
      AttachConnection::Connect(found.socket_path, absl::Now());
  if (!attach.ok()) {
    if (!absl::IsUnavailable(attach.status())) return attach.status();
    const std::string log_path = absl::StrCat(start.directory, "/shardd.log");
    std::vector<std::string> flags = {absl::StrCat("--listen.socket=", found.socket_path)};
    flags.insert(flags.end(), start.flags.begin(), start.flags.end());
    absl::StatusOr<pid_t> pid = Spawn(start.binary, flags, log_path);
    if (!pid.ok()) return pid.status();
    attach = AwaitStart(*pid, found.socket_path, log_path, absl::Now() + start.timeout);
    if (!attach.ok()) return attach.status();
    found.started_pid = *pid;
  }
  found.attach = *std::move(attach);
  return found;
}

absl::Status EndDaemon(const UniqueFd& pidfd, pid_t pid, absl::Duration timeout) {
  if (syscall(SYS_pidfd_send_signal, pidfd.get(), SIGTERM, nullptr, 0) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot end the daemon ", pid));
  }
  pollfd poller{pidfd.get(), POLLIN, 0};
  if (poll(&poller, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) != 1) {
    return absl::DeadlineExceededError(absl::StrCat("the daemon, process ", pid,
                                                    ", was told to end and has not after ",
                                                    absl::FormatDuration(timeout)));
  }
  waitpid(pid, nullptr, WNOHANG);
  return absl::OkStatus();
}

}  // namespace shardd

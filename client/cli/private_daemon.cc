#include "client/cli/private_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/attach_connection.h"
#include "proto/contract/fd_passing.h"

namespace shardd::cli {

namespace {

constexpr absl::Duration kProbe = absl::Milliseconds(20);

absl::Status PrepareDirectory(const std::string& directory) {
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot make ", directory));
  }
  struct stat info;
  if (lstat(directory.c_str(), &info) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot look at ", directory));
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(directory,
                     " must be a directory of yours that nobody else may write: remove "
                     "it, or set XDG_RUNTIME_DIR"));
  }
  return absl::OkStatus();
}

std::string EndOfLog(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  std::string all = text.str();
  constexpr size_t kShown = 2000;
  return all.size() <= kShown ? all : all.substr(all.size() - kShown);
}

// The child's side of fork; see rank_process.cc for why so little is called.
[[noreturn]] void RunDaemon(const char* program, char* const* arguments, int null, int log) {
  setsid();
  dup2(null, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execv(program, arguments);
  _exit(127);
}

absl::StatusOr<pid_t> StartDaemon(const PrivateDaemonOptions& options, const std::string& socket,
                                  const std::string& log_path) {
  contract::UniqueFd log(
      open(log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!log) return contract::ErrnoStatus(errno, absl::StrCat("cannot write ", log_path));
  contract::UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::vector<std::string> arguments = {options.binary, absl::StrCat("--listen.socket=", socket)};
  arguments.insert(arguments.end(), options.flags.begin(), options.flags.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t pid = fork();
  if (pid < 0) return contract::ErrnoStatus(errno, "cannot start another process");
  if (pid == 0) RunDaemon(options.binary.c_str(), argv.data(), null.get(), log.get());
  return pid;
}

absl::Status AwaitAnswer(pid_t pid, const std::string& socket, const std::string& log_path,
                         absl::Duration timeout) {
  absl::Time deadline = absl::Now() + timeout;
  while (true) {
    absl::Status attached = AttachConnection::Connect(socket, absl::Now() + kProbe).status();
    if (attached.ok()) return attached;
    int status;
    if (waitpid(pid, &status, WNOHANG) == pid) {
      return absl::UnavailableError(
          absl::StrCat("the daemon ended while it was starting; its log, ", log_path, ":\n",
                       EndOfLog(log_path)));
    }
    if (absl::Now() >= deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return absl::UnavailableError(absl::StrCat("the daemon did not answer within ",
                                                 absl::FormatDuration(timeout), " (",
                                                 attached.message(), "); its log: ", log_path));
    }
  }
}

}  // namespace

absl::StatusOr<PrivateDaemon> EnsurePrivateDaemon(const PrivateDaemonOptions& options) {
  absl::Status prepared = PrepareDirectory(options.directory);
  if (!prepared.ok()) return prepared;
  std::string lock_path = absl::StrCat(options.directory, "/start.lock");
  contract::UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock || flock(lock.get(), LOCK_EX) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot lock ", lock_path));
  }
  PrivateDaemon daemon;
  daemon.socket = absl::StrCat(options.directory, "/shardd.sock");
  absl::Status attached = AttachConnection::Connect(daemon.socket, absl::Now()).status();
  if (!absl::IsUnavailable(attached)) {
    if (!attached.ok()) return attached;
    return daemon;
  }
  std::string log_path = absl::StrCat(options.directory, "/shardd.log");
  absl::StatusOr<pid_t> pid = StartDaemon(options, daemon.socket, log_path);
  if (!pid.ok()) return pid.status();
  absl::Status answered = AwaitAnswer(*pid, daemon.socket, log_path, options.start_timeout);
  if (!answered.ok()) return answered;
  daemon.started_pid = *pid;
  return daemon;
}

absl::Status EndPrivateDaemon(const PrivateDaemon& daemon, absl::Duration timeout) {
  if (daemon.started_pid == 0) return absl::OkStatus();
  contract::UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, daemon.started_pid, 0)));
  kill(daemon.started_pid, SIGTERM);
  pollfd ended{pidfd.get(), POLLIN, 0};
  bool in_time = poll(&ended, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) == 1;
  if (!in_time) kill(daemon.started_pid, SIGKILL);
  waitpid(daemon.started_pid, nullptr, 0);
  if (in_time) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("the daemon, process ", daemon.started_pid, ", did not end within ",
                   absl::FormatDuration(timeout), " and was killed"));
}

}  // namespace shardd::cli

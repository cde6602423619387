#include "client/cli/rank_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace shardd::cli {

namespace {

constexpr size_t kLongestLine = 64 << 10;

struct Pipe {
  contract::UniqueFd read;
  contract::UniqueFd write;
};

absl::StatusOr<Pipe> MakePipe(bool nonblocking_read) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return contract::ErrnoStatus(errno, "cannot make a pipe");
  Pipe pipe{contract::UniqueFd(fds[0]), contract::UniqueFd(fds[1])};
  if (nonblocking_read) fcntl(fds[0], F_SETFL, O_NONBLOCK);
  return pipe;
}

std::vector<char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// The child's side of fork: async-signal-safe calls only, since other threads may
// have held locks. Never returns.
[[noreturn]] void RunChild(const char* program, char* const* arguments, char* const* environment,
                           int null, int out, int err, int failure, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it died before the line above
  dup2(null, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  execve(program, arguments, environment);
  int error = errno;
  [[maybe_unused]] ssize_t written = write(failure, &error, sizeof(error));
  _exit(127);
}

}  // namespace

void LineReader::Cut(const Sink& sink) {
  size_t begin = 0;
  for (size_t end; (end = pending_.find('\n', begin)) != std::string::npos; begin = end + 1) {
    sink(std::string_view(pending_).substr(begin, end - begin));
  }
  pending_.erase(0, begin);
  if (pending_.size() >= kLongestLine) {
    sink(pending_);
    pending_.clear();
  }
}

void LineReader::Read(const Sink& sink) {
  char buffer[16 << 10];
  // More than a pipe holds, and yet an end to it when the other side never stops.
  for (int i = 0; i < 16 && fd_; ++i) {
    ssize_t n = read(fd_.get(), buffer, sizeof(buffer));
    if (n > 0) {
      pending_.append(buffer, static_cast<size_t>(n));
      Cut(sink);
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && errno == EAGAIN) {
      return;
    } else {
      if (!pending_.empty()) sink(pending_);
      pending_.clear();
      fd_.Reset();
    }
  }
}

void LineReader::Finish(const Sink& sink) {
  Read(sink);
  if (!pending_.empty()) sink(pending_);
  pending_.clear();
  fd_.Reset();
}

absl::StatusOr<RankProcess> RankProcess::Start(const std::string& program,
                                               const std::vector<std::string>& arguments,
                                               const std::vector<std::string>& environment) {
  absl::StatusOr<Pipe> out = MakePipe(true);
  absl::StatusOr<Pipe> err = MakePipe(true);
  // Closed by a successful exec; else it brings the errno.
  absl::StatusOr<Pipe> failure = MakePipe(false);
  for (const auto* pipe : {&out, &err, &failure}) {
    if (!pipe->ok()) return pipe->status();
  }
  contract::UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null) return contract::ErrnoStatus(errno, "cannot open /dev/null");
  std::vector<char*> argv = Pointers(arguments);
  std::vector<char*> envp = Pointers(environment);
  pid_t parent = getpid();
  pid_t pid = fork();
  if (pid < 0) return contract::ErrnoStatus(errno, "cannot start another process");
  if (pid == 0) {
    RunChild(program.c_str(), argv.data(), envp.data(), null.get(), out->write.get(),
             err->write.get(), failure->write.get(), parent);
  }
  setpgid(pid, pid);  // whoever is first
  failure->write.Reset();
  int error = 0;
  ssize_t n;
  do {
    n = read(failure->read.get(), &error, sizeof(error));
  } while (n < 0 && errno == EINTR);
  if (n == sizeof(error)) {
    waitpid(pid, nullptr, 0);
    return contract::ErrnoStatus(error, absl::StrCat("cannot run ", program));
  }
  RankProcess process;
  process.pid_ = pid;
  // It is our child and not reaped yet: the number is its own.
  process.pidfd_.Reset(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!process.pidfd_) {
    int open_error = errno;
    kill(-pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    return contract::ErrnoStatus(open_error, "cannot watch a process (pidfd_open)");
  }
  process.out_ = LineReader(std::move(out->read));
  process.err_ = LineReader(std::move(err->read));
  return process;
}

void RankProcess::Signal(int signal) const { kill(-pid_, signal); }

std::optional<int> RankProcess::Reap() {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  // Before it is reaped: until then its group's number cannot be anybody else's.
  kill(-pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

absl::StatusOr<std::string> FindProgram(const std::string& name,
                                        const std::vector<std::string>& environment) {
  if (name.find('/') != std::string::npos) {
    if (access(name.c_str(), X_OK) == 0) return name;
    return absl::NotFoundError(absl::StrCat("cannot run ", name, ": ", strerror(errno)));
  }
  std::string path = "/usr/local/bin:/usr/bin:/bin";
  for (const std::string& variable : environment) {
    if (absl::StartsWith(variable, "PATH=")) path = variable.substr(5);
  }
  for (const auto& directory : absl::StrSplit(path, ':')) {
    std::string candidate = absl::StrCat(directory.empty() ? "." : directory, "/", name);
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return absl::NotFoundError(absl::StrCat("no program '", name, "' in PATH (", path, ")"));
}

}  // namespace shardd::cli

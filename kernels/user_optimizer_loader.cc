#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "kernels/user_optimizer.h"

namespace shardd::kernels {
namespace {

constexpr std::chrono::seconds kPatience{20};

using DescribeFunction = const shardd_optimizer_description*();

// Null where `problem` says why.
const shardd_optimizer_description* Open(const std::string& path, std::string* problem) {
  if (path.find('/') == std::string::npos) {
    *problem = "give its path with a '/' in it, as ./" + path;
    return nullptr;
  }
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *problem = dlerror();
    return nullptr;
  }
  void* const symbol = dlsym(library, "shardd_optimizer");
  if (symbol == nullptr) {
    *problem =
        "it has no symbol shardd_optimizer; use SHARDD_DEFINE_OPTIMIZER of "
        "shardd_optimizer.h";
    return nullptr;
  }
  const auto* const description = reinterpret_cast<DescribeFunction*>(symbol)();
  if (description == nullptr) *problem = "its shardd_optimizer() returns null";
  return description;
}

// In the child: "" where all is well.
std::string OpenAndCheck(const std::string& path) {
  std::string problem;
  const shardd_optimizer_description* description = Open(path, &problem);
  return description == nullptr ? problem : CheckUserOptimizer(*description);
}

// What comes from `fd` until it is closed; false after kPatience.
bool ReadAll(int fd, std::string* text) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd ready{fd, POLLIN, 0};
    if (poll(&ready, 1, static_cast<int>(left.count())) <= 0) continue;
    char buffer[512];
    const ssize_t n = read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return true;
    text->append(buffer, static_cast<size_t>(n));
  }
}

// The check in a process of its own, so that a crash is an answer.
std::string CheckInChild(const std::string& path) {
  int pipe_fds[2];
  if (pipe(pipe_fds) != 0) return std::string("cannot make a pipe: ") + std::strerror(errno);
  const pid_t child = fork();
  if (child < 0) {
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    return std::string("cannot start a process to check it in: ") + std::strerror(errno);
  }
  if (child == 0) {
    close(pipe_fds[0]);
    std::string problem = OpenAndCheck(path);
    // "=" says that the check came to its end.
    problem.insert(problem.begin(), '=');
    for (size_t at = 0; at < problem.size();) {
      const ssize_t n = write(pipe_fds[1], problem.data() + at, problem.size() - at);
      if (n <= 0) break;
      at += static_cast<size_t>(n);
    }
    _exit(0);
  }
  close(pipe_fds[1]);
  std::string answer;
  const bool in_time = ReadAll(pipe_fds[0], &answer);
  close(pipe_fds[0]);
  if (!in_time) kill(child, SIGKILL);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!in_time) return "its check does not end within 20 seconds";
  if (answer.empty() || answer[0] != '=') {
    return WIFSIGNALED(status) ? std::string("it crashes: ") + strsignal(WTERMSIG(status))
                               : std::string("it ends the process that it runs in");
  }
  return answer.substr(1);
}

}  // namespace

LoadedOptimizer LoadUserOptimizer(const std::string& path) {
  LoadedOptimizer loaded;
  loaded.problem = CheckInChild(path);
  if (!loaded.problem.empty()) return loaded;
  const shardd_optimizer_description* description = Open(path, &loaded.problem);
  if (description == nullptr) return loaded;
  loaded.optimizer = MakeUserOptimizer(*description).release();
  return loaded;
}

}  // namespace shardd::kernels

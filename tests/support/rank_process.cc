#include "tests/support/rank_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/support/daemon_process.h"

namespace shardd::test {

RankProcess::RankProcess(const std::string& socket, uint32_t rank, uint32_t world,
                         std::vector<std::string> flags, const std::string& binary) {
  const std::string path = Runfile(binary);
  flags.insert(flags.begin(), {path, "--socket=" + socket, "--rank=" + std::to_string(rank),
                               "--world=" + std::to_string(world)});
  std::vector<char*> argv;
  for (std::string& flag : flags) argv.push_back(flag.data());
  argv.push_back(nullptr);
  int pipe_fds[2];
  if (pipe2(pipe_fds, O_CLOEXEC) != 0) std::abort();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(pipe_fds[1], 1);
    execv(path.c_str(), argv.data());
    _exit(127);
  }
  close(pipe_fds[1]);
  out_ = fdopen(pipe_fds[0], "r");
}

RankProcess::~RankProcess() {
  if (pid_ > 0) {
    Signal(SIGKILL);
    Wait();
  }
  std::fclose(out_);
}

std::string RankProcess::AwaitLine(const std::string& prefix) {
  char* line = nullptr;
  size_t size = 0;
  std::string found;
  while (getline(&line, &size, out_) > 0) {
    std::string text = line;
    if (!text.empty() && text.back() == '\n') text.pop_back();
    if (text.rfind(prefix, 0) == 0) {
      found = text;
      break;
    }
    if (text.rfind("error", 0) == 0) std::fprintf(stderr, "rank: %s\n", text.c_str());
  }
  std::free(line);
  return found;
}

void RankProcess::Signal(int signal) { kill(pid_, signal); }

int RankProcess::Wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return status;
}

}  // namespace shardd::test

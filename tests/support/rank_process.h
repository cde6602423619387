// A rank of a job as a child process.
#ifndef SHARDD_TESTS_SUPPORT_RANK_PROCESS_H_
#define SHARDD_TESTS_SUPPORT_RANK_PROCESS_H_

#include <sys/types.h>

#include <cstdio>
#include <string>
#include <vector>

namespace shardd::test {

class RankProcess {
 public:
  // flags: "--job=x" ...; rank, world and socket are added. `binary` is among the test's data.
  RankProcess(const std::string& socket, uint32_t rank, uint32_t world,
              std::vector<std::string> flags, const std::string& binary = "tests/support/toy_rank");
  // Kills it if it still runs.
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;

  pid_t pid() const { return pid_; }
  // Reads lines until one begins with `prefix`, and returns it; "" when the output ends before.
  std::string AwaitLine(const std::string& prefix);
  // SIGKILL, SIGSTOP ...
  void Signal(int signal);
  // Waits for its end; the status as waitpid gives it.
  int Wait();

 private:
  pid_t pid_ = -1;
  FILE* out_ = nullptr;
};

}  // namespace shardd::test

#endif  // SHARDD_TESTS_SUPPORT_RANK_PROCESS_H_

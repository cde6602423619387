// A child process of the chaos runner, with its output in a file.
#ifndef SHARDD_TESTS_CHAOS_PROCESS_H_
#define SHARDD_TESTS_CHAOS_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace shardd::test {

class Process {
 public:
  Process() = default;
  // Starts `arguments[0]`; stdout and stderr are appended to `log`.
  Process(const std::vector<std::string>& arguments, const std::string& log);
  // Kills what still runs.
  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;

  bool running() const { return pid_ > 0; }
  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // Whether it has ended, without waiting; `status` as waitpid gives it.
  bool Ended(int* status);
  // Waits for its end; the status as waitpid gives it.
  int Wait();

 private:
  pid_t pid_ = -1;
};

// Runs a program to its end; the exit status, or -1 when a signal ended it.
int RunToEnd(const std::vector<std::string>& arguments, const std::string& log);

std::string ReadText(const std::string& path);

}  // namespace shardd::test

#endif  // SHARDD_TESTS_CHAOS_PROCESS_H_

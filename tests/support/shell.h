// Runs a program and takes what it wrote.
#ifndef SHARDD_TESTS_SUPPORT_SHELL_H_
#define SHARDD_TESTS_SUPPORT_SHELL_H_

#include <string>
#include <vector>

namespace shardd::test {

struct Finished {
  int code = -1;  // exit code; 128 + signal when it was killed
  std::string out;
  std::string err;
};

// Waits for its end. arguments[0] is its path.
Finished RunProgram(const std::vector<std::string>& arguments);

}  // namespace shardd::test

#endif  // SHARDD_TESTS_SUPPORT_SHELL_H_

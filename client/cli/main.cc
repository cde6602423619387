// shardctl. Reads the environment here and nowhere else.
#include <limits.h>
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "client/cli/commands.h"

extern char** environ;

namespace {

shardd::cli::Environment ReadEnvironment() {
  shardd::cli::Environment environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string text = *entry;
    size_t equals = text.find('=');
    if (equals != std::string::npos) {
      environment.variables[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  environment.uid = getuid();
  environment.interactive = isatty(STDIN_FILENO) == 1;
  environment.stderr_is_terminal = isatty(STDERR_FILENO) == 1;
  char path[PATH_MAX];
  ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  if (length > 0) {
    std::string executable(path, static_cast<size_t>(length));
    environment.executable_directory = executable.substr(0, executable.rfind('/'));
  }
  return environment;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  return shardd::cli::RunCommandLine(shardd::cli::AllCommands(), ReadEnvironment(), arguments,
                                     std::cin, std::cout, std::cerr);
}

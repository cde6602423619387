// What shardctl takes from its surroundings: filled by main, so that everything
// else can be tested with values of its own.
#ifndef SHARDD_CLIENT_CLI_ENVIRONMENT_H_
#define SHARDD_CLIENT_CLI_ENVIRONMENT_H_

#include <sys/types.h>

#include <map>
#include <string>

namespace shardd::cli {

struct Environment {
  // All environment variables: ranks inherit them.
  std::map<std::string, std::string> variables;
  uid_t uid = 0;
  // Where shardctl itself lies; the daemon's binary is looked for beside it.
  std::string executable_directory;
  // The socket of the system's daemon.
  std::string system_socket = "/run/shardd/shardd.sock";
  // Whether stdin is a terminal: only then are questions asked.
  bool interactive = false;
  // Only then are bars drawn there.
  bool stderr_is_terminal = false;

  // Empty when the variable is not set.
  std::string Get(const std::string& name) const {
    auto found = variables.find(name);
    return found == variables.end() ? "" : found->second;
  }
};

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_ENVIRONMENT_H_

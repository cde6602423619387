// The daemon's configuration: defaults, file, environment, flags, and the one
// validation that --check-config uses too.
#ifndef SHARDD_SERVER_CONFIG_CONFIG_H_
#define SHARDD_SERVER_CONFIG_CONFIG_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/daemon_config.pb.h"

namespace shardd::config {

// What the command line asks for.
struct CommandLine {
  v1::DaemonConfig config;
  bool check_config = false;
  bool help = false;
  bool version = false;
};

// Reads flags (--config=FILE, --check-config, --help, --version and --PATH=VALUE
// for every path of DaemonConfig), then the file, then the environment
// (SHARDD_ + the path in capitals with '_' for '.'), so that flag > environment >
// file. `getenv` is given so that only main reads the environment. The result is
// complete and validated. InvalidArgument names the flag, key or variable.
absl::StatusOr<CommandLine> ParseCommandLine(
    const std::vector<std::string>& arguments,
    const std::function<std::optional<std::string>(const std::string&)>& getenv);

// Fills in what is left at its default. `uid` and `runtime_dir` ($XDG_RUNTIME_DIR)
// choose the default paths.
void FillDefaults(uint32_t uid, const std::string& runtime_dir, v1::DaemonConfig* config);

// InvalidArgument: dotted path, value, what is allowed.
absl::Status Validate(const v1::DaemonConfig& config);

// The text of --help.
std::string HelpText();

}  // namespace shardd::config

#endif  // SHARDD_SERVER_CONFIG_CONFIG_H_

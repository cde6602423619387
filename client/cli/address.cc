#include "client/cli/address.h"

#include <sys/stat.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace shardd::cli {

namespace {

absl::StatusOr<DaemonAddress> Explicit(const std::string& text, const std::string& origin) {
  std::string path = text;
  if (absl::StartsWith(path, "unix:")) {
    path.erase(0, 5);
    if (absl::StartsWith(path, "//")) path.erase(0, 2);  // unix:///PATH
  } else if (path.find('/') == std::string::npos && path.find(':') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        origin, " '", text, "' is no Unix socket: give the path of the daemon's socket"));
  }
  if (path.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(origin, " '", text, "' names no path"));
  }
  return DaemonAddress{path, true};
}

}  // namespace

std::string PrivateDirectory(const Environment& environment) {
  std::string runtime = environment.Get("XDG_RUNTIME_DIR");
  if (!runtime.empty()) return absl::StrCat(runtime, "/shardd");
  return absl::StrCat("/tmp/shardd-", environment.uid);
}

absl::StatusOr<DaemonAddress> ResolveAddress(const std::string& flag,
                                             const Environment& environment) {
  if (!flag.empty()) return Explicit(flag, "--address");
  std::string variable = environment.Get("SHARDD_ADDRESS");
  if (!variable.empty()) return Explicit(variable, "SHARDD_ADDRESS");
  struct stat info;
  if (stat(environment.system_socket.c_str(), &info) == 0 && S_ISSOCK(info.st_mode)) {
    return DaemonAddress{environment.system_socket, false};
  }
  return DaemonAddress{absl::StrCat(PrivateDirectory(environment), "/shardd.sock"), false};
}

}  // namespace shardd::cli

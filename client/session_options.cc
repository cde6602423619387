#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"

namespace shardd {

namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

absl::Status ReadNumber(const char* name, uint32_t* out) {
  const std::string text = Environment(name);
  if (text.empty() || absl::SimpleAtoi(text, out)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the environment variable ", name, " is '", text,
                                                 "'; it must be a number of 0 or more"));
}

// Left alone where the variable is not set.
absl::Status ReadSeconds(const char* name, absl::Duration* out) {
  const std::string text = Environment(name);
  if (text.empty()) return absl::OkStatus();
  double seconds = 0;
  if (!absl::SimpleAtod(text, &seconds) || !(seconds >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat("the environment variable ", name, " is '", text,
                                                   "'; it must be seconds, 0 or more"));
  }
  *out = absl::Seconds(seconds);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SessionOptions> SessionOptions::FromEnvironment() {
  SessionOptions options;
  absl::Status status = ReadNumber("RANK", &options.rank);
  if (status.ok()) status = ReadNumber("WORLD_SIZE", &options.world_size);
  uint32_t restarts = 0;
  if (status.ok()) status = ReadNumber("SHARDD_RESTART_COUNT", &restarts);
  if (status.ok()) status = ReadSeconds("SHARDD_RECONNECT_SECONDS", &options.reconnect_timeout);
  if (!status.ok()) return status;
  options.restarted = restarts > 0;
  if (options.world_size == 0 || options.rank >= options.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("the environment variables RANK=", options.rank,
                                                   " and WORLD_SIZE=", options.world_size,
                                                   " do not fit: RANK must be below WORLD_SIZE"));
  }
  options.address = Environment("SHARDD_ADDRESS");
  options.daemon_binary = Environment("SHARDD_DAEMON_BINARY");
  return options;
}

}  // namespace shardd

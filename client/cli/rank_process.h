// One rank's process: started, its output cut into lines, reaped.
#ifndef SHARDD_CLIENT_CLI_RANK_PROCESS_H_
#define SHARDD_CLIENT_CLI_RANK_PROCESS_H_

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/contract/fd_passing.h"

namespace shardd::cli {

// Cuts what is read from a pipe into lines.
class LineReader {
 public:
  using Sink = std::function<void(std::string_view line)>;
  LineReader() = default;
  explicit LineReader(contract::UniqueFd fd) : fd_(std::move(fd)) {}
  // -1 after the end.
  int fd() const { return fd_.get(); }
  // Reads what is there, without waiting. At the end of the pipe, gives the rest
  // and closes.
  void Read(const Sink& sink);
  // Read, then the end, whoever may still hold the other side.
  void Finish(const Sink& sink);

 private:
  void Cut(const Sink& sink);

  contract::UniqueFd fd_;
  std::string pending_;
};

class RankProcess {
 public:
  // Starts `program` (a path). InvalidArgument or ResourceExhausted when it cannot
  // be: the message has the reason.
  static absl::StatusOr<RankProcess> Start(const std::string& program,
                                           const std::vector<std::string>& arguments,
                                           const std::vector<std::string>& environment);

  // Readable once the process has ended.
  int pidfd() const { return pidfd_.get(); }
  LineReader& out() { return out_; }
  LineReader& err() { return err_; }

  // Sends to the whole process group.
  void Signal(int signal) const;
  // The exit code (128 + signal) if the process has ended: its group is then killed
  // and it is reaped. Otherwise nullopt, at once.
  std::optional<int> Reap();

 private:
  pid_t pid_ = -1;
  contract::UniqueFd pidfd_;
  LineReader out_;
  LineReader err_;
};

// The path of `name`: itself if it has a slash, else the first executable in the
// PATH of `environment`. NotFound.
absl::StatusOr<std::string> FindProgram(const std::string& name,
                                        const std::vector<std::string>& environment);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_RANK_PROCESS_H_

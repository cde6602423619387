// The metrics of a run: one JSON line for each step.
#ifndef SHARDD_TRAINER_METRICS_FILE_H_
#define SHARDD_TRAINER_METRICS_FILE_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"

namespace shardd::trainer {

// Keeps a file in which every committed step stands exactly once, in order,
// however often the writer was killed: a line is written with one write(2), a torn
// last line is cut on opening, and what a dead writer missed is filled in from the
// daemon's step records. Only rank 0 writes. Not thread-safe.
//
// A line has step, applied (false: the step was skipped, and reason says why), loss,
// grad_norm (both also as hexadecimal floats, loss_hex and grad_norm_hex, for
// comparison of bits), loss_scale, lr, tokens and tokens_per_second (null where it
// is unknown). A value that is not finite is null, with "nan" or "inf" as its hex.
class MetricsFile {
 public:
  // Opens or creates `path`. kDataLoss: it holds something else than metrics of
  // consecutive steps (name another file); else those of open(2).
  static absl::StatusOr<std::unique_ptr<MetricsFile>> Open(const std::string& path);

  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // The last step in the file; 0 when it is empty.
  uint64_t last_step() const { return first_step_ + offsets_.size() - 1; }

  // Cuts lines of steps from `next_step` on: the job has not committed them, so
  // they are another run's.
  absl::Status CutFrom(uint64_t next_step);

  // Appends the records after last_step(), which must be consecutive among
  // themselves; those that are there already are passed over. Returns how many
  // steps lie between last_step() and the first record, whose metrics are lost.
  absl::StatusOr<uint64_t> Complete(std::span<const StepRecord> records);

  // Appends one step, which must be last_step() + 1 or the first.
  absl::Status Append(const StepRecord& record, std::optional<double> tokens_per_second);

  // fsync.
  absl::Status Sync();

 private:
  explicit MetricsFile(const std::string& path) : path_(path) {}
  absl::Status Load();
  absl::Status AcceptLine(const std::string& line, off_t offset);

  const std::string path_;
  int fd_ = -1;
  off_t end_ = 0;
  uint64_t first_step_ = 1;     // of offsets_[0]
  std::vector<off_t> offsets_;  // where each step's line begins
};

// One line, without the line feed.
std::string MetricsLine(const StepRecord& record, std::optional<double> tokens_per_second);

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_METRICS_FILE_H_

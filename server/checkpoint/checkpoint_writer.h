// Writes a copy of a job's state as a checkpoint directory (docs/formats/checkpoint.md).
#ifndef SHARDD_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_
#define SHARDD_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/checkpoint/directory.h"
#include "server/checkpoint/operation.h"
#include "server/checkpoint/save_plan.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/step/state_copy.h"

namespace shardd::checkpoint {

struct WriteOptions {
  env::FileSystem* files = nullptr;
  env::Failpoints* failpoints = nullptr;
  std::string job_directory;  // exists
  std::string writer;         // version, for the manifest
  uint64_t file_bytes_max = 0;
  uint64_t rate_bytes_per_second = 0;
  // The bytes of frozen parameter `index`, [begin, begin + out.size()).
  std::function<absl::Status(size_t index, uint64_t begin, std::span<std::byte> out)> read_frozen;
};

// Writes one part of a copy as a directory. Until Publish succeeds, a checkpoint of the same step
// that was there before is untouched.
class CheckpointWriter {
 public:
  // All outlive the writer.
  static absl::StatusOr<std::unique_ptr<CheckpointWriter>> Create(
      const WriteOptions& options, step::StateCopy* copy, const step::StateSnapshot::Part& part,
      Operation* operation);
  // Removes the temporary directory, if that is what there is.
  virtual ~CheckpointWriter() = default;
  // Takes every chunk of the part, in ascending order. Then all is durable but the directory's
  // name. ResourceExhausted: the file system lacks the space; found before anything is written
  // where it can be.
  virtual absl::Status Write() = 0;
  // Gives it its name, durably. Returns its path.
  virtual absl::StatusOr<std::string> Publish() = 0;
};

// Memory that Write takes for what it has not written yet. Bytes.
uint64_t StagingBytes(const v1::JobConfig& config);

// Bytes that a checkpoint of this job takes, about.
uint64_t EstimateBytes(const contract::Layout& layout, const v1::JobConfig& config,
                       const v1::OpenRequest& parameters);

// ResourceExhausted, saying what is needed and what is there, when `bytes` more do not fit into
// the file system of `directory`.
absl::Status CheckSpace(env::FileSystem* files, const std::string& directory, uint64_t bytes);

// Removes what interrupted saves and exports left in a job's directory; how many there were.
absl::StatusOr<int> RemoveLeftovers(env::FileSystem* files, const std::string& job_directory);

// Removes the oldest complete directories but the `keep` newest steps. 0: none.
absl::Status RemoveOldSteps(env::FileSystem* files, const std::string& job_directory,
                            uint32_t keep);

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_

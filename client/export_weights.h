// Weights from a checkpoint's directory, without a daemon.
#ifndef SHARDD_CLIENT_EXPORT_WEIGHTS_H_
#define SHARDD_CLIENT_EXPORT_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/checkpoint/reader.h"
#include "proto/control.pb.h"

namespace shardd {

// The checkpoint in `directory`, with the other members of its set from beside it.
// FailedPrecondition: one of them is not there.
absl::StatusOr<std::vector<checkpoint::Reader>> OpenCheckpointSet(const std::string& directory);

// Writes one safetensors file with all weights, frozen and tied ones too, in fp32 or bf16
// (rounded as working weights are), each own name after `prefix`. Every checksum is compared. A few
// MiB of memory for each of the `threads`. The file appears under `path` only when it is complete
// and durable. `progress` is told bytes that were read, of `total`, from any of the threads.
absl::Status ExportWeights(const std::vector<checkpoint::Reader>& members, v1::DType dtype,
                           const std::string& prefix, const std::string& path, size_t threads,
                           const std::function<void(uint64_t bytes, uint64_t total)>& progress);

}  // namespace shardd

#endif  // SHARDD_CLIENT_EXPORT_WEIGHTS_H_

// Gives a new job's segments a state that comes from files.
#ifndef SHARDD_SERVER_CHECKPOINT_FILL_H_
#define SHARDD_SERVER_CHECKPOINT_FILL_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/checkpoint/reader.h"
#include "proto/contract/layout.h"
#include "server/checkpoint/operation.h"
#include "server/env/file_system.h"
#include "server/store/job_segments.h"

namespace shardd::checkpoint {

// The reader's access through the daemon's files.
FileAccess AccessThrough(env::FileSystem* files);

// What of a checkpoint a job is made from, checked against what this daemon knows: optimizer and
// its states. FailedPrecondition names what does not fit.
absl::StatusOr<store::JobSpec> SpecOf(const Reader& reader);

// Fills segments that were built from SpecOf(reader) and a new timeline, and marks the job as
// initialised: masters, moments, frozen parameters, table, decision, record, generation. Every
// byte's checksum is compared; after an error the segments are worth nothing.
absl::Status FillFromCheckpoint(const Reader& reader, const contract::Layout& layout,
                                Operation* operation, size_t threads, store::JobSegments* segments);

// Weights of a safetensors file that are imported into a job. Names are those of the file, or
// those with one prefix more ("transformer."), which all parameters then have.
struct ImportSummary {
  uint64_t tensors = 0;
  uint64_t bytes = 0;
};
// Whether the file is one that can be imported: sound, of known dtypes, and not half an optimizer
// state (exp_avg without exp_avg_sq is refused by name).
absl::StatusOr<ImportSummary> CheckImport(const std::string& path);
// Fills masters and frozen parameters of a new job; moments and step counts stay zero.
// InvalidArgument names the parameter that the file lacks, or has in another shape.
absl::Status FillFromImport(const std::string& path, const contract::Layout& layout,
                            const v1::OpenRequest& parameters, store::JobSegments* segments);

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_FILL_H_

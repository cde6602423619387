// What a job's journal takes on the disk.
#ifndef SHARDD_SERVER_JOURNAL_PLAN_H_
#define SHARDD_SERVER_JOURNAL_PLAN_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "proto/daemon_config.pb.h"
#include "server/env/file_system.h"

namespace shardd::journal {

// Of a job, in bytes.
struct JobSizes {
  uint64_t image_bytes = 0;  // of the job segment
  uint64_t chunks = 0;
  uint64_t chunk_bytes = 0;           // payload of the largest CHUNK
  uint64_t chunk_gradient_bytes = 0;  // of one chunk in `reduced`
  uint64_t buckets = 0;
  uint64_t gradient_bytes = 0;  // of all buckets
};

struct JournalPlan {
  uint64_t segment_bytes = 0;
  uint64_t log_bytes_max = 0;   // segments in use; one more may be there
  uint64_t segments = 0;        // that are preallocated
  uint64_t snapshot_bytes = 0;  // of one
  uint64_t snapshots = 0;       // files of them: those that are kept, and the one being written
  uint64_t total() const { return segments * segment_bytes + snapshots * snapshot_bytes; }
};

// The log has room for four steps at least, whatever the configuration says.
JournalPlan PlanJournal(const JobSizes& sizes, const v1::DaemonConfig::Journal& config);

// ResourceExhausted unless the file system of `directory` has room for the plan.
absl::Status CheckRoom(env::FileSystem* files, const std::string& directory, const std::string& job,
                       const JournalPlan& plan);

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_PLAN_H_

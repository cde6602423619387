#include "server/journal/plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/env/aligned_buffer.h"
#include "server/journal/format.h"

namespace shardd::journal {

namespace {

constexpr uint64_t kMiB = 1 << 20;

}  // namespace

JournalPlan PlanJournal(const JobSizes& sizes, const v1::DaemonConfig::Journal& config) {
  JournalPlan plan;
  plan.snapshot_bytes = 2 * kPageBytes + env::RoundUpToPage(sizes.image_bytes) +
                        sizes.chunks * (kPageBytes + env::RoundUpToPage(sizes.chunk_bytes)) +
                        env::RoundUpToPage((sizes.chunks + 1) * sizeof(uint64_t));
  plan.snapshots = config.snapshots_kept() + 1;
  // A step: its gradients, and a decision whose blob is of ordinary size.
  const uint64_t step = sizes.gradient_bytes + 2 * kPageBytes * (sizes.buckets + 8);
  uint64_t log = config.log_bytes_max();
  if (log == 0) log = std::max(2 * plan.snapshot_bytes, 8 * step);
  log = std::max(log, 4 * step * plan.snapshots);
  uint64_t segment = config.segment_bytes();
  if (segment == 0) segment = std::clamp(log / 16, kMiB, 256 * kMiB);
  plan.segment_bytes = env::RoundUpToPage(segment);
  plan.segments = std::max<uint64_t>((log + plan.segment_bytes - 1) / plan.segment_bytes, 2) + 1;
  plan.log_bytes_max = (plan.segments - 1) * plan.segment_bytes;
  return plan;
}

absl::Status CheckRoom(env::FileSystem* files, const std::string& directory, const std::string& job,
                       const JournalPlan& plan) {
  absl::StatusOr<uint64_t> free = files->FreeBytes(directory);
  if (!free.ok()) return free.status();
  if (plan.total() <= *free) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the journal of job '", job, "' needs ", plan.total(), " bytes in ", directory, " (log ",
      plan.segments * plan.segment_bytes, ", snapshots ", plan.snapshots * plan.snapshot_bytes,
      "), which has ", *free,
      " free; make room, lower journal.log_bytes_max, or give the job durability = process"));
}

}  // namespace shardd::journal

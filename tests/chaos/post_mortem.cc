#include "tests/chaos/post_mortem.h"

#include "server/step/placement.h"
#include "server/store/decision_log.h"
#include "server/store/job_segments.h"
#include "server/store/state_directory.h"

namespace shardd::test {

namespace {

// The chunks that a daemon of the job's holds; all where it is alone.
absl::StatusOr<store::AdoptedJob> OpenJob(const store::StateDirectory& directory,
                                          const std::string& job, const std::string& daemon,
                                          std::vector<contract::Range>* held) {
  const auto peers = step::ReadJobPeers(directory.JobPath(job));
  if (absl::IsNotFound(peers.status())) {
    auto adopted = store::JobSegments::Open(directory, job);
    if (adopted.ok()) held->push_back({0, adopted->layout.num_chunks()});
    return adopted;
  }
  if (!peers.ok()) return peers.status();
  for (const auto& range : peers->owners()) {
    if (range.daemon() != daemon) continue;
    held->push_back({range.first_chunk(), range.first_chunk() + range.chunks()});
  }
  return store::JobSegments::Open(directory, job, held);
}

}  // namespace

DaemonPhase FindDaemonPhase(const std::string& state_directory, const std::string& job,
                            const std::string& daemon) {
  const auto directory = store::StateDirectory::Open(state_directory);
  if (!directory.ok()) return DaemonPhase::kStarting;
  std::vector<contract::Range> held;
  const auto adopted = OpenJob(*directory, job, daemon, &held);
  if (!adopted.ok() || adopted->segments->header()->initialised.load() == 0) {
    return DaemonPhase::kStarting;
  }
  const store::JobSegments& segments = *adopted->segments;
  const contract::Layout& layout = adopted->layout;
  const contract::DecisionHeader decided = store::DecisionLog(&segments.job()).ReadCurrent().header;
  if (decided.step > segments.board()->committed_step.load()) return DaemonPhase::kCommitting;
  for (const contract::Range& chunks : held) {
    for (uint64_t c = chunks.begin; c < chunks.end; ++c) {
      if (segments.chunk(c).header->applied.load() < decided.applied) {
        return DaemonPhase::kUpdating;
      }
    }
  }
  uint64_t summed = 0, gathered = 0;
  for (uint64_t b = 0; b < layout.num_buckets(); ++b) {
    if (segments.bucket_line(b)->ready_step.load() < decided.step) return DaemonPhase::kUpdating;
    const uint64_t step = segments.reduced_line(b)->step.load();
    gathered += step != 0 ? 1 : 0;
    summed += step == decided.step + 1 ? 1 : 0;
  }
  if (summed == 0) return DaemonPhase::kGathering;
  return summed < gathered ? DaemonPhase::kReducing : DaemonPhase::kDeciding;
}

}  // namespace shardd::test

// What a chaos rank says of itself in a page that outlives it: where a SIGKILL met it.
#ifndef SHARDD_TESTS_CHAOS_PROGRESS_H_
#define SHARDD_TESTS_CHAOS_PROGRESS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace shardd::test {

enum class RankPhase : uint32_t {
  kStarting,    // opens the job, uploads, joins
  kReading,     // waits for weights and reads them
  kPublishing,  // computes and hands over gradients
  kEnding,      // in EndStep
  kDeciding,    // waits for the decision
  kConcluding,  // has taken its last step
};
inline constexpr std::array<const char*, 6> kRankPhaseNames = {
    "rank starting",   "rank reading weights",          "rank publishing",
    "rank in EndStep", "rank waiting for the decision", "rank concluding"};
// Phases of a step.
inline bool IsInStep(RankPhase phase) {
  return phase != RankPhase::kStarting && phase != RankPhase::kConcluding;
}

struct Progress {
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> done;     // `digest` is there
  std::atomic<uint64_t> decided;  // the last step whose decision it has seen
  std::atomic<uint64_t> regroups;
  std::atomic<uint64_t> digest;  // of masters and moments at the end
};

struct UnmapProgress {
  void operator()(Progress* progress) const;
};
using SharedProgress = std::unique_ptr<Progress, UnmapProgress>;

// Maps the page at `path`, made if it is missing. Aborts the process when that fails.
SharedProgress MapProgress(const std::string& path);

}  // namespace shardd::test

#endif  // SHARDD_TESTS_CHAOS_PROGRESS_H_

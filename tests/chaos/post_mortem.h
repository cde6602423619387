// Where a daemon was when it was killed, from the segments that it left.
#ifndef SHARDD_TESTS_CHAOS_POST_MORTEM_H_
#define SHARDD_TESTS_CHAOS_POST_MORTEM_H_

#include <array>
#include <string>

namespace shardd::test {

enum class DaemonPhase {
  kStarting,    // it did not serve yet, or its job is not initialised
  kGathering,   // no bucket of the next step is summed
  kReducing,    // some are
  kDeciding,    // all are, and nothing is recorded
  kCommitting,  // the decision is recorded, and nobody was told
  kUpdating,    // some chunk or bucket lacks the step
};
inline constexpr std::array<const char*, 6> kDaemonPhaseNames = {
    "daemon starting", "daemon gathering",  "daemon reducing",
    "daemon deciding", "daemon committing", "daemon updating"};

// `daemon`, of `state_directory`, is dead. Of a job that spans daemons its own part counts.
DaemonPhase FindDaemonPhase(const std::string& state_directory, const std::string& job,
                            const std::string& daemon);

}  // namespace shardd::test

#endif  // SHARDD_TESTS_CHAOS_POST_MORTEM_H_

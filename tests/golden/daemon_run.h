// How a golden file is run: through a daemon, by ranks that are threads of this
// process and use the public client.
#ifndef SHARDD_TESTS_GOLDEN_DAEMON_RUN_H_
#define SHARDD_TESTS_GOLDEN_DAEMON_RUN_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "kernels/optimizer.h"

namespace shardd::golden {

struct DaemonRun {
  uint32_t ranks = 1;
  uint32_t slots = 1;
  int stage = 1;
  WeightsMode weights = WeightsMode::kShared;

  std::string Name() const;  // "ranks=1 slots=1 stage=1 weights=shared"
};

// A job of this run in fp32, all parameters in one group, chunks small enough that a
// small file is spread over the ranks.
JobOptions GoldenJob(const std::string& name, const DaemonRun& run, const std::string& optimizer,
                     const kernels::Hyperparameters& hyper);

// Opens a session for each rank in a thread of its own and runs body(session) there;
// the session is closed afterwards. The first error, of the lowest rank that has one.
absl::Status RunRanks(const std::string& socket, const JobOptions& job, uint32_t ranks,
                      const std::vector<ParameterSpec>& parameters,
                      const std::function<absl::Status(Session*)>& body);

// The next step must be applied: a skip is an error that says why.
absl::StatusOr<Decision> EndGoldenStep(Session* session, const StepReport& report);

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_DAEMON_RUN_H_

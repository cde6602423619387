// Runs an optimizer's golden file through a daemon.
#ifndef SHARDD_TESTS_GOLDEN_OPTIMIZER_RUN_H_
#define SHARDD_TESTS_GOLDEN_OPTIMIZER_RUN_H_

#include <string>

#include "absl/status/statusor.h"
#include "tests/golden/daemon_run.h"
#include "tests/golden/optimizer_file.h"

namespace shardd::golden {

// Every element of the gradient comes from one slot, times the number of slots, and
// from the others as zero: with a power of two of slots the mean is then the golden
// gradient to the bit, and each slot matters. Compares the masters after every step;
// fp32 working weights must be equal to them, which is an error otherwise.
// kInvalidArgument: run.slots is no power of two. Errors of the client.
absl::StatusOr<OptimizerResult> RunOptimizer(const std::string& socket, const std::string& job_name,
                                             const OptimizerFile& file, const DaemonRun& run);

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_OPTIMIZER_RUN_H_

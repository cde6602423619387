// Trains a model's golden file through a daemon.
#ifndef SHARDD_TESTS_GOLDEN_MODEL_RUN_H_
#define SHARDD_TESTS_GOLDEN_MODEL_RUN_H_

#include <string>

#include "absl/status/statusor.h"
#include "tests/golden/daemon_run.h"
#include "tests/golden/model_file.h"

namespace shardd::golden {

// The worst difference of one kind.
struct Worst {
  double difference = 0;
  double tolerances = 0;  // the same, in units of what is allowed; not finite: infinite
  std::string where;      // "step 12", "wte.weight"

  void Add(double value, double golden, double allowed, const std::string& at);
};

struct ModelResult {
  // Element of a gradient of step 1: 2e-6 of its tensor's largest magnitude plus 1e-6
  // of the model's.
  Worst gradient;
  Worst loss;   // 5e-5
  Worst norm;   // 1e-4 of the golden norm
  Worst final;  // element of final.*: 2e-3 of lr * steps, the way that AdamW can go, plus 1e-6

  double worst() const;
  bool passed() const { return worst() <= 1.0; }
};

// Slot s computes sequences [batch * s / slots, batch * (s + 1) / slots) of each step,
// weighted with its predicted tokens. Losses, norms and the masters at the end are the
// daemon's; the gradients of step 1 are what it made exp_avg of, unclipped again.
// kInvalidArgument: more slots than sequences. Errors of the client.
absl::StatusOr<ModelResult> RunModel(const std::string& socket, const std::string& job_name,
                                     const ModelFile& file, const DaemonRun& run);

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_MODEL_RUN_H_

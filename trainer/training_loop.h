// The training loop of one rank.
#ifndef SHARDD_TRAINER_TRAINING_LOOP_H_
#define SHARDD_TRAINER_TRAINING_LOOP_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "trainer/data/batches.h"
#include "trainer/metrics_file.h"
#include "trainer/models/model.h"
#include "trainer/progress.h"
#include "trainer/session_adapters.h"
#include "trainer/tensor/device.h"
#include "trainer/train_options.h"

namespace shardd::trainer {

// The parameters of `model` as the daemon registers them: group 0 for matrices,
// which decay, group 1 for vectors.
std::vector<ParameterSpec> ParameterSpecs(const models::Model& model);

// What a finished run says of itself.
struct TrainSummary {
  uint64_t committed_step = 0;
  double loss_first = 0;         // of step 1; NaN if that is not known
  double loss_last = 0;          // mean of the last 20 steps
  double loss_heldout = 0;       // nats a byte; NaN without held-out text
  double tokens_per_second = 0;  // of the steps that this process took part in
};

// Trains until options.steps are committed, through whatever becomes of the other
// ranks: after a regroup it goes on where the group does. All ranks run the same
// loop with the same options; rank 0 also writes metrics and shows progress.
class TrainingLoop {
 public:
  // Everything outlives the loop. `now` is the time, injected.
  struct Environment {
    Session* session = nullptr;
    models::Model* model = nullptr;
    tensor::Device* device = nullptr;
    data::TrainingBatches* batches = nullptr;
    const std::vector<models::Batch>* heldout = nullptr;  // null: none
    MetricsFile* metrics = nullptr;                       // null: none
    Progress* progress = nullptr;                         // null: not shown
    absl::FunctionRef<absl::Time()> now;
  };
  TrainingLoop(const TrainOptions& options, const Environment& environment);

  // Uploads initial weights if the job has none, then trains. An error other than a
  // regroup ends it and is returned.
  absl::Status Train();

  // After Train, on rank 0: evaluates and sums up. The weights are those of the last
  // committed step.
  absl::StatusOr<TrainSummary> Summarise();

 private:
  // Runs `phase` until it succeeds, going on after each regroup as the group does.
  absl::Status ThroughRegroups(absl::FunctionRef<absl::Status()> phase);
  absl::Status Initialise();
  // Takes data position and run history from the blob of the last decision, and brings
  // the metrics up to it.
  absl::Status Restore(const std::string& blob);
  absl::Status FindFirstLoss();
  absl::Status CompleteMetrics();
  absl::Status Step();
  absl::StatusOr<SlotReport> ComputeSlot(uint32_t slot);
  absl::Status FinishStep(const Decision& decision, double loss_scale, double lr);
  std::string Blob() const;

  const TrainOptions options_;
  const Environment env_;
  SessionWeights weights_;
  SessionGradients gradients_;
  std::optional<double> loss_first_;
  absl::Time started_;
  absl::Time last_decision_;
  uint64_t steps_taken_ = 0;
};

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_TRAINING_LOOP_H_

// Decides a step: apply or skip, with which factor, and records it. All that a
// redo needs is computed here once and stored as bits.
#ifndef SHARDD_SERVER_STEP_DECIDER_H_
#define SHARDD_SERVER_STEP_DECIDER_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/optimizer.h"
#include "proto/contract/layout.h"
#include "proto/control.pb.h"
#include "server/step/loss_scaler.h"
#include "server/store/decision_log.h"

namespace shardd::step {

// What all ranks and all buckets together say of a step.
struct StepInputs {
  uint64_t step = 0;
  uint64_t generation = 0;
  std::vector<v1::SlotReport> slots;  // [slots], ascending
  std::vector<uint64_t> presence;     // bit p: some rank had a gradient for p
  std::vector<v1::Hyperparameters> groups;
  std::string blob;
  double sum_squares = 0;  // of the tree sum
  std::string nonfinite;   // what was found; empty: all finite
  int64_t unix_nanos = 0;
};

struct StepOutcome {
  contract::StepRecordEntry record{};
  float clip_factor = 1.0f;
  bool apply = false;
  double next_loss_scale = 1.0;
  absl::Status failure;  // not ok: the job ends with this step
};

// The job's thread only.
class Decider {
 public:
  // Continues after the log's current decision.
  Decider(const contract::Layout* layout, const v1::JobConfig* config,
          const kernels::Optimizer* optimizer, store::DecisionLog* log);

  uint64_t committed_step() const { return current_.header.step; }
  uint64_t applied() const { return current_.header.applied; }
  double loss_scale() const { return scale_.scale; }
  uint64_t skipped_steps() const { return current_.header.skipped_steps; }
  uint64_t consecutive_skips() const { return current_.header.consecutive_skips; }
  const store::Decision& current() const { return current_; }
  // Of each group, as the current decision has it.
  std::vector<double> lr() const;
  // The per-parameter table that belongs to the current decision.
  std::span<const contract::ParameterEntry> table() const {
    return log_->table(current_.header.sequence);
  }

  // Records a decision that another daemon made: with the table and the record that belong to it.
  StepOutcome Adopt(store::Decision decision, std::span<const contract::ParameterEntry> table,
                    const contract::StepRecordEntry& record);

  // Called when a step is to be applied, before it is recorded: may complete the scalars of the
  // table of the decision.
  using CompleteTable = std::function<void(const StepInputs& inputs, float clip_factor,
                                           std::span<contract::ParameterEntry> table)>;
  void SetCompleteTable(CompleteTable complete) { complete_table_ = std::move(complete); }

  // Decides inputs.step, which must be committed_step() + 1, and records the decision.
  StepOutcome Decide(StepInputs inputs);

 private:
  void FillTable(const StepInputs& inputs, bool apply);

  const contract::Layout* layout_;
  const v1::JobConfig* config_;
  const kernels::Optimizer* optimizer_;
  store::DecisionLog* log_;
  store::Decision current_;
  LossScaleState scale_;
  CompleteTable complete_table_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_DECIDER_H_

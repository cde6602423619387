#include "server/step/decider.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/reduce.h"
#include "server/step/hyperparameters.h"

namespace shardd::step {

namespace {

// D of docs/numerics.md and the logged loss.
struct Batch {
  double divisor = 1;
  double loss = 0;
  uint64_t tokens = 0;
};

Batch SumSlots(const std::vector<v1::SlotReport>& slots, double reference_tokens) {
  std::vector<double> losses, shares;
  Batch batch;
  for (const v1::SlotReport& slot : slots) {
    const double share =
        reference_tokens > 0 ? static_cast<double>(slot.tokens()) / reference_tokens : 1.0;
    shares.push_back(share);
    losses.push_back(slot.loss() * share);
    batch.tokens += slot.tokens();
  }
  batch.divisor = kernels::FoldTree(shares);
  // A batch without a single token has a zero gradient; dividing by 1 keeps it zero.
  if (!(batch.divisor > 0)) batch.divisor = 1;
  batch.loss = kernels::FoldTree(losses) / batch.divisor;
  return batch;
}

// The factor that torch.nn.utils.clip_grad_norm_ applies.
double ClipCoefficient(double norm, double max_norm) {
  if (max_norm <= 0) return 1.0;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

}  // namespace

Decider::Decider(const contract::Layout* layout, const v1::JobConfig* config,
                 const kernels::Optimizer* optimizer, store::DecisionLog* log)
    : layout_(layout), config_(config), optimizer_(optimizer), log_(log) {
  current_ = log->ReadCurrent();
  if (current_.header.sequence == 0) {
    scale_ = InitialLossScale(config->loss_scale());
    current_.presence.assign((layout->num_parameters() + 63) / 64, 0);
    for (const v1::ParameterGroup& group : config->groups()) {
      current_.groups.push_back(ToRecord(group.hyper()));
    }
  } else {
    scale_ = {current_.header.loss_scale, current_.header.clean_steps,
              current_.header.hysteresis_left};
  }
}

std::vector<double> Decider::lr() const {
  std::vector<double> out;
  for (const contract::DecisionGroup& group : current_.groups) out.push_back(group.lr);
  return out;
}

void Decider::FillTable(const StepInputs& inputs, bool apply) {
  const auto before = log_->table(current_.header.sequence);
  const auto after = log_->table(current_.header.sequence + 1);
  for (size_t p = 0; p < before.size(); ++p) {
    contract::ParameterEntry entry = before[p];
    if (apply && (inputs.presence[p / 64] >> (p % 64) & 1) != 0) {
      kernels::StepProgress progress{entry.beta1_product, entry.beta2_product, entry.applied};
      const v1::Hyperparameters& hyper = inputs.groups[layout_->parameter(p).group];
      const kernels::StepScalars scalars = optimizer_->Step(ToKernel(hyper), &progress);
      std::copy(scalars.begin(), scalars.end(), entry.scalars);
      entry.beta1_product = progress.beta1_product;
      entry.beta2_product = progress.beta2_product;
      entry.applied = progress.steps;
    }
    after[p] = entry;
  }
}

StepOutcome Decider::Decide(StepInputs inputs) {
  StepOutcome outcome;
  const Batch batch = SumSlots(inputs.slots, config_->reference_tokens());
  const double denominator = batch.divisor * scale_.scale;
  const double norm = std::sqrt(inputs.sum_squares) / denominator;
  outcome.apply = inputs.nonfinite.empty();
  outcome.clip_factor =
      outcome.apply ? static_cast<float>(ClipCoefficient(norm, config_->max_norm()) / denominator)
                    : 0.0f;

  contract::StepRecordEntry& record = outcome.record;
  record.step = inputs.step;
  record.applied = applied() + (outcome.apply ? 1 : 0);
  record.generation = inputs.generation;
  record.result = outcome.apply ? v1::STEP_APPLIED : v1::STEP_SKIPPED;
  record.loss = batch.loss;
  record.grad_norm = norm;
  record.loss_scale = scale_.scale;
  record.lr = inputs.groups.empty() ? 0 : inputs.groups[0].lr();
  record.tokens = batch.tokens;
  record.unix_nanos = inputs.unix_nanos;
  const size_t n = std::min(inputs.nonfinite.size(), sizeof(record.reason) - 1);
  std::memcpy(record.reason, inputs.nonfinite.data(), n);

  outcome.failure = AdvanceLossScale(config_->loss_scale(), !outcome.apply, &scale_);
  outcome.next_loss_scale = scale_.scale;
  const uint64_t skips = outcome.apply ? 0 : consecutive_skips() + 1;
  if (outcome.failure.ok() && config_->max_consecutive_skips() > 0 &&
      skips >= config_->max_consecutive_skips()) {
    outcome.failure = absl::FailedPreconditionError(
        absl::StrCat(skips, " steps in a row were skipped (max_consecutive_skips), the last for ",
                     inputs.nonfinite,
                     "; lower the learning rate or look for the source of the non-finite values"));
  }
  if (!outcome.failure.ok()) {
    outcome.failure =
        absl::FailedPreconditionError(absl::StrCat("job '", config_->name(), "' ended at step ",
                                                   inputs.step, ": ", outcome.failure.message()));
  }

  FillTable(inputs, outcome.apply);
  if (outcome.apply && complete_table_ != nullptr) {
    complete_table_(inputs, outcome.clip_factor, log_->table(current_.header.sequence + 1));
  }
  log_->PutRecord(record);
  store::Decision decision;
  decision.header.sequence = current_.header.sequence + 1;
  decision.header.step = inputs.step;
  decision.header.applied = record.applied;
  decision.header.generation = inputs.generation;
  decision.header.result = record.result;
  decision.header.clip_factor_bits = std::bit_cast<uint32_t>(outcome.clip_factor);
  decision.header.loss_scale = scale_.scale;
  decision.header.clean_steps = scale_.clean_steps;
  decision.header.hysteresis_left = scale_.hysteresis_left;
  decision.header.skipped_steps = skipped_steps() + (outcome.apply ? 0 : 1);
  decision.header.consecutive_skips = skips;
  decision.presence = std::move(inputs.presence);
  for (const v1::Hyperparameters& group : inputs.groups) {
    decision.groups.push_back(ToRecord(group));
  }
  decision.blob = std::move(inputs.blob);
  log_->Write(&decision);
  current_ = std::move(decision);
  return outcome;
}

StepOutcome Decider::Adopt(store::Decision decision,
                           std::span<const contract::ParameterEntry> table,
                           const contract::StepRecordEntry& record) {
  StepOutcome outcome;
  outcome.record = record;
  outcome.apply = decision.header.result == v1::STEP_APPLIED;
  outcome.clip_factor = std::bit_cast<float>(decision.header.clip_factor_bits);
  std::copy(table.begin(), table.end(), log_->table(decision.header.sequence).begin());
  log_->PutRecord(record);
  log_->Write(&decision);
  current_ = std::move(decision);
  scale_ = {current_.header.loss_scale, current_.header.clean_steps,
            current_.header.hysteresis_left};
  outcome.next_loss_scale = scale_.scale;
  return outcome;
}

}  // namespace shardd::step

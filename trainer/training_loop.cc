#include "trainer/training_loop.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "trainer/evaluate.h"
#include "trainer/tensor/ops.h"

namespace shardd::trainer {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kUploadElements = uint64_t{1} << 20;  // a multiple of 32
constexpr uint64_t kStepsOfLastLoss = 20;
constexpr int kBlobVersion = 1;

tensor::DType ComputeDType(DType weight_dtype) {
  // fp16 weights are computed with in fp32: no CPU multiplies fp16 matrices faster.
  return weight_dtype == DType::kBFloat16 ? tensor::DType::kBFloat16 : tensor::DType::kFloat32;
}

}  // namespace

std::vector<ParameterSpec> ParameterSpecs(const models::Model& model) {
  std::vector<ParameterSpec> specs;
  for (const tensor::Parameter* parameter : model.parameters()) {
    ParameterSpec& spec = specs.emplace_back();
    spec.name = parameter->name();
    spec.shape = parameter->shape();
    spec.group = parameter->shape().size() >= 2 ? 0 : 1;
    spec.aliases = parameter->aliases();
  }
  return specs;
}

TrainingLoop::TrainingLoop(const TrainOptions& options, const Environment& environment)
    : options_(options),
      env_(environment),
      weights_(env_.session, *env_.model, options.job.weight_dtype),
      gradients_(env_.session, *env_.model, options.job.grad_dtype),
      started_(env_.now()),
      last_decision_(started_) {}

absl::Status TrainingLoop::ThroughRegroups(absl::FunctionRef<absl::Status()> phase) {
  while (true) {
    const absl::Status status = phase();
    const std::optional<Regrouped> regrouped = GetRegrouped(status);
    if (!regrouped.has_value()) return status;
    if (env_.progress != nullptr) {
      env_.progress->Message(
          absl::StrCat("the rank group was formed anew; going on at step ", regrouped->next_step));
    }
    if (absl::Status s = Restore(regrouped->blob); !s.ok()) return s;
  }
}

absl::Status TrainingLoop::Train() {
  if (absl::Status s = Restore(env_.session->blob()); !s.ok()) return s;
  if (absl::Status s = ThroughRegroups([&] { return Initialise(); }); !s.ok()) return s;
  started_ = last_decision_ = env_.now();
  return ThroughRegroups([&] {
    while (env_.session->next_step() <= options_.steps) {
      if (absl::Status s = Step(); !s.ok()) return s;
    }
    return absl::OkStatus();
  });
}

absl::Status TrainingLoop::Initialise() {
  if (!env_.session->initialising()) return absl::OkStatus();
  const tensor::ParameterSpan parameters = env_.model->parameters();
  std::vector<float> part;
  for (size_t index = env_.session->rank(); index < parameters.size();
       index += env_.session->world_size()) {
    const uint64_t elements = static_cast<uint64_t>(parameters[index]->elements());
    for (uint64_t offset = 0; offset < elements; offset += part.size()) {
      part.resize(std::min(kUploadElements, elements - offset));
      env_.model->Initialise(*parameters[index], options_.seed, static_cast<int64_t>(offset), part);
      if (absl::Status s = env_.session->Upload(index, offset, part); !s.ok()) return s;
    }
  }
  return env_.session->FinishUpload();
}

absl::Status TrainingLoop::Restore(const std::string& blob) {
  gradients_.TakeAbsent();  // forgets what an interrupted step had given
  if (blob.empty()) {
    env_.batches->Reset();
    loss_first_.reset();
    return CompleteMetrics();
  }
  const Json json = Json::parse(blob, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("version", 0) != kBlobVersion || !json.contains("data") ||
      !json["data"].is_string()) {
    return absl::DataLossError(absl::StrCat("job '", options_.job.name,
                                            "' was not trained by this trainer (its blob is "
                                            "of another kind); choose another --job"));
  }
  loss_first_.reset();
  if (json.contains("loss_first") && json["loss_first"].is_number()) {
    loss_first_ = json["loss_first"].get<double>();
  }
  if (absl::Status s = env_.batches->Restore(json["data"].get<std::string>()); !s.ok()) return s;
  if (absl::Status s = FindFirstLoss(); !s.ok()) return s;
  return CompleteMetrics();
}

absl::Status TrainingLoop::FindFirstLoss() {
  if (loss_first_.has_value()) return absl::OkStatus();
  // The blob of step 1 was sent before its loss was known.
  const absl::StatusOr<std::vector<StepRecord>> records = env_.session->StepRecords(1);
  if (!records.ok()) return records.status();
  if (!records->empty() && records->front().step == 1) loss_first_ = records->front().loss;
  return absl::OkStatus();
}

std::string TrainingLoop::Blob() const {
  Json json = {{"version", kBlobVersion}, {"data", env_.batches->Serialise()}};
  if (loss_first_.has_value() && std::isfinite(*loss_first_)) json["loss_first"] = *loss_first_;
  return json.dump();
}

absl::Status TrainingLoop::CompleteMetrics() {
  if (env_.metrics == nullptr) return absl::OkStatus();
  const uint64_t next_step = env_.session->next_step();
  if (absl::Status s = env_.metrics->CutFrom(next_step); !s.ok()) return s;
  if (env_.metrics->last_step() + 1 >= next_step) return absl::OkStatus();
  // One record more than is missing, for the time that the first one took.
  const uint64_t first = std::max<uint64_t>(1, env_.metrics->last_step());
  absl::StatusOr<std::vector<StepRecord>> records = env_.session->StepRecords(first);
  if (!records.ok()) return records.status();
  std::erase_if(*records, [&](const StepRecord& r) { return r.step >= next_step; });
  const absl::StatusOr<uint64_t> lost = env_.metrics->Complete(*records);
  if (!lost.ok()) return lost.status();
  if (*lost > 0 && env_.progress != nullptr) {
    env_.progress->Message(absl::StrCat(
        "metrics: steps 1 to ", *lost, " are older than the daemon's records and not in the file"));
  }
  return absl::OkStatus();
}

absl::StatusOr<SlotReport> TrainingLoop::ComputeSlot(uint32_t slot) {
  const models::Batch batch = env_.batches->ForSlot(slot);
  gradients_.BeginSlot(slot);
  tensor::Graph graph({.device = env_.device,
                       .compute = ComputeDType(options_.job.weight_dtype),
                       .sink = &gradients_,
                       .access = &weights_});
  const absl::StatusOr<tensor::Tensor> loss = env_.model->Forward(graph, batch);
  if (!loss.ok()) return loss.status();
  // Slots have equally many targets, so each weighs the same and none is rescaled.
  if (absl::Status s = graph.Backward(*loss, env_.session->loss_scale()); !s.ok()) return s;
  return SlotReport{ToDouble(graph, *loss), static_cast<uint64_t>(batch.targets())};
}

absl::Status TrainingLoop::Step() {
  const uint64_t step = env_.session->next_step();
  const double loss_scale = env_.session->loss_scale();
  const double lr = options_.schedule.At(step);
  StepReport report;
  const Slots slots = env_.session->slots();
  for (uint32_t slot = slots.lo; slot < slots.hi; ++slot) {
    absl::StatusOr<SlotReport> slot_report = ComputeSlot(slot);
    if (!slot_report.ok()) return slot_report.status();
    report.slots.push_back(*slot_report);
  }
  report.absent = gradients_.TakeAbsent();
  report.groups = options_.job.groups;
  for (ParameterGroup& group : report.groups) group.lr = lr;
  env_.batches->Advance();  // the blob says where the next step reads
  if (env_.session->rank() == 0) report.blob = Blob();
  if (absl::Status s = env_.session->EndStep(report); !s.ok()) return s;
  const absl::StatusOr<Decision> decision = env_.session->WaitDecision();
  if (!decision.ok()) return decision.status();
  return FinishStep(*decision, loss_scale, lr);
}

absl::Status TrainingLoop::FinishStep(const Decision& decision, double loss_scale, double lr) {
  const absl::Time now = env_.now();
  const double seconds = absl::ToDoubleSeconds(now - last_decision_);
  last_decision_ = now;
  ++steps_taken_;
  if (decision.step == 1) loss_first_ = decision.loss;
  StepRecord record;
  record.step = decision.step;
  record.applied = decision.applied;
  record.result = decision.result;
  record.reason = decision.reason;
  record.loss = decision.loss;
  record.grad_norm = decision.grad_norm;
  record.loss_scale = loss_scale;
  record.lr = lr;
  record.tokens = options_.tokens_per_step();
  const double rate = seconds > 0 ? static_cast<double>(record.tokens) / seconds : 0.0;
  if (env_.metrics != nullptr) {
    if (absl::Status s = env_.metrics->Append(record, rate); !s.ok()) return s;
  }
  if (env_.progress != nullptr) {
    if (decision.result == StepResult::kSkipped) {
      env_.progress->Message(absl::StrCat("step ", decision.step, " skipped: ", decision.reason));
    }
    const double per_step = absl::ToDoubleSeconds(now - started_) / steps_taken_;
    const double left = per_step * static_cast<double>(options_.steps - decision.step);
    env_.progress->Step(record, rate, left);
  }
  return absl::OkStatus();
}

absl::StatusOr<TrainSummary> TrainingLoop::Summarise() {
  TrainSummary summary;
  summary.committed_step = env_.session->next_step() - 1;
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  summary.loss_first = loss_first_.value_or(kUnknown);
  const double seconds = absl::ToDoubleSeconds(last_decision_ - started_);
  if (seconds > 0) {
    summary.tokens_per_second =
        static_cast<double>(steps_taken_ * options_.tokens_per_step()) / seconds;
  }
  const uint64_t first =
      summary.committed_step > kStepsOfLastLoss ? summary.committed_step - kStepsOfLastLoss + 1 : 1;
  const absl::StatusOr<std::vector<StepRecord>> records = env_.session->StepRecords(first);
  if (!records.ok()) return records.status();
  double sum = 0;
  for (const StepRecord& record : *records) sum += record.loss;
  summary.loss_last = records->empty() ? kUnknown : sum / static_cast<double>(records->size());
  summary.loss_heldout = kUnknown;
  if (env_.heldout != nullptr) {
    const absl::Status status = ThroughRegroups([&] {
      absl::StatusOr<double> loss = Evaluate(*env_.model, *env_.heldout, env_.device,
                                             ComputeDType(options_.job.weight_dtype), &weights_);
      if (loss.ok()) summary.loss_heldout = *loss;
      return loss.status();
    });
    if (!status.ok()) return status;
  }
  return summary;
}

}  // namespace shardd::trainer

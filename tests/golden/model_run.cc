#include "tests/golden/model_run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "trainer/session_adapters.h"
#include "trainer/tensor/cpu_device.h"
#include "trainer/tensor/graph.h"
#include "trainer/tensor/ops.h"

namespace shardd::golden {
namespace {

// One rank's training.
class Rank {
 public:
  Rank(const ModelFile& file, const JobOptions& job, Session* session)
      : file_(file),
        job_(job),
        session_(session),
        device_({.threads = 1}),
        weights_(session, *file.model, DType::kFloat32),
        gradients_(session, *file.model, DType::kFloat32) {}

  absl::Status Upload();
  absl::StatusOr<Decision> Step(int64_t step);
  // Rank 0: compares exp_avg after step 1, and the masters after the last.
  absl::Status CompareGradients(const Decision& decision, Worst* worst);
  absl::Status CompareFinal(Worst* worst);

 private:
  absl::StatusOr<SlotReport> ComputeSlot(int64_t step, uint32_t slot);
  absl::StatusOr<std::vector<float>> State(StateKind kind, size_t parameter);

  const ModelFile& file_;
  const JobOptions& job_;
  Session* const session_;
  tensor::CpuDevice device_;
  trainer::SessionWeights weights_;
  trainer::SessionGradients gradients_;
};

absl::Status Rank::Upload() {
  const tensor::ParameterSpan parameters = file_.model->parameters();
  for (size_t p = session_->rank(); p < parameters.size(); p += session_->world_size()) {
    const auto values = file_.Tensor("param.", parameters[p]->name());
    if (!values.ok()) return values.status();
    if (absl::Status s = session_->Upload(p, 0, *values); !s.ok()) return s;
  }
  return session_->FinishUpload();
}

absl::StatusOr<SlotReport> Rank::ComputeSlot(int64_t step, uint32_t slot) {
  const models::Batch batch =
      file_.BatchOf(step, file_.batch * slot / job_.slots, file_.batch * (slot + 1) / job_.slots);
  const int64_t targets = batch.targets();
  gradients_.BeginSlot(slot);
  if (targets == 0) return SlotReport{};  // nothing to learn from: no gradient
  tensor::Graph graph({.device = &device_, .sink = &gradients_, .access = &weights_});
  const absl::StatusOr<tensor::Tensor> loss = file_.model->Forward(graph, batch);
  if (!loss.ok()) return loss.status();
  const double value = ToDouble(graph, *loss);
  const double share = static_cast<double>(targets) / job_.reference_tokens;
  if (absl::Status s = graph.Backward(*loss, session_->loss_scale() * share); !s.ok()) return s;
  return SlotReport{value, static_cast<uint64_t>(targets)};
}

absl::StatusOr<Decision> Rank::Step(int64_t step) {
  StepReport report;
  for (uint32_t slot = session_->slots().lo; slot < session_->slots().hi; ++slot) {
    const absl::StatusOr<SlotReport> slot_report = ComputeSlot(step, slot);
    if (!slot_report.ok()) return slot_report.status();
    report.slots.push_back(*slot_report);
  }
  report.absent = gradients_.TakeAbsent();
  return EndGoldenStep(session_, report);
}

absl::StatusOr<std::vector<float>> Rank::State(StateKind kind, size_t parameter) {
  std::vector<float> values(session_->parameter_elements(parameter));
  absl::Status s = session_->ReadState(kind, parameter, 0, std::span<float>(values));
  if (!s.ok()) return s;
  return values;
}

float LargestMagnitude(const std::vector<float>& values) {
  float largest = 0;
  for (float value : values) largest = std::fmax(largest, std::fabs(value));
  return largest;
}

absl::Status Rank::CompareGradients(const Decision& decision, Worst* worst) {
  const tensor::ParameterSpan parameters = file_.model->parameters();
  std::vector<std::vector<float>> golden;
  float model_largest = 0;
  for (const tensor::Parameter* parameter : parameters) {
    auto values = file_.Tensor("grad1.", parameter->name());
    if (!values.ok()) return values.status();
    model_largest = std::fmax(model_largest, LargestMagnitude(*values));
    golden.push_back(*std::move(values));
  }
  const double clip =
      file_.clip > 0 ? std::fmin(1.0, file_.clip / (decision.grad_norm + 1e-6)) : 1.0;
  const double factor = (1 - file_.hyper.beta1) * clip;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto exp_avg = State(StateKind::kMoment0, p);
    if (!exp_avg.ok()) return exp_avg.status();
    const double allowed = 2e-6 * LargestMagnitude(golden[p]) + 1e-6 * model_largest;
    for (size_t i = 0; i < golden[p].size(); ++i) {
      worst->Add((*exp_avg)[i] / factor, golden[p][i], allowed, parameters[p]->name());
    }
  }
  return absl::OkStatus();
}

absl::Status Rank::CompareFinal(Worst* worst) {
  const tensor::ParameterSpan parameters = file_.model->parameters();
  const double allowed = 1e-6 + 2e-3 * file_.hyper.lr * static_cast<double>(file_.steps);
  for (const std::string& name : file_.final_names) {
    const auto at = std::find_if(parameters.begin(), parameters.end(),
                                 [&](const auto* parameter) { return parameter->name() == name; });
    const auto golden = file_.Tensor("final.", name);
    if (!golden.ok()) return golden.status();
    const auto masters = State(StateKind::kMaster, static_cast<size_t>(at - parameters.begin()));
    if (!masters.ok()) return masters.status();
    for (size_t i = 0; i < golden->size(); ++i) {
      worst->Add((*masters)[i], (*golden)[i], allowed, name);
    }
  }
  return absl::OkStatus();
}

absl::Status TrainRank(const ModelFile& file, const JobOptions& job, Session* session,
                       ModelResult* result) {
  Rank rank(file, job, session);
  const bool compares = session->rank() == 0;
  if (absl::Status s = rank.Upload(); !s.ok()) return s;
  for (int64_t step = 0; step < file.steps; ++step) {
    const absl::StatusOr<Decision> decision = rank.Step(step);
    if (!decision.ok()) return decision.status();
    if (!compares) continue;
    const std::string at = absl::StrCat("step ", step + 1);
    const double norm = file.norms[static_cast<size_t>(step)];
    result->loss.Add(decision->loss, file.losses[static_cast<size_t>(step)], 5e-5, at);
    result->norm.Add(decision->grad_norm, norm, 1e-4 * norm, at);
    if (step > 0) continue;
    if (absl::Status s = rank.CompareGradients(*decision, &result->gradient); !s.ok()) return s;
  }
  return compares ? rank.CompareFinal(&result->final) : absl::OkStatus();
}

}  // namespace

void Worst::Add(double value, double golden, double allowed, const std::string& at) {
  const double off = std::fabs(value - golden);
  double in_tolerances = off == 0 ? 0 : off / allowed;
  if (!std::isfinite(in_tolerances)) in_tolerances = std::numeric_limits<double>::infinity();
  if (in_tolerances <= tolerances && !where.empty()) return;
  difference = off;
  tolerances = in_tolerances;
  where = at;
}

double ModelResult::worst() const {
  return std::max({gradient.tolerances, loss.tolerances, norm.tolerances, final.tolerances});
}

absl::StatusOr<ModelResult> RunModel(const std::string& socket, const std::string& job_name,
                                     const ModelFile& file, const DaemonRun& run) {
  if (run.slots > file.batch) {
    return absl::InvalidArgumentError(
        absl::StrCat(run.slots, " slots for a batch of ", file.batch, " sequences"));
  }
  JobOptions job = GoldenJob(job_name, run, "adamw", file.hyper);
  job.max_norm = file.clip;
  job.reference_tokens = static_cast<double>(file.batch * file.length) / run.slots;
  std::vector<ParameterSpec> parameters;
  for (const tensor::Parameter* parameter : file.model->parameters()) {
    ParameterSpec& spec = parameters.emplace_back();
    spec.name = parameter->name();
    spec.shape = parameter->shape();
    spec.aliases = parameter->aliases();
  }
  ModelResult result;
  // Models bind their parameters to a session's weights: one model for each rank.
  absl::Status status =
      RunRanks(socket, job, run.ranks, parameters, [&](Session* session) -> absl::Status {
        const absl::StatusOr<ModelFile> own = ReadModelFile(*file.reader);
        if (!own.ok()) return own.status();
        return TrainRank(*own, job, session, &result);
      });
  if (!status.ok()) return status;
  return result;
}

}  // namespace shardd::golden

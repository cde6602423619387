#include "trainer/fake_session.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "client/regrouped.h"

namespace shardd::trainer {

FakeJob::FakeJob(const JobOptions& options, std::vector<ParameterSpec> specs)
    : options(options), parameters(std::move(specs)), loss_scale(options.loss_scale.initial) {
  for (const ParameterSpec& spec : parameters) {
    size_t elements = 1;
    for (int64_t extent : spec.shape) elements *= static_cast<size_t>(extent);
    masters.emplace_back(elements, NAN);
  }
}

FakeSession::FakeSession(FakeJob* job, std::optional<uint64_t> regroup_at)
    : job_(job), regroup_at_(regroup_at), next_step_(job->committed_step + 1), blob_(job->blob) {}

absl::Status FakeSession::RegroupNow() {
  regroup_at_.reset();
  acquired_.clear();
  ready_.clear();
  report_.reset();
  next_step_ = job_->committed_step + 1;
  blob_ = job_->blob;
  return RegroupedStatus({next_step_, blob_});
}

absl::Status FakeSession::Verb() {
  return regroup_at_ == verbs_++ ? RegroupNow() : absl::OkStatus();
}

absl::Status FakeSession::Upload(size_t parameter, uint64_t offset, std::span<const float> values) {
  if (absl::Status s = Verb(); !s.ok()) return s;
  std::copy(values.begin(), values.end(), job_->masters[parameter].begin() + offset);
  return absl::OkStatus();
}

absl::Status FakeSession::FinishUpload() {
  if (absl::Status s = Verb(); !s.ok()) return s;
  job_->initialised = true;
  return absl::OkStatus();
}

absl::StatusOr<const void*> FakeSession::WaitWeights(size_t parameter) {
  if (absl::Status s = Verb(); !s.ok()) return s;
  return static_cast<const void*>(job_->masters[parameter].data());
}

absl::Status FakeSession::Gather(std::span<const size_t> parameters) { return Verb(); }
absl::Status FakeSession::Release(std::span<const size_t> parameters) { return absl::OkStatus(); }

absl::StatusOr<void*> FakeSession::AcquireGrad(size_t parameter, uint32_t slot) {
  if (absl::Status s = Verb(); !s.ok()) return s;
  std::vector<float>& buffer = acquired_[{parameter, slot}];
  buffer.assign(job_->masters[parameter].size(), NAN);
  return static_cast<void*>(buffer.data());
}

absl::Status FakeSession::ReadyGrad(size_t parameter, uint32_t slot) {
  if (absl::Status s = Verb(); !s.ok()) return s;
  const auto it = acquired_.find({parameter, slot});
  if (it == acquired_.end()) return absl::FailedPreconditionError("not acquired");
  ready_[it->first] = std::move(it->second);
  acquired_.erase(it);
  return absl::OkStatus();
}

absl::Status FakeSession::EndStep(const StepReport& report) {
  if (absl::Status s = Verb(); !s.ok()) return s;
  ++job_->computed_steps;
  const size_t due = num_parameters() * job_->options.slots;
  if (ready_.size() != due || !report.absent.empty() ||
      report.slots.size() != job_->options.slots) {
    return absl::InvalidArgumentError(
        absl::StrCat("step ", next_step_, ": ", ready_.size(), " of ", due, " gradients"));
  }
  report_ = report;
  return absl::OkStatus();
}

void FakeSession::Commit() {
  StepRecord record;
  record.step = next_step_;
  record.loss_scale = job_->loss_scale;
  record.lr = report_->groups[0].lr;
  const double divisor = job_->loss_scale * job_->options.slots;
  double squares = 0;
  for (const SlotReport& slot : report_->slots) {
    record.loss += slot.loss / job_->options.slots;
    record.tokens += slot.tokens;
  }
  // Ascending keys: the order of the sum is fixed.
  for (const auto& [key, gradient] : ready_) {
    std::vector<float>& master = job_->masters[key.first];
    for (size_t i = 0; i < master.size(); ++i) {
      const double g = gradient[i] / divisor;
      squares += g * g;
      master[i] = static_cast<float>(master[i] - record.lr * g);
    }
  }
  record.grad_norm = std::sqrt(squares);
  record.applied = next_step_;
  record.unix_nanos = static_cast<int64_t>(next_step_) * 1'000'000'000;
  job_->records.push_back(record);
  job_->committed_step = next_step_;
  job_->blob = report_->blob;
}

absl::StatusOr<Decision> FakeSession::WaitDecision() {
  if (!report_.has_value()) return absl::FailedPreconditionError("EndStep first");
  Commit();
  if (absl::Status s = Verb(); !s.ok()) return s;
  const StepRecord& record = job_->records.back();
  Decision decision;
  decision.step = record.step;
  decision.applied = record.applied;
  decision.loss = record.loss;
  decision.grad_norm = record.grad_norm;
  decision.loss_scale = job_->loss_scale;
  next_step_ = job_->committed_step + 1;
  ready_.clear();
  report_.reset();
  return decision;
}

absl::StatusOr<std::vector<StepRecord>> FakeSession::StepRecords(uint64_t first_step) {
  std::vector<StepRecord> records;
  for (const StepRecord& record : job_->records) {
    if (record.step >= first_step) records.push_back(record);
  }
  return records;
}

absl::Status FakeSession::ReadState(StateKind kind, size_t parameter, uint64_t offset,
                                    std::span<float> out) {
  if (kind != StateKind::kMaster) return absl::UnimplementedError("SGD has no moments");
  std::copy_n(job_->masters[parameter].begin() + offset, out.size(), out.begin());
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> FakeSession::ParameterApplied(size_t parameter) {
  return job_->committed_step;
}

}  // namespace shardd::trainer

// A job and its sessions in memory, for tests of the training loop: one rank that
// owns every slot, plain SGD, and regroups wherever a test wants them.
#ifndef SHARDD_TRAINER_FAKE_SESSION_H_
#define SHARDD_TRAINER_FAKE_SESSION_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"

namespace shardd::trainer {

// What the daemon would hold: it outlives sessions.
struct FakeJob {
  explicit FakeJob(const JobOptions& options, std::vector<ParameterSpec> specs);

  JobOptions options;
  std::vector<ParameterSpec> parameters;
  std::vector<std::vector<float>> masters;
  bool initialised = false;
  uint64_t committed_step = 0;
  std::string blob;
  double loss_scale = 1;
  std::vector<StepRecord> records;
  uint64_t computed_steps = 0;  // steps that reached EndStep, repeated ones included
};

class FakeSession final : public Session {
 public:
  // `regroup_at`: the number of the verb (from 0) that is answered with a regroup,
  // once. A WaitDecision so answered has committed its step.
  FakeSession(FakeJob* job, std::optional<uint64_t> regroup_at);

  uint64_t verbs() const { return verbs_; }

  uint32_t rank() const override { return 0; }
  uint32_t world_size() const override { return 1; }
  Slots slots() const override { return {0, job_->options.slots}; }
  uint64_t next_step() const override { return next_step_; }
  const std::string& blob() const override { return blob_; }
  double loss_scale() const override { return job_->loss_scale; }
  uint64_t generation() const override { return 1; }
  size_t num_parameters() const override { return job_->parameters.size(); }
  uint64_t parameter_elements(size_t parameter) const override {
    return job_->masters[parameter].size();
  }
  bool initialising() const override { return !job_->initialised; }
  absl::Status Upload(size_t parameter, uint64_t offset, std::span<const float> values) override;
  // This job has none.
  absl::Status UploadFrozen(size_t, uint64_t, std::span<const std::byte>) override {
    return absl::InvalidArgumentError("no frozen parameters");
  }
  // This job begins without any.
  absl::Status UploadMoment(uint32_t, size_t, uint64_t, std::span<const float>, uint64_t) override {
    return absl::InvalidArgumentError("no moments");
  }
  absl::Status FinishUpload() override;
  absl::StatusOr<const void*> WaitWeights(size_t parameter) override;
  absl::Status Gather(std::span<const size_t> parameters) override;
  absl::Status Release(std::span<const size_t> parameters) override;
  absl::StatusOr<void*> AcquireGrad(size_t parameter, uint32_t slot) override;
  absl::Status ReadyGrad(size_t parameter, uint32_t slot) override;
  absl::Status EndStep(const StepReport& report) override;
  absl::StatusOr<Decision> WaitDecision() override;
  absl::StatusOr<std::vector<StepRecord>> StepRecords(uint64_t first_step) override;
  absl::Status ReadState(StateKind kind, size_t parameter, uint64_t offset,
                         std::span<float> out) override;
  absl::StatusOr<uint64_t> ParameterApplied(size_t parameter) override;
  absl::Status ReadFrozen(size_t, uint64_t, std::span<std::byte>) override {
    return absl::InvalidArgumentError("no frozen parameters");
  }
  absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const SaveOptions&) override {
    return absl::FailedPreconditionError("no place for checkpoints");
  }
  absl::Status Rejoin() override {
    return absl::FailedPreconditionError("the training loop never gives a step up");
  }
  absl::Status Close() override { return absl::OkStatus(); }
  absl::Status DeleteJob() override { return absl::OkStatus(); }

 private:
  // Counts a verb; an error when its turn to regroup has come.
  absl::Status Verb();
  absl::Status RegroupNow();
  void Commit();

  FakeJob* const job_;
  std::optional<uint64_t> regroup_at_;
  uint64_t verbs_ = 0;
  uint64_t next_step_;
  std::string blob_;
  std::map<std::pair<size_t, uint32_t>, std::vector<float>> acquired_, ready_;
  std::optional<StepReport> report_;
};

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_FAKE_SESSION_H_

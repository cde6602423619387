// The session behind client.h: verbs, the step it is at, and how it follows its rank
// group from one generation to the next.
//
// Each verb is a body that may fail with "the generation is over", and a frame
// (RunVerb) that then drops what was staged, joins the new group and returns Aborted.
// Bodies hold `verbs_` shared, so that a regroup waits for those of other threads;
// the same event that began it ends their waits.
#ifndef SHARDD_CLIENT_SESSION_IMPL_H_
#define SHARDD_CLIENT_SESSION_IMPL_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "client/board_waiter.h"
#include "client/bucket_publisher.h"
#include "client/client.h"
#include "client/session_parts.h"
#include "client/weights_view.h"

namespace shardd {

class SessionImpl final : public Session {
 public:
  // Forms the rank group: returns when all ranks have joined.
  static absl::StatusOr<std::unique_ptr<Session>> Start(SessionParts parts);
  ~SessionImpl() override = default;

  uint32_t rank() const override { return parts_.options.rank; }
  uint32_t world_size() const override { return parts_.options.world_size; }
  Slots slots() const override { return {run_.lo, run_.hi}; }
  uint64_t next_step() const override { return next_step_; }
  const std::string& blob() const override { return blob_; }
  double loss_scale() const override { return loss_scale_; }
  uint64_t generation() const override { return generation_; }
  size_t num_parameters() const override { return layout_.num_parameters(); }
  uint64_t parameter_elements(size_t parameter) const override {
    return layout_.parameter_elements(parameter);
  }

  bool initialising() const override;
  absl::Status Upload(size_t parameter, uint64_t offset, std::span<const float> values) override;
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

  absl::Status Close() override;

 private:
  explicit SessionImpl(SessionParts parts);
  absl::Status MakeView();

  // session_group.cc: the rank group.
  absl::Status RunVerb(absl::FunctionRef<absl::Status()> body);
  absl::Status Regroup(uint64_t generation);
  absl::Status Join();  // once; leaves the session at the group's next step
  absl::Status WaitAllWeights();
  // Waits on the board until `done`; what else may come is a status. Deadline: the
  // job's step_timeout; the daemon then says what is missing.
  absl::Status Await(absl::FunctionRef<bool()> done);
  absl::Status Explain(BoardEvent event);

  // session_step.cc
  absl::Status CheckParameter(size_t parameter) const;
  absl::Status CheckGradCall(size_t parameter, uint32_t slot) const;
  absl::Status CheckWeightsCall(std::span<const size_t> parameters) const;
  absl::Status CheckReport(const StepReport& report) const;
  absl::Status SendEndStep(const StepReport& report);
  absl::Status PublishUpload(uint64_t begin, std::span<const float> values);
  absl::Status FillWindow(StateKind kind, size_t parameter, uint64_t offset, std::span<float> out,
                          uint64_t* committed_step);
  RingPeer MakeRingPeer();
  std::string Name(size_t parameter) const { return layout_.parameter(parameter).name; }

  SessionParts parts_;
  const contract::Layout& layout_;
  const contract::SlotRange run_;
  BoardWaiter waiter_;
  std::unique_ptr<BucketPublisher> publisher_;
  std::unique_ptr<WeightsView> view_;

  std::shared_mutex verbs_;  // held shared by verbs, exclusively while regrouping
  std::atomic<uint64_t> generation_{0};
  uint64_t next_step_ = 1;
  std::string blob_;
  double loss_scale_ = 1;
  std::vector<ParameterGroup> groups_;  // of the last step
  bool ended_ = false;                  // EndStep of next_step_ was accepted
  bool closed_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_SESSION_IMPL_H_

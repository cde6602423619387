// The session behind client.h: verbs, the step it is at, and how it follows its rank
// group from one generation to the next.
//
// Each verb is a body that may fail with "the generation is over", and a frame
// (RunVerb) that then drops what was staged, joins the new group and returns Aborted.
// Bodies hold `verbs_` shared, so that a regroup waits for those of other threads;
// the same event that began it ends their waits. A daemon that died is handled alike.
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
  absl::Status UploadMoment(uint32_t moment, size_t parameter, uint64_t offset,
                            std::span<const float> values, uint64_t applied) override;
  absl::Status UploadFrozen(size_t index, uint64_t offset,
                            std::span<const std::byte> bytes) override;
  absl::Status FinishUpload() override;

  absl::StatusOr<const void*> WaitWeights(size_t parameter) override;
  absl::Status Gather(std::span<const size_t> parameters) override;
  absl::Status Release(std::span<const size_t> parameters) override;

  absl::StatusOr<void*> AcquireGrad(size_t parameter, uint32_t slot) override;
  absl::Status ReadyGrad(size_t parameter, uint32_t slot) override;

  absl::Status EndStep(const StepReport& report) override;
  absl::StatusOr<Decision> WaitDecision() override;
  absl::Status Rejoin() override;

  absl::StatusOr<std::vector<StepRecord>> StepRecords(uint64_t first_step) override;
  absl::Status ReadState(StateKind kind, size_t parameter, uint64_t offset,
                         std::span<float> out) override;
  absl::StatusOr<uint64_t> ParameterApplied(size_t parameter) override;

  absl::Status ReadFrozen(size_t index, uint64_t offset, std::span<std::byte> out) override;
  absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const SaveOptions& options) override;

  absl::Status Close() override;
  absl::Status DeleteJob() override;

 private:
  explicit SessionImpl(SessionParts parts);
  absl::Status MakeView();
  void MakePublisher();

  // session_group.cc: the rank group.
  // A verb of a step: while the generation lasts and the daemon lives, `body`. Otherwise it goes
  // on with the new group, or with the daemon that took the old one's place, and returns Aborted;
  // OK where `settled` says, after a re-attach, that what the verb waits for has come about.
  absl::Status RunVerb(
      absl::FunctionRef<absl::Status()> body,
      absl::FunctionRef<bool()> settled = [] { return false; });
  // A verb that only reads: done again after a re-attach.
  absl::Status RunRead(absl::FunctionRef<absl::Status()> body);
  absl::Status CatchUp(uint64_t generation, bool gone, absl::FunctionRef<bool()> settled);
  absl::Status Join();  // once; leaves the session at the group's next step
  absl::Status JoinFirst();
  absl::Status AwaitUploaded();
  absl::Status WaitAllWeights();
  // Waits on the board until `done`; what else may come is a status. Deadline: the
  // job's step_timeout; the daemon then says what is missing.
  absl::Status Await(absl::FunctionRef<bool()> done);
  absl::Status Explain(BoardEvent event);
  BoardWaiter waiter() const {
    return {parts_.daemon.segment.get(), parts_.daemon.found.attach.get()};
  }

  // session_reattach.cc: another daemon process in the place of one that died.
  // Whether `status` came of the daemon's death.
  bool DaemonGone(const absl::Status& status) const;
  // Waits for it to come back and attaches to it; with verbs_ held exclusively. The session is in
  // no generation then: Join. An error is what every later verb returns, too.
  absl::Status Reattach();
  absl::Status GiveUp(absl::Status why);

  // session_step.cc
  absl::Status CheckParameter(size_t parameter) const;
  absl::Status CheckGradCall(size_t parameter, uint32_t slot) const;
  absl::Status CheckWeightsCall(std::span<const size_t> parameters) const;
  absl::Status CheckReport(const StepReport& report) const;
  absl::Status SendEndStep(const StepReport& report);
  // session_checkpoint.cc
  absl::Status CheckFrozen(size_t index, uint64_t offset, uint64_t bytes) const;

  // fp32 values of a range of a parameter, in parts; `of` says what they are.
  absl::Status UploadFloats(const contract::Descriptor& of, size_t parameter, uint64_t offset,
                            std::span<const float> values);
  absl::Status PublishUpload(const contract::Descriptor& part, std::span<const std::byte> data);
  absl::Status FillWindow(StateKind kind, size_t parameter, uint64_t offset, std::span<float> out,
                          uint64_t* committed_step);
  RingPeer MakeRingPeer();
  // The decision on next_step_, once the board has all of it; next_step_ is then the next.
  bool TakeDecision(Decision* decision);
  std::string Name(size_t parameter) const { return layout_.parameter(parameter).name; }

  SessionParts parts_;
  const contract::Layout& layout_;
  const contract::SlotRange run_;
  std::unique_ptr<BucketPublisher> publisher_;
  std::unique_ptr<WeightsView> view_;

  std::shared_mutex verbs_;  // held shared by verbs, exclusively while regrouping
  std::atomic<uint64_t> generation_{0};
  uint64_t next_step_ = 1;
  std::string blob_;
  double loss_scale_ = 1;
  bool uploads_wanted_;                 // when the session was opened, or its group formed
  std::vector<ParameterGroup> groups_;  // of the last step
  bool ended_ = false;                  // EndStep of next_step_ was accepted
  bool closed_ = false;
  bool joined_ = false;       // the group that generation_ says
  uint64_t attachments_ = 0;  // daemon processes that took the place of another
  absl::Status lost_;         // why no daemon will
  // Weights of daemons that died, which the trainer may still be reading; until a decision comes.
  std::vector<std::unique_ptr<WeightsSegment>> retired_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_SESSION_IMPL_H_

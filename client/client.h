// The shardd client: how a trainer (worker) uses a node daemon.
//
// A session is one rank of one job. The daemon owns the fp32 masters and moments
// and runs the optimizer; the trainer runs forward and backward on the working
// weights and hands over gradients, bucket by bucket, while backward runs:
//
//   auto session = Session::Open(SessionOptions::FromEnvironment(), job, parameters);
//   if (session->initialising()) { upload this rank's share of the initial weights; }
//   session->FinishUpload();
//   for (uint64_t step = session->next_step(); step <= last; step = session->next_step()) {
//     for (size_t p ...) session->WaitWeights(p);           // forward reads session->weights(p)
//     for (uint32_t slot = slots.lo; slot < slots.hi; ++slot) {
//       // backward: for each parameter, as its gradient becomes complete
//       void* grad = *session->AcquireGrad(p, slot);        // fill it: loss_scale() * d loss / d p
//       session->ReadyGrad(p, slot);
//     }
//     session->EndStep(report);
//     StatusOr<Decision> decision = session->WaitDecision();
//   }
//
// Threads: a session may be used by one thread at a time, except that WaitWeights,
// weights, AcquireGrad and ReadyGrad of different parameters may run in parallel.
// fork: the child must not use it; ring and weights are not inherited.
//
// Errors: every verb returns absl::Status; messages name object, action, remedy.
// Any verb may return Aborted with a Regrouped payload (see GetRegrouped): the rank
// group was formed anew because a rank died or was replaced. The session has then
// dropped what was not committed and taken the new generation; the trainer reloads
// data position and RNG from the blob and goes on at next_step; while initialising()
// it uploads its share again.
//
// A daemon that dies or is restarted is waited for, by whatever verb finds it gone, for
// SessionOptions::reconnect_timeout; the session then attaches to the one that took its
// place and the verb returns Regrouped, as above. A decided step is never computed
// again: WaitDecision returns its decision; verbs that only read are done again and
// return what they read. Memory that the session handed out stays readable until the
// next WaitDecision returns a decision, but is no longer kept up to date.
// Unavailable: the daemon did not come back in time; FailedPrecondition: one did whose
// job is not the one that was trained. The session is over after either.
#ifndef SHARDD_CLIENT_CLIENT_H_
#define SHARDD_CLIENT_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardd {

enum class DType : uint8_t { kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };
size_t DTypeBytes(DType dtype);

struct ParameterSpec {
  std::string name;            // unique in the job, 1..512 bytes
  std::vector<int64_t> shape;  // row-major; empty: a scalar; a 0: no elements
  uint32_t group = 0;          // index into JobOptions::groups
  // In elements, as PyTorch's. Empty: contiguous. Others than the contiguous ones are refused
  // by name: hand over a contiguous parameter.
  std::vector<int64_t> strides;
  std::vector<std::string> aliases;  // other names of the same, tied parameter
};

struct ParameterGroup {
  std::string name = "default";
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  double momentum = 0;    // SGD, RMSprop; RMSprop's alpha is beta2
  double dampening = 0;   // SGD
  bool nesterov = false;  // SGD
  double lr_decay = 0;    // Adagrad
  double min_trust = 0;   // LAMB; 0: 0.01
  double max_trust = 0;   // LAMB; 0: 10
  bool operator==(const ParameterGroup&) const = default;
};

enum class ScheduleKind { kConstant = 1, kLinear = 2, kCosine = 3, kOneCycle = 4, kWsd = 5 };

// What every lr that is given with a step is multiplied by, as a function of how many optimizer
// steps were applied. The equations are with `Schedule` in proto/job_config.proto.
struct Schedule {
  ScheduleKind kind = ScheduleKind::kConstant;
  uint64_t warmup_steps = 0;
  uint64_t total_steps = 0;   // all but kConstant
  uint64_t decay_steps = 0;   // kWsd
  double initial_factor = 0;  // kOneCycle; 0: 1 / 25
  double final_factor = 0;
  bool operator==(const Schedule&) const = default;
};

struct LossScale {
  bool dynamic = false;  // true is right for fp16: see JobOptions::ForDType
  double initial = 1.0;
  uint32_t growth_interval = 1000;
  uint32_t hysteresis = 2;
  double floor = 1.0;
};

// A parameter that is not trained: the job holds its value for checkpoints and exports and for
// ranks that read it; it has no gradient and no place among the parameters' indices.
struct FrozenSpec {
  std::string name;  // unique over all parameters and their other names
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;
  std::vector<std::string> aliases;
};

enum class WeightsMode { kShared, kPrivate };

// How moments lie in the daemon's memory: docs/optimizers.md.
enum class MomentFormat { kFloat32 = 1, kBFloat16 = 2 };

// What a crash may cost: docs/durability.md.
enum class Durability {
  kDefault,  // kNode where the daemon keeps journals, else kProcess
  kProcess,  // the death of trainers and of the daemon costs no committed step
  kNode,     // that of the machine neither
  kPeer,     // nor that of the machine with its disk; the daemon needs a peer (docs/durability.md)
};

// What a job is. Fields marked * may differ when a later run attaches to the job;
// the others must equal those it was created with.
struct JobOptions {
  std::string name;  // 1..64 of [A-Za-z0-9._-]
  std::string optimizer = "adamw";
  // lr *. A group may be empty; its index is its name for StepReport::groups and
  // ParameterSpec::group. Parameters that are not trained are `frozen`.
  std::vector<ParameterGroup> groups = {ParameterGroup{}};
  Schedule schedule;  // *
  uint32_t slots = 1;
  DType grad_dtype = DType::kBFloat16;
  DType weight_dtype = DType::kBFloat16;
  MomentFormat moments = MomentFormat::kFloat32;
  bool split_master = false;                     // with bf16 weights: 2 bytes less, the same bits
  bool stochastic_moments = false;               // rounding of bf16 moments
  bool stochastic_weights = false;               // of bf16 weights of a master that is not split
  uint64_t seed = 0;                             // of both
  Durability durability = Durability::kDefault;  // *
  int stage = 1;                                 // * 0..3
  WeightsMode weights = WeightsMode::kShared;    // *
  double max_norm = 0;                           // clip to this global norm; 0: no clipping
  LossScale loss_scale;
  uint32_t max_consecutive_skips = 100;
  double reference_tokens = 0;                       // n_ref; 0: slots weigh the same
  std::vector<FrozenSpec> frozen;                    // not in the JSON file
  uint32_t chunk_elements = 0;                       // 0: the default
  uint64_t bucket_elements = 0;                      // 0: chosen from the model's size
  absl::Duration join_timeout = absl::Seconds(120);  // *
  absl::Duration step_timeout = absl::Seconds(600);  // *
  absl::Duration heartbeat = absl::Seconds(1);       // *

  // Gradients and working weights of this dtype; for fp16 dynamic loss scaling from 2^16.
  static JobOptions ForDType(DType dtype);
  // Reads a JSON file with the fields of proto/job_config.proto; those that are not
  // there have the defaults above, or of ForDType for a fp16 grad_dtype. Unknown keys
  // are errors that give the dotted path and the nearest valid name.
  static absl::StatusOr<JobOptions> FromJsonFile(const std::string& path);
  static absl::StatusOr<JobOptions> FromJson(const std::string& text, const std::string& origin);
};

enum class Resume { kNever, kAuto, kMust };

struct SessionOptions {
  // "unix:PATH" or a path. Empty: the system's socket if it is there, else, with
  // world_size 1, a private daemon of exactly this version is started.
  std::string address;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  Resume resume = Resume::kAuto;
  // A launcher started this rank again after a death: ranks that have closed meanwhile are not
  // waited for.
  bool restarted = false;
  // Where to find the daemon's binary for embedded use; empty: beside this
  // executable, then PATH.
  std::string daemon_binary;
  // How long to wait for the daemon's socket to appear.
  absl::Duration connect_timeout = absl::Seconds(10);
  // How long to wait for a daemon that has gone away, while it opens the job too; 0: not at all.
  // With a private daemon it is started again.
  absl::Duration reconnect_timeout = absl::Seconds(60);
  // Receives lines for people ("resuming JOB at step N"). Default: stderr.
  std::function<void(const std::string&)> log;

  // RANK, WORLD_SIZE, SHARDD_ADDRESS, SHARDD_DAEMON_BINARY, SHARDD_RECONNECT_SECONDS, and
  // SHARDD_RESTART_COUNT of shardctl run. InvalidArgument names the variable that does not parse.
  static absl::StatusOr<SessionOptions> FromEnvironment();
};

// Slots lo .. hi-1 of the global batch.
struct Slots {
  uint32_t lo = 0;
  uint32_t hi = 0;
};

struct Regrouped {
  uint64_t next_step = 0;
  std::string blob;  // trainer blob of the last decision; empty before the first
};
// The payload of an Aborted status that a verb returned; nullopt for other statuses.
std::optional<Regrouped> GetRegrouped(const absl::Status& status);

struct SlotReport {
  double loss = 0;  // mean loss of the slot, unscaled
  uint64_t tokens = 0;
};

struct StepReport {
  std::vector<SlotReport> slots;  // of this rank, ascending
  // Parameters that had no gradient in any slot of this rank. One that is neither
  // ready in some slot nor named here fails EndStep at once, by name.
  std::vector<size_t> absent;
  // One entry a group, in their order. All ranks give the same hyper-parameters (checked). Empty:
  // those of the last step; before the first, and after Open, those of JobOptions::groups.
  std::vector<ParameterGroup> groups;
  std::string blob;  // from rank 0; at most 1 MiB
};

enum class StepResult { kApplied = 1, kSkipped = 2 };

struct Decision {
  uint64_t step = 0;
  uint64_t applied = 0;  // optimizer steps applied so far
  StepResult result = StepResult::kApplied;
  std::string reason;     // of a skip: parameter, rank, NaN or Inf
  double loss = 0;        // slot tree of the losses / slots
  double grad_norm = 0;   // before clipping
  double loss_scale = 1;  // for the next step
  // Of each group (of the first 64), with the schedule in it: what the update used.
  std::vector<double> lr;
};

struct StepRecord {
  uint64_t step = 0;
  uint64_t applied = 0;
  uint64_t generation = 0;
  StepResult result = StepResult::kApplied;
  std::string reason;
  double loss = 0;
  double grad_norm = 0;
  double loss_scale = 1;  // that the step was computed with
  double lr = 0;
  uint64_t tokens = 0;
  int64_t unix_nanos = 0;
};

struct SaveOptions {
  uint32_t keep = 0;                   // afterwards remove older ones beyond this many; 0: none
  uint64_t rate_bytes_per_second = 0;  // write no faster; 0: as fast as can be
  // False: return when the copy of the state is taken; the daemon goes on writing it.
  bool wait = true;
};

struct SavedCheckpoint {
  uint64_t step = 0;
  std::string path;  // its directory; empty unless it was waited for
};

// The moments in the order of the optimizer's states: docs/optimizers.md.
enum class StateKind { kMaster = 1, kMoment0 = 2, kMoment1 = 3, kMoment2 = 4 };

class Session {
 public:
  // Opens the job (creating it as options.resume says), and returns when all
  // world_size ranks have joined. All ranks pass the same job and parameters.
  static absl::StatusOr<std::unique_ptr<Session>> Open(
      const SessionOptions& options, const JobOptions& job,
      const std::vector<ParameterSpec>& parameters);
  virtual ~Session() = default;  // without Close: the daemon takes it as a death

  // --- what this session is ---
  virtual uint32_t rank() const = 0;
  virtual uint32_t world_size() const = 0;
  virtual Slots slots() const = 0;              // of this rank
  virtual uint64_t next_step() const = 0;       // the step to compute now
  virtual const std::string& blob() const = 0;  // of the last decision at Open or Regrouped
  virtual double loss_scale() const = 0;        // to multiply the next step's loss by
  virtual uint64_t generation() const = 0;
  virtual size_t num_parameters() const = 0;
  virtual uint64_t parameter_elements(size_t parameter) const = 0;

  // --- initial weights ---
  // True until every element of the job has been uploaded.
  virtual bool initialising() const = 0;
  // fp32 masters of elements offset .. of a parameter, copied before it returns. Any
  // rank may upload any part; by convention rank r uploads the parameters p with
  // p % world_size == r. A part begins at a multiple of 32 elements, and ends at one
  // or at the parameter's end.
  virtual absl::Status Upload(size_t parameter, uint64_t offset, std::span<const float> values) = 0;
  // The same for moment `moment` of a parameter that begins with `applied` optimizer steps behind
  // it. All moments of a parameter come, with the same count, before the job's last masters, for
  // these make it complete. Not in a job that spans daemons.
  virtual absl::Status UploadMoment(uint32_t moment, size_t parameter, uint64_t offset,
                                    std::span<const float> values, uint64_t applied) = 0;
  // The bytes of frozen parameter JobOptions::frozen[index] from `offset` on, in its dtype. A part
  // begins at a multiple of 64 bytes, and ends at one or at the parameter's end. By convention
  // rank 0 uploads them.
  virtual absl::Status UploadFrozen(size_t index, uint64_t offset,
                                    std::span<const std::byte> bytes) = 0;
  // Waits until all ranks' uploads have made the job complete.
  virtual absl::Status FinishUpload() = 0;

  // --- working weights ---
  // Waits until the weights of next_step() are there and returns the parameter's
  // [elements] of weight_dtype, contiguous. Valid until EndStep; at stage 3 with
  // weights = private only between Gather and Release of that parameter.
  virtual absl::StatusOr<const void*> WaitWeights(size_t parameter) = 0;
  // Stage 3 with weights = private: brings parameters in / gives their memory back.
  // Elsewhere Gather waits like WaitWeights and Release does nothing.
  virtual absl::Status Gather(std::span<const size_t> parameters) = 0;
  virtual absl::Status Release(std::span<const size_t> parameters) = 0;

  // --- gradients ---
  // A buffer [elements] of grad_dtype for one slot's gradient, uninitialised, 64-byte
  // aligned; in the ring itself where the publish order allows. Slots come in
  // ascending order; parameters in any order.
  virtual absl::StatusOr<void*> AcquireGrad(size_t parameter, uint32_t slot) = 0;
  // The buffer is complete. May publish buckets (and then wait for ring space).
  virtual absl::Status ReadyGrad(size_t parameter, uint32_t slot) = 0;

  // --- the end of a step ---
  virtual absl::Status EndStep(const StepReport& report) = 0;
  // Waits for the decision on the step that EndStep ended. FailedPrecondition when
  // the job has ended (overflow at the floor, too many skips): the message says why.
  // DeadlineExceeded names the ranks that did not end the step.
  virtual absl::StatusOr<Decision> WaitDecision() = 0;
  // Gives up what this rank has handed over of next_step() and forms the rank group anew, as if
  // it had died and come back at once: every rank of it, this one too, is at the same step
  // afterwards; the others' verbs return Regrouped. For a trainer that finds that the gradients
  // it gave are not those that it means. Nothing to give up after EndStep: WaitDecision first.
  virtual absl::Status Rejoin() = 0;

  // --- reading ---
  // Records first_step.. that are still kept (1024), ascending.
  virtual absl::StatusOr<std::vector<StepRecord>> StepRecords(uint64_t first_step) = 0;
  // Copies fp32 state of a parameter; of the committed step. out.size() elements from offset.
  virtual absl::Status ReadState(StateKind kind, size_t parameter, uint64_t offset,
                                 std::span<float> out) = 0;
  // Steps applied to a parameter.
  virtual absl::StatusOr<uint64_t> ParameterApplied(size_t parameter) = 0;

  // Copies bytes of a frozen parameter.
  virtual absl::Status ReadFrozen(size_t index, uint64_t offset, std::span<std::byte> out) = 0;

  // Saves the job's state as of the last committed step (shardctl checkpoint save says what a
  // checkpoint is). One rank asks; the others go on until they need this one's next step.
  // AlreadyExists: a save is running. FailedPrecondition: the daemon has no place for them.
  virtual absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const SaveOptions& options) = 0;

  // Leaves in good order. The job and its state stay with the daemon; but a private
  // daemon ends and the state with it: read what is to be kept before. (After a crash
  // of the trainer a private daemon keeps the state for a day.) A step that EndStep ended is
  // waited for; one that was begun and not ended is dropped.
  virtual absl::Status Close() = 0;
  // After Close: gives the job and its state up, for good. FailedPrecondition while ranks are
  // attached to it. OK when it is gone already, as that of a private daemon is.
  virtual absl::Status DeleteJob() = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_CLIENT_H_

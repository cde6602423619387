// Applies a decision: one pass over each chunk, then the bucket's ready word.
#ifndef SHARDD_SERVER_STEP_UPDATER_H_
#define SHARDD_SERVER_STEP_UPDATER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/isa.h"
#include "kernels/optimizer.h"
#include "proto/contract/layout.h"
#include "proto/contract/segments.h"
#include "server/env/failpoints.h"
#include "server/env/thread_pool.h"
#include "server/step/chunk_gate.h"
#include "server/step/state_copy.h"
#include "server/store/job_segments.h"

namespace shardd::step {

// What the decision says, as the update needs it.
struct UpdateOrder {
  uint64_t step = 0;
  uint64_t applied = 0;  // after the step
  float clip_factor = 1.0f;
  std::span<const contract::ParameterEntry> table;  // of this decision
  std::span<const uint64_t> presence;
  // The gradient of the elements from `gradient_begin` on, in place of the reduced segment's.
  const std::byte* gradient = nullptr;
  uint64_t gradient_begin = 0;
};

// The job's thread only; fans out over the pool.
class Updater {
 public:
  Updater(const contract::Layout* layout, store::JobSegments* segments,
          const kernels::Optimizer* optimizer, kernels::Isa isa, env::ThreadPool* pool,
          env::Failpoints* failpoints);

  // Which chunks are updated here, ascending; at first all. `complete` says whether the rest of a
  // bucket's weights carries the step that is being taken (any thread, within Run); only then is
  // its ready word set. Null: there is no rest. Between steps only.
  void SetOwned(std::vector<uint64_t> chunks, std::function<bool(uint64_t bucket)> complete);
  const std::vector<uint64_t>& owned() const { return owned_; }

  // Claimed while a chunk is updated; whoever copies chunks on another thread claims them here.
  ChunkGate* gate() { return &gate_; }
  // Every chunk is given to `copy` before it is changed, until this is called with null. Between
  // two steps.
  void SetCopy(std::shared_ptr<StateCopy> copy) { copy_ = std::move(copy); }

  // Updates every chunk that does not carry order.applied yet, ascending in the flat space, so
  // that the next forward can begin with the first layers; chunks that somebody copies just then
  // come last. A bucket whose chunks are all done gets its ready word; then on_ready is called
  // (from any thread).
  void Run(const UpdateOrder& order, const std::function<void()>& on_ready);

  // Finishes an update that a daemon's death interrupted: mends each torn chunk from its undo slots
  // and redoes what is missing, from the reduced gradient. Idempotent. DataLoss names the chunk
  // that fits neither before nor after the step, or whose gradient is not that of the step;
  // chunks before it may have been redone. Returns how many were.
  absl::StatusOr<uint64_t> Recover(const UpdateOrder& order);

  // The update of one chunk, unless it carries the step already. Thread-safe for different chunks;
  // nobody else may touch them.
  void Redo(uint64_t chunk, const UpdateOrder& order) const { UpdateChunk(chunk, order, 0); }

  // Completes the scalars of the parameters that `order` updates, where the optimizer has trust
  // ratios: from the state before the update and the reduced gradient. `groups` are the
  // hyper-parameters that the scalars came of. Every chunk must be owned.
  void SetTrustRatios(const UpdateOrder& order, std::span<const kernels::Hyperparameters> groups,
                      std::span<contract::ParameterEntry> table) const;

  // Casts all masters to working weights, unless these are part of them, and sets the ready words
  // of complete buckets to `step`. `table` is that of the step.
  void PublishMasters(uint64_t step, std::span<const contract::ParameterEntry> table);

 private:
  // All but the state and what is the step's own: undo log and scalars.
  kernels::UpdateRun MakeRun(uint64_t chunk_begin, const contract::Range& range,
                             const UpdateOrder& order) const;
  // Elements before `from` (of the chunk) carry the step already.
  void UpdateChunk(uint64_t chunk, const UpdateOrder& order, uint64_t from) const;
  absl::Status CheckRedo(uint64_t chunk, const UpdateOrder& order) const;

  const contract::Layout* layout_;
  store::JobSegments* segments_;
  const kernels::Optimizer* optimizer_;
  const kernels::Isa isa_;
  env::ThreadPool* pool_;
  env::Failpoints* failpoints_;
  // All runs, cut at chunk borders; those of chunk c are runs_[first_run_[c] ..].
  std::vector<contract::Run> runs_;
  std::vector<size_t> first_run_;
  std::vector<uint64_t> owned_;
  std::function<bool(uint64_t bucket)> complete_;
  ChunkGate gate_;
  std::shared_ptr<StateCopy> copy_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_UPDATER_H_

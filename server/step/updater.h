// Applies a decision: one pass over each chunk, then the bucket's ready word.
#ifndef SHARDD_SERVER_STEP_UPDATER_H_
#define SHARDD_SERVER_STEP_UPDATER_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/isa.h"
#include "kernels/optimizer.h"
#include "proto/contract/layout.h"
#include "proto/contract/segments.h"
#include "server/env/failpoints.h"
#include "server/env/thread_pool.h"
#include "server/store/job_segments.h"

namespace shardd::step {

// What the decision says, as the update needs it.
struct UpdateOrder {
  uint64_t step = 0;
  uint64_t applied = 0;  // after the step
  float clip_factor = 1.0f;
  std::span<const contract::ParameterEntry> table;  // of this decision
  std::span<const uint64_t> presence;
};

// The job's thread only; fans out over the pool.
class Updater {
 public:
  Updater(const contract::Layout* layout, store::JobSegments* segments,
          const kernels::Optimizer* optimizer, kernels::Isa isa, env::ThreadPool* pool,
          env::Failpoints* failpoints);

  // Updates every chunk that does not carry order.applied yet, ascending in the flat space, so
  // that the next forward can begin with the first layers. A bucket whose chunks are all done
  // gets its ready word; then on_ready is called (from any thread).
  void Run(const UpdateOrder& order, const std::function<void()>& on_ready);

  // Finishes an update that a daemon's death interrupted: mends each torn chunk from its undo slots
  // and redoes what is missing, from the reduced gradient. Idempotent. DataLoss names the chunk
  // that fits neither before nor after the step, or whose gradient is not that of the step;
  // chunks before it may have been redone. Returns how many were.
  absl::StatusOr<uint64_t> Recover(const UpdateOrder& order);

  // Casts all masters to working weights and sets every ready word to `step`.
  void PublishMasters(uint64_t step);

 private:
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
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_UPDATER_H_

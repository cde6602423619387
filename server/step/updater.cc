#include "server/step/updater.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "kernels/trust_ratio.h"

namespace shardd::step {

Updater::Updater(const contract::Layout* layout, store::JobSegments* segments,
                 const kernels::Optimizer* optimizer, kernels::Isa isa, env::ThreadPool* pool,
                 env::Failpoints* failpoints)
    : layout_(layout),
      segments_(segments),
      optimizer_(optimizer),
      isa_(isa),
      pool_(pool),
      failpoints_(failpoints),
      gate_(layout->num_chunks()) {
  first_run_.push_back(0);
  for (uint64_t c = 0; c < layout->num_chunks(); ++c) {
    for (const contract::Run& run : layout->runs(layout->chunk_range(c))) runs_.push_back(run);
    first_run_.push_back(runs_.size());
    owned_.push_back(c);
  }
}

void Updater::SetOwned(std::vector<uint64_t> chunks,
                       std::function<bool(uint64_t bucket)> complete) {
  owned_ = std::move(chunks);
  complete_ = std::move(complete);
}

kernels::UpdateRun Updater::MakeRun(uint64_t chunk_begin, const contract::Range& range,
                                    const UpdateOrder& order) const {
  const uint64_t position = range.begin - chunk_begin;
  kernels::UpdateRun run;
  run.grad = order.gradient == nullptr
                 ? segments_->reduced(range.begin)
                 : order.gradient + (range.begin - order.gradient_begin) *
                                        kernels::DTypeSize(segments_->reduced_dtype());
  run.weight = segments_->weights(range.begin);
  run.count = range.size();
  run.grad_dtype = segments_->reduced_dtype();
  run.weight_dtype = segments_->weight_dtype();
  run.grad_factor = order.clip_factor;
  run.position = static_cast<uint32_t>(position);
  run.element = range.begin;
  return run;
}

void Updater::UpdateChunk(uint64_t chunk, const UpdateOrder& order, uint64_t from) const {
  const store::ChunkView view = segments_->chunk(chunk);
  if (view.header->applied.load(std::memory_order_relaxed) >= order.applied) return;
  const uint64_t chunk_begin = layout_->chunk_range(chunk).begin;
  for (size_t r = first_run_[chunk]; r < first_run_[chunk + 1]; ++r) {
    contract::Run run = runs_[r];
    run.range.begin = std::max(run.range.begin, chunk_begin + from);
    if (run.range.begin >= run.range.end) continue;
    if ((order.presence[run.parameter / 64] >> (run.parameter % 64) & 1) == 0) continue;
    const kernels::StepScalars scalars = std::to_array(order.table[run.parameter].scalars);
    kernels::UpdateRun update = MakeRun(chunk_begin, run.range, order);
    update.scalars = &scalars;
    update.steps = order.table[run.parameter].applied;
    update.undo = view.undo;
    update.undo_epoch = static_cast<uint32_t>(order.applied);
    kernels::UpdateState(*optimizer_, isa_, view.format,
                         kernels::Advance(view.format, view.arrays, update.position), update);
  }
  kernels::StoreFence();
  view.header->applied.store(order.applied, std::memory_order_release);
}

void Updater::Run(const UpdateOrder& order, const std::function<void()>& on_ready) {
  const uint64_t buckets = layout_->num_buckets();
  std::unique_ptr<std::atomic<uint64_t>[]> left(new std::atomic<uint64_t>[buckets]);
  for (uint64_t b = 0; b < buckets; ++b) left[b] = 0;
  for (const uint64_t chunk : owned_) {
    left[layout_->bucket_of(layout_->chunk_range(chunk).begin)] += 1;
  }
  const auto update_claimed = [&](uint64_t chunk) {
    UpdateChunk(chunk, order, 0);
    gate_.Release(chunk);
    failpoints_->Reach("step.update.after_chunk");
    const uint64_t bucket = layout_->bucket_of(layout_->chunk_range(chunk).begin);
    if (left[bucket].fetch_sub(1, std::memory_order_acq_rel) == 1 &&
        (complete_ == nullptr || complete_(bucket))) {
      segments_->bucket_line(bucket)->ready_step.store(order.step, std::memory_order_release);
      on_ready();
    }
  };
  // Whether the claim was had and the old state is where it is wanted.
  const auto try_update = [&](uint64_t chunk) {
    if (!gate_.TryClaim(chunk)) return false;
    if (copy_ == nullptr || copy_->CopyBeforeUpdate(chunk)) {
      update_claimed(chunk);
      return true;
    }
    gate_.Release(chunk);
    return false;
  };
  std::mutex mutex;
  std::vector<uint64_t> passed_over;  // under mutex
  pool_->ParallelFor(owned_.size(), [&](size_t i) {
    const uint64_t chunk = owned_[i];
    if (try_update(chunk)) return;
    const std::lock_guard lock(mutex);
    passed_over.push_back(chunk);
  });
  for (const uint64_t chunk : passed_over) {
    while (!try_update(chunk)) {
      if (copy_ != nullptr) copy_->AwaitRoom(chunk);
      gate_.AwaitFree(chunk);
    }
  }
}

absl::Status Updater::CheckRedo(uint64_t chunk, const UpdateOrder& order) const {
  const uint64_t applied = segments_->chunk(chunk).header->applied.load();
  const contract::Range range = layout_->chunk_range(chunk);
  const uint64_t reduced = segments_->reduced_line(layout_->bucket_of(range.begin))->step.load();
  if (applied + 1 != order.applied) {
    return absl::DataLossError(absl::StrCat("chunk ", chunk, " carries ", applied,
                                            " steps where the decision leads to ", order.applied));
  }
  if (reduced != order.step) {
    return absl::DataLossError(absl::StrCat("chunk ", chunk, " lacks step ", order.step,
                                            ", and its gradient is of step ", reduced));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Updater::Recover(const UpdateOrder& order) {
  std::vector<uint64_t> torn;
  for (const uint64_t c : owned_) {
    if (segments_->chunk(c).header->applied.load() == order.applied) continue;
    if (absl::Status status = CheckRedo(c, order); !status.ok()) return status;
    torn.push_back(c);
  }
  pool_->ParallelFor(torn.size(), [&](size_t i) {
    const uint64_t chunk = torn[i];
    const store::ChunkView view = segments_->chunk(chunk);
    const size_t from =
        kernels::MendState(*view.undo, segments_->timeline(), static_cast<uint32_t>(order.applied),
                           layout_->chunk_elements(), view.format, view.arrays);
    failpoints_->Reach("recover.after_mend");
    UpdateChunk(chunk, order, from);
  });
  return torn.size();
}

void Updater::SetTrustRatios(const UpdateOrder& order,
                             std::span<const kernels::Hyperparameters> groups,
                             std::span<contract::ParameterEntry> table) const {
  struct Leaves {
    std::vector<double> parameter, direction;
  };
  std::vector<Leaves> leaves(runs_.size());  // of each run, ascending
  pool_->ParallelFor(owned_.size(), [&](size_t i) {
    const uint64_t chunk = owned_[i];
    const uint64_t chunk_begin = layout_->chunk_range(chunk).begin;
    const store::ChunkView view = segments_->chunk(chunk);
    kernels::TrustMeter meter;
    for (size_t r = first_run_[chunk]; r < first_run_[chunk + 1]; ++r) {
      const uint32_t p = runs_[r].parameter;
      if ((order.presence[p / 64] >> (p % 64) & 1) == 0) continue;
      const kernels::StepScalars scalars = std::to_array(table[p].scalars);
      contract::Range left = runs_[r].range;
      while (!left.empty()) {
        const uint64_t block_end = contract::RoundUpTo(left.begin + 1, contract::kBlockElements);
        const contract::Range part = {left.begin, std::min(left.end, block_end)};
        kernels::UpdateRun run = MakeRun(chunk_begin, part, order);
        run.scalars = &scalars;
        const kernels::TrustSums sums =
            meter.Measure(*optimizer_, isa_, view.format,
                          kernels::Advance(view.format, view.arrays, run.position), run);
        leaves[r].parameter.push_back(sums.parameter);
        leaves[r].direction.push_back(sums.direction);
        left.begin = part.end;
      }
    }
  });
  for (size_t r = 0; r < runs_.size();) {
    const uint32_t p = runs_[r].parameter;
    Leaves all;
    for (; r < runs_.size() && runs_[r].parameter == p; ++r) {
      all.parameter.insert(all.parameter.end(), leaves[r].parameter.begin(),
                           leaves[r].parameter.end());
      all.direction.insert(all.direction.end(), leaves[r].direction.begin(),
                           leaves[r].direction.end());
    }
    if (all.parameter.empty()) continue;
    kernels::StepScalars scalars = std::to_array(table[p].scalars);
    optimizer_->SetTrust(groups[layout_->parameter(p).group],
                         std::sqrt(kernels::FoldTree(all.parameter)),
                         std::sqrt(kernels::FoldTree(all.direction)), &scalars);
    std::copy(scalars.begin(), scalars.end(), table[p].scalars);
  }
}

void Updater::PublishMasters(uint64_t step, std::span<const contract::ParameterEntry> table) {
  // The weights of a split master are there.
  const bool split = segments_->state_format().split();
  pool_->ParallelFor(split ? 0 : owned_.size(), [&](size_t i) {
    const uint64_t chunk = owned_[i];
    const auto* master = static_cast<const float*>(segments_->chunk(chunk).arrays.master);
    const uint64_t chunk_begin = layout_->chunk_range(chunk).begin;
    for (size_t r = first_run_[chunk]; r < first_run_[chunk + 1]; ++r) {
      const contract::Range& range = runs_[r].range;
      kernels::WriteWeights(isa_, segments_->state_format(), master + (range.begin - chunk_begin),
                            range.size(), table[runs_[r].parameter].applied, range.begin,
                            segments_->weights(range.begin), segments_->weight_dtype());
    }
    kernels::StoreFence();
  });
  for (uint64_t b = 0; b < layout_->num_buckets(); ++b) {
    if (complete_ != nullptr && !complete_(b)) continue;
    segments_->bucket_line(b)->ready_step.store(step, std::memory_order_release);
  }
}

}  // namespace shardd::step

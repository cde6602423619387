#include "server/step/updater.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"

namespace shardd::step {

Updater::Updater(const contract::Layout* layout, store::JobSegments* segments,
                 const kernels::Optimizer* optimizer, kernels::Isa isa, env::ThreadPool* pool,
                 env::Failpoints* failpoints)
    : layout_(layout),
      segments_(segments),
      optimizer_(optimizer),
      isa_(isa),
      pool_(pool),
      failpoints_(failpoints) {
  first_run_.push_back(0);
  for (uint64_t c = 0; c < layout->num_chunks(); ++c) {
    for (const contract::Run& run : layout->runs(layout->chunk_range(c))) runs_.push_back(run);
    first_run_.push_back(runs_.size());
  }
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
    const uint64_t position = run.range.begin - chunk_begin;
    const kernels::StepScalars scalars = std::to_array(order.table[run.parameter].scalars);
    kernels::UpdateRun update;
    update.master = view.master + position;
    for (size_t m = 0; m < update.state.size(); ++m) {
      if (view.moment[m] != nullptr) update.state[m] = view.moment[m] + position;
    }
    update.grad = segments_->reduced(run.range.begin);
    update.weight = segments_->weights(run.range.begin);
    update.count = run.range.size();
    update.grad_dtype = segments_->reduced_dtype();
    update.weight_dtype = segments_->weight_dtype();
    update.grad_factor = order.clip_factor;
    update.scalars = &scalars;
    update.undo = view.undo;
    update.undo_epoch = static_cast<uint32_t>(order.applied);
    update.position = static_cast<uint32_t>(position);
    optimizer_->Update(isa_, update);
  }
  kernels::StoreFence();
  view.header->applied.store(order.applied, std::memory_order_release);
}

void Updater::Run(const UpdateOrder& order, const std::function<void()>& on_ready) {
  const uint64_t buckets = layout_->num_buckets();
  std::unique_ptr<std::atomic<uint64_t>[]> left(new std::atomic<uint64_t>[buckets]);
  for (uint64_t b = 0; b < buckets; ++b) {
    const contract::Range range = layout_->bucket_range(b);
    left[b] = (range.size() + layout_->chunk_elements() - 1) / layout_->chunk_elements();
  }
  pool_->ParallelFor(layout_->num_chunks(), [&](size_t chunk) {
    UpdateChunk(chunk, order, 0);
    failpoints_->Reach("step.update.after_chunk");
    const uint64_t bucket = layout_->bucket_of(layout_->chunk_range(chunk).begin);
    if (left[bucket].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      segments_->bucket_line(bucket)->ready_step.store(order.step, std::memory_order_release);
      on_ready();
    }
  });
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
  for (uint64_t c = 0; c < layout_->num_chunks(); ++c) {
    if (segments_->chunk(c).header->applied.load() == order.applied) continue;
    if (absl::Status status = CheckRedo(c, order); !status.ok()) return status;
    torn.push_back(c);
  }
  pool_->ParallelFor(torn.size(), [&](size_t i) {
    const uint64_t chunk = torn[i];
    const store::ChunkView view = segments_->chunk(chunk);
    const size_t from =
        kernels::MendChunk(*view.undo, segments_->timeline(), static_cast<uint32_t>(order.applied),
                           layout_->chunk_elements(), view.master, view.moment);
    failpoints_->Reach("recover.after_mend");
    UpdateChunk(chunk, order, from);
  });
  return torn.size();
}

void Updater::PublishMasters(uint64_t step) {
  pool_->ParallelFor(layout_->num_chunks(), [&](size_t chunk) {
    const contract::Range range = layout_->chunk_range(chunk);
    kernels::MasterToWeight(isa_, segments_->chunk(chunk).master, range.size(),
                            segments_->weights(range.begin), segments_->weight_dtype());
    kernels::StoreFence();
  });
  for (uint64_t b = 0; b < layout_->num_buckets(); ++b) {
    segments_->bucket_line(b)->ready_step.store(step, std::memory_order_release);
  }
}

}  // namespace shardd::step

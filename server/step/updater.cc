#include "server/step/updater.h"

#include <atomic>
#include <memory>

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

void Updater::UpdateChunk(uint64_t chunk, const UpdateOrder& order) const {
  const store::ChunkView view = segments_->chunk(chunk);
  if (view.header->applied.load(std::memory_order_relaxed) >= order.applied) return;
  const uint64_t chunk_begin = layout_->chunk_range(chunk).begin;
  for (size_t r = first_run_[chunk]; r < first_run_[chunk + 1]; ++r) {
    const contract::Run& run = runs_[r];
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
    UpdateChunk(chunk, order);
    failpoints_->Reach("step.update.after_chunk");
    const uint64_t bucket = layout_->bucket_of(layout_->chunk_range(chunk).begin);
    if (left[bucket].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      segments_->bucket_line(bucket)->ready_step.store(order.step, std::memory_order_release);
      on_ready();
    }
  });
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

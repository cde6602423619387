#include "client/grad_staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/reduce.h"
#include "proto/contract/segments.h"

namespace shardd {

namespace {

using contract::Range;

constexpr size_t kPartialBytes = 4;

uint64_t ArenaStride(const contract::Layout& layout, size_t element_bytes) {
  return contract::RoundUpTo(std::max<uint64_t>(layout.flat_elements() * element_bytes, 1),
                             contract::kSegmentPage);
}

}  // namespace

GradStaging::GradStaging(const contract::Layout& layout, SlotPlan plan, kernels::DType dtype,
                         kernels::Isa isa)
    : layout_(layout),
      plan_(std::move(plan)),
      dtype_(dtype),
      isa_(isa),
      leaf_stride_(ArenaStride(layout, kernels::DTypeSize(dtype))),
      partial_stride_(ArenaStride(layout, kPartialBytes)),
      next_slot_(layout.num_parameters(), plan_.run.lo) {}

absl::StatusOr<std::unique_ptr<GradStaging>> GradStaging::Create(const contract::Layout& layout,
                                                                 SlotPlan plan,
                                                                 kernels::DType dtype,
                                                                 kernels::Isa isa) {
  std::unique_ptr<GradStaging> staging(new GradStaging(layout, std::move(plan), dtype, isa));
  absl::StatusOr<MemoryFile> leaves = MemoryFile::Create(
      "shardd-staging", staging->leaf_stride_ * staging->plan_.leaf_arenas, /*sealed=*/false);
  if (!leaves.ok()) return leaves.status();
  staging->leaves_ = *std::move(leaves);
  absl::StatusOr<MemoryFile> partials =
      MemoryFile::Create("shardd-partial", staging->partial_stride_ * staging->plan_.partial_arenas,
                         /*sealed=*/false);
  if (!partials.ok()) return partials.status();
  staging->partials_ = *std::move(partials);
  return staging;
}

std::byte* GradStaging::At(NodePlace place, uint64_t element) const {
  if (place.partial) {
    return partials_.data() + place.arena * partial_stride_ + element * kPartialBytes;
  }
  return leaves_.data() + place.arena * leaf_stride_ + element * kernels::DTypeSize(dtype_);
}

std::byte* GradStaging::Leaf(size_t parameter, uint32_t slot) {
  while (next_slot_[parameter] < slot) CompleteNext(parameter, /*given=*/false);
  const SlotPlan::Slot& step = plan_.slots[slot - plan_.run.lo];
  return At({false, step.leaf_arena}, layout_.parameter_range(parameter).begin);
}

void GradStaging::Sum(const NodeSum& sum, Range range, std::byte* out) const {
  std::vector<kernels::ReduceInput> inputs;
  for (const NodePlace& place : sum.inputs) {
    inputs.push_back({At(place, range.begin), place.partial ? kernels::DType::kFloat32 : dtype_});
  }
  kernels::Reduce(isa_, sum.program, inputs, range.size(), out, kernels::DType::kFloat32, nullptr);
}

void GradStaging::CompleteNext(size_t parameter, bool given) {
  const Range range = layout_.parameter_range(parameter);
  const SlotPlan::Slot& step = plan_.slots[next_slot_[parameter] - plan_.run.lo];
  ++next_slot_[parameter];
  if (range.empty()) return;
  if (!given) {
    std::memset(At({false, step.leaf_arena}, range.begin), 0,
                range.size() * kernels::DTypeSize(dtype_));
  }
  if (!step.sum.inputs.empty()) {
    Sum(step.sum, range, At({true, step.partial_arena}, range.begin));
  }
}

void GradStaging::Complete(size_t parameter, uint32_t slot) {
  while (next_slot_[parameter] < slot) CompleteNext(parameter, /*given=*/false);
  CompleteNext(parameter, /*given=*/true);
}

void GradStaging::CompleteRest(size_t parameter) {
  while (next_slot_[parameter] < plan_.run.hi) CompleteNext(parameter, /*given=*/false);
}

size_t GradStaging::node_element_bytes(size_t node) const {
  return plan_.nodes[node].leaf() ? kernels::DTypeSize(dtype_) : kPartialBytes;
}

void GradStaging::Fill(size_t node, Range range, std::byte* out) const {
  const SlotPlan::Node& step = plan_.nodes[node];
  if (step.sum.inputs.size() == 1) {
    std::memcpy(out, At(step.sum.inputs[0], range.begin), range.size() * node_element_bytes(node));
  } else {
    Sum(step.sum, range, out);
  }
}

void GradStaging::Discard(Range range) {
  const auto discard = [&](MemoryFile& file, uint64_t stride, uint32_t arenas, size_t element) {
    // The last bucket's end is the arena's: its last page holds nothing else.
    const uint64_t end = range.end == layout_.flat_elements() ? stride : range.end * element;
    for (uint32_t arena = 0; arena < arenas; ++arena) {
      file.Discard(arena * stride + range.begin * element, arena * stride + end);
    }
  };
  discard(leaves_, leaf_stride_, plan_.leaf_arenas, kernels::DTypeSize(dtype_));
  discard(partials_, partial_stride_, plan_.partial_arenas, kPartialBytes);
}

void GradStaging::Reset() { std::fill(next_slot_.begin(), next_slot_.end(), plan_.run.lo); }

}  // namespace shardd

// Where gradients wait until their bucket's turn: one arena per slot that is still
// needed as a leaf (gradient dtype) and one per partial sum (fp32), each laid out as
// the flat space. Slots of one parameter are added as they complete, along SlotPlan.
//
// A slot that a parameter has no gradient in counts as zeros.
#ifndef SHARDD_CLIENT_GRAD_STAGING_H_
#define SHARDD_CLIENT_GRAD_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/memory_file.h"
#include "client/slot_plan.h"
#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "proto/contract/layout.h"

namespace shardd {

// Threads: calls for different parameters may run in parallel.
class GradStaging {
 public:
  // `layout` outlives this.
  static absl::StatusOr<std::unique_ptr<GradStaging>> Create(const contract::Layout& layout,
                                                             SlotPlan plan, kernels::DType dtype,
                                                             kernels::Isa isa);

  const SlotPlan& plan() const { return plan_; }

  // The buffer of a parameter's gradient in `slot` of the run. Slots below it that
  // were not completed count as zeros from here on.
  std::byte* Leaf(size_t parameter, uint32_t slot);
  // The buffer holds the gradient: does the additions that have become possible.
  // Slots below it that were not completed count as zeros.
  void Complete(size_t parameter, uint32_t slot);
  // Counts the slots that are left as zeros.
  void CompleteRest(size_t parameter);
  // Slots below this one are complete; plan().run.hi: all are.
  uint32_t next_slot(size_t parameter) const { return next_slot_[parameter]; }

  // Bytes of one element of a published node.
  size_t node_element_bytes(size_t node) const;
  // Writes elements `range` of a published node to `out`: all parameters in it are
  // complete. Padding comes out as zeros.
  void Fill(size_t node, contract::Range range, std::byte* out) const;

  // Gives the memory of elements `range` back; they read as zeros then.
  void Discard(contract::Range range);
  // Begins a step: no slot is complete.
  void Reset();

 private:
  GradStaging(const contract::Layout& layout, SlotPlan plan, kernels::DType dtype,
              kernels::Isa isa);
  std::byte* At(NodePlace place, uint64_t element) const;
  // Completes the next slot, with zeros unless its gradient is `given`.
  void CompleteNext(size_t parameter, bool given);
  void Sum(const NodeSum& sum, contract::Range range, std::byte* out) const;

  const contract::Layout& layout_;
  const SlotPlan plan_;
  const kernels::DType dtype_;
  const kernels::Isa isa_;
  const uint64_t leaf_stride_;     // bytes between leaf arenas
  const uint64_t partial_stride_;  // bytes between partial arenas
  MemoryFile leaves_;
  MemoryFile partials_;
  std::vector<uint32_t> next_slot_;  // [parameters]
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_GRAD_STAGING_H_

// A ReduceProgram laid out for execution: internal to the kernels.
#ifndef SHARDD_KERNELS_REDUCE_PLAN_H_
#define SHARDD_KERNELS_REDUCE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/reduce.h"

namespace shardd::kernels {

// Where an addition finds an operand: an input, or a scratch row that an earlier
// addition wrote.
struct ReduceOperand {
  bool scratch = false;
  uint32_t index = 0;
};

// One addition, or with `leaves` = 4 or 8 a full subtree: the inputs left.index ..
// left.index + leaves - 1, all of one dtype, added in registers. The last one of a
// plan writes the output, the others write the scratch row `target`.
struct ReduceAddition {
  ReduceOperand left, right;
  uint32_t target = 0;
  uint32_t leaves = 0;
};

inline constexpr uint32_t kMaxFullLeaves = 8;

// Without additions the plan copies its only input. Every input is an operand
// exactly once, and so is loaded once.
struct ReducePlan {
  std::vector<ReduceAddition> additions;
  size_t scratch_rows = 0;
};

// Elements per tile; divides kBlockElements. A tile of each of 16 bf16 inputs and
// of 4 scratch rows fits in 32 KiB.
inline constexpr size_t kTileElements = 512;
static_assert(kBlockElements % kTileElements == 0 && kTileElements % 32 == 0);

// The memory in which a plan is executed, made before it: the execution allocates nothing.
class ReduceWorkspace {
 public:
  // The last elements of an input, which do not fill a vector, and zeros.
  struct alignas(64) PaddedRow {
    float values[32];
  };

  ReduceWorkspace(const ReducePlan& plan, std::span<const ReduceInput> inputs)
      : scratch_storage_(plan.scratch_rows * kTileElements + 64 / sizeof(float)),
        padded_rows_(inputs.size()),
        padded_inputs_(inputs.begin(), inputs.end()) {
    const auto address = reinterpret_cast<uintptr_t>(scratch_storage_.data());
    scratch_ = scratch_storage_.data() + (64 - address % 64) % 64 / sizeof(float);
    for (size_t k = 0; k < inputs.size(); ++k) padded_inputs_[k].data = padded_rows_[k].values;
  }
  ReduceWorkspace(const ReduceWorkspace&) = delete;
  ReduceWorkspace& operator=(const ReduceWorkspace&) = delete;

  // Rows of kTileElements, one after the other, aligned to 64 bytes.
  float* scratch() const { return scratch_; }
  // One per input, and the inputs as found in them.
  std::span<PaddedRow> padded_rows() { return padded_rows_; }
  std::span<const ReduceInput> padded_inputs() const { return padded_inputs_; }

 private:
  std::vector<float> scratch_storage_;
  float* scratch_;
  std::vector<PaddedRow> padded_rows_;
  std::vector<ReduceInput> padded_inputs_;
};

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_REDUCE_PLAN_H_

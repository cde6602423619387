// A ReduceProgram laid out for execution: internal to the kernels.
#ifndef SHARDD_KERNELS_REDUCE_PLAN_H_
#define SHARDD_KERNELS_REDUCE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

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

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_REDUCE_PLAN_H_

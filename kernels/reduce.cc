#include "kernels/reduce.h"

#include <algorithm>

#include "kernels/targets.h"

namespace shardd::kernels {
namespace {

// A value on the stack of a program: where it is, and whether it is the sum of a
// full subtree of inputs of one dtype.
struct Value {
  ReduceOperand operand;
  uint32_t leaves = 0;  // of the full subtree; 0: none
  uint32_t first = 0;   // its first input
  DType dtype = DType::kFloat32;
};

// Two full subtrees that make one, which registers can hold.
bool Joins(const Value& left, const Value& right) {
  return left.leaves != 0 && left.leaves == right.leaves && left.dtype == right.dtype &&
         left.leaves * 2 <= kMaxFullLeaves;
}

// Scratch rows are numbered by the stack depth of the value they hold, so that
// the plan needs as many rows as the program is deep.
ReducePlan MakePlan(const ReduceProgram& program, std::span<const ReduceInput> inputs) {
  ReducePlan plan;
  std::vector<Value> stack;
  uint32_t next = 0;
  for (const bool push : program.push) {
    if (push) {
      stack.push_back({{.scratch = false, .index = next}, 1, next, inputs[next].dtype});
      ++next;
      continue;
    }
    const Value right = stack.back();
    stack.pop_back();
    Value& left = stack.back();
    const auto row = static_cast<uint32_t>(stack.size() - 1);
    ReduceAddition addition{.left = left.operand, .right = right.operand, .target = row};
    if (Joins(left, right)) {
      // The additions that made the two are the last ones of the plan.
      if (left.leaves > 1) plan.additions.resize(plan.additions.size() - 2);
      left.leaves *= 2;
      if (left.leaves > 2) {
        addition.left = {.scratch = false, .index = left.first};
        addition.leaves = left.leaves;
      }
    } else {
      left.leaves = 0;
    }
    plan.additions.push_back(addition);
    left.operand = {.scratch = true, .index = row};
    plan.scratch_rows = std::max<size_t>(plan.scratch_rows, row + 1);
  }
  return plan;
}

template <class Bits>
size_t FindNonFiniteBits(const void* data, size_t count, Bits exponent, Bits magnitude,
                         bool* is_nan) {
  const Bits* values = static_cast<const Bits*>(data);
  for (size_t i = 0; i < count; ++i) {
    if ((values[i] & exponent) != exponent) continue;
    *is_nan = (values[i] & magnitude) > exponent;
    return i;
  }
  return count;
}

}  // namespace

struct Reducer::Parts {
  Parts(Isa isa, const ReduceProgram& program, std::span<const ReduceInput> inputs)
      : isa(isa),
        inputs(inputs.begin(), inputs.end()),
        plan(MakePlan(program, inputs)),
        workspace(plan, inputs) {}
  const Isa isa;
  const std::vector<ReduceInput> inputs;
  const ReducePlan plan;
  ReduceWorkspace workspace;
};

Reducer::Reducer(Isa isa, const ReduceProgram& program, std::span<const ReduceInput> inputs)
    : parts_(std::make_unique<Parts>(isa, program, inputs)) {}

Reducer::~Reducer() = default;

void Reducer::Run(size_t count, void* out, DType out_dtype, BlockStats* stats) {
  SHARDD_FOR_ISA(parts_->isa, ReduceElements)
  (parts_->plan, parts_->inputs, count, out, out_dtype, stats, &parts_->workspace);
}

void Reduce(Isa isa, const ReduceProgram& program, std::span<const ReduceInput> inputs,
            size_t count, void* out, DType out_dtype, BlockStats* stats) {
  Reducer(isa, program, inputs).Run(count, out, out_dtype, stats);
}

void AddNodes(Isa isa, const ReduceInput& a, const ReduceInput& b, size_t count, float* out) {
  SHARDD_FOR_ISA(isa, AddElements)(a, b, count, out);
}

size_t FindNonFinite(const void* data, DType dtype, size_t count, bool* is_nan) {
  *is_nan = false;
  switch (dtype) {
    case DType::kFloat32:
      return FindNonFiniteBits<uint32_t>(data, count, 0x7F800000, 0x7FFFFFFF, is_nan);
    case DType::kBFloat16:
      return FindNonFiniteBits<uint16_t>(data, count, 0x7F80, 0x7FFF, is_nan);
    case DType::kFloat16:
      return FindNonFiniteBits<uint16_t>(data, count, 0x7C00, 0x7FFF, is_nan);
  }
  return count;
}

}  // namespace shardd::kernels

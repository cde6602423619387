#include <algorithm>
#include <bit>

#include "kernels/reduce.h"

namespace shardd::kernels {
namespace {

// The tree rule: a range of n splits after the largest power of two below n.
uint32_t SplitPoint(uint32_t lo, uint32_t hi) { return lo + std::bit_floor(hi - lo - 1); }

class ProgramBuilder {
 public:
  ProgramBuilder(std::span<const SlotRange> nodes, ReduceProgram* program)
      : nodes_(nodes), program_(program) {}

  // Emits node(lo, hi), whose operands begin at stack depth `depth`. The recursion
  // is as deep as the tree: at most 33 levels.
  bool Emit(uint32_t lo, uint32_t hi, size_t depth) {
    if (next_ == nodes_.size() || nodes_[next_].lo != lo) return false;
    if (nodes_[next_].hi == hi) {
      ++next_;
      program_->push.push_back(true);
      program_->max_depth = std::max(program_->max_depth, depth + 1);
      return true;
    }
    if (nodes_[next_].hi > hi || hi - lo < 2) return false;
    const uint32_t middle = SplitPoint(lo, hi);
    if (!Emit(lo, middle, depth) || !Emit(middle, hi, depth + 1)) return false;
    program_->push.push_back(false);
    return true;
  }

  bool complete() const { return next_ == nodes_.size(); }

 private:
  std::span<const SlotRange> nodes_;
  ReduceProgram* program_;
  size_t next_ = 0;
};

double FoldRange(const double* leaves, size_t count) {
  if (count == 1) return leaves[0];
  const size_t left = std::bit_floor(count - 1);
  return FoldRange(leaves, left) + FoldRange(leaves + left, count - left);
}

}  // namespace

bool SlotTreeProgram(uint32_t slots, std::span<const SlotRange> nodes, ReduceProgram* program) {
  *program = ReduceProgram();
  if (slots == 0) return false;
  ProgramBuilder builder(nodes, program);
  return builder.Emit(0, slots, 0) && builder.complete();
}

double FoldTree(std::span<const double> leaves) {
  return leaves.empty() ? 0.0 : FoldRange(leaves.data(), leaves.size());
}

}  // namespace shardd::kernels

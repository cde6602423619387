// The slot tree: gradients of logical data-parallel ranks added in an order that
// depends on the number of slots alone (docs/numerics.md), fused with the finite
// check and the sums of squares.
#ifndef SHARDD_KERNELS_REDUCE_H_
#define SHARDD_KERNELS_REDUCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/isa.h"

namespace shardd::kernels {

// Elements per block: the unit of norms.
inline constexpr size_t kBlockElements = 4096;

// What a pass found in one block of the sum.
struct BlockStats {
  double sum_squares = 0;  // in the order of docs/numerics.md; Inf or NaN when not finite
  uint32_t nonfinite = 0;  // 1: some element is Inf or NaN
};

// How to fold a list of inputs: postfix, each op either "push the next input" or
// "pop two, push their sum". Built from the tree nodes present; see SlotTreeProgram.
struct ReduceProgram {
  // true: push the next input; false: add the two topmost (left + right).
  std::vector<bool> push;
  size_t max_depth = 0;
};

// One partial sum: `data` holds `dtype` elements. A leaf is in the gradient
// dtype, a pre-added node in fp32.
struct ReduceInput {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// A node of the slot tree: slots lo .. hi-1.
struct SlotRange {
  uint32_t lo = 0;
  uint32_t hi = 0;
  bool operator==(const SlotRange&) const = default;
};

// Builds the program that folds `nodes` (ascending, disjoint, together covering
// 0..slots-1, each a node of the tree) to the root. Returns false when they do
// not do so.
bool SlotTreeProgram(uint32_t slots, std::span<const SlotRange> nodes, ReduceProgram* program);

// Folds `inputs` (one per push) over `count` elements into out[count] of
// out_dtype (fp32, or the leaf dtype when there is one input, which is then a
// flushed copy). Each input element is loaded exactly once, so a writer who
// changes it meanwhile cannot make sum, check and norm disagree. out may not
// overlap an input. With stats, element 0 starts a block and
// stats[(count + 4095) / 4096] is written. Thread-safe on disjoint outputs.
void Reduce(Isa isa, const ReduceProgram& program, std::span<const ReduceInput> inputs,
            size_t count, void* out, DType out_dtype, BlockStats* stats);

// Reduce in two parts. The constructor allocates all that Run needs; Run allocates
// nothing and holds nothing, so that it may be left by longjmp when an input can no
// longer be read. One thread at a time. The inputs' data must outlive it.
class Reducer {
 public:
  Reducer(Isa isa, const ReduceProgram& program, std::span<const ReduceInput> inputs);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // As Reduce. May be called again, after one that was left half-way too.
  void Run(size_t count, void* out, DType out_dtype, BlockStats* stats);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// out[i] = a[i] + b[i] in fp32, flushed: one addition of the tree, for a worker
// that adds its own slots before publishing. out may be a or b when those are fp32.
void AddNodes(Isa isa, const ReduceInput& a, const ReduceInput& b, size_t count, float* out);

// The sum of `leaves` by the slot-tree rule over their number, in double.
double FoldTree(std::span<const double> leaves);

// Index of the first Inf or NaN, or count. *is_nan says which.
size_t FindNonFinite(const void* data, DType dtype, size_t count, bool* is_nan);

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_REDUCE_H_

// Element-wise optimizers: one formula each, the same bits on every ISA.
//
// The caller (server/step) walks a chunk in runs of elements that belong to one
// parameter, in ascending order, and calls Optimizer::Update for each run. With
// an UndoLog the update can be interrupted by SIGKILL at any instruction and
// mended: see undo.h.
#ifndef SHARDD_KERNELS_OPTIMIZER_H_
#define SHARDD_KERNELS_OPTIMIZER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/undo.h"

namespace shardd::kernels {

// Hyper-parameters of one parameter group. Which of them an optimizer reads is
// said with the optimizer.
struct Hyperparameters {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

// A parameter's running products of betas, kept by the job in double and
// advanced once per applied step of that parameter. Both start at 1.
struct BetaProducts {
  double beta1 = 1.0;
  double beta2 = 1.0;
};

// The per-step scalars of one parameter: computed once by the decider in double,
// rounded to float, recorded as bits with the decision, never recomputed on
// redo. Their meaning is the optimizer's own.
using StepScalars = std::array<float, 8>;

// One run of elements of one parameter within one chunk.
struct UpdateRun {
  float* master = nullptr;           // [count] read and written
  std::array<float*, 2> state = {};  // [count] each; those the optimizer has
  const void* grad = nullptr;        // [count] of grad_dtype, the tree sum, unscaled yet
  void* weight = nullptr;            // [count] of weight_dtype, written only
  size_t count = 0;                  // any; master etc. need 128-byte alignment only for speed
  DType grad_dtype = DType::kFloat32;
  DType weight_dtype = DType::kFloat32;
  float grad_factor = 1.0f;  // unscale and clip; multiplies the fp32 gradient
  const StepScalars* scalars = nullptr;
  UndoLog* undo = nullptr;          // null: not logged
  uint32_t undo_epoch = 0;          // low 32 bits of the `applied` this update leads to
  uint32_t position = 0;            // of element 0 of this run within its chunk
  bool nontemporal_weights = true;  // caller issues StoreFence() before publishing
};

// An optimizer. Instances are immutable, live for ever and are thread-safe.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string_view name() const = 0;
  // How many fp32 state tensors (moments) it keeps per element: 0, 1 or 2.
  virtual int num_states() const = 0;
  // Their names in files, as PyTorch has them ("exp_avg", "exp_avg_sq").
  virtual std::vector<std::string_view> state_names() const = 0;
  // Advances `products` by one applied step and returns that step's scalars.
  virtual StepScalars Step(const Hyperparameters& hyper, BetaProducts* products) const = 0;
  // Updates one run on the given ISA. All pointers are valid for `count`
  // elements and do not overlap. Stores are in the order undo.h demands.
  virtual void Update(Isa isa, const UpdateRun& run) const = 0;
};

// By name ("adamw"); null when there is none of that name.
const Optimizer* FindOptimizer(std::string_view name);
// All names, sorted, for messages.
std::vector<std::string_view> OptimizerNames();

// Makes the calling thread's non-temporal stores visible before its later ones.
void StoreFence();

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_OPTIMIZER_H_

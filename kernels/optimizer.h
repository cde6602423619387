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
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;
  double lr_decay = 0.0;
  double min_trust = 0.0;  // 0: 0.01
  double max_trust = 0.0;  // 0: 10
};

// A parameter's progress, kept by the job and advanced once per applied step of that parameter.
struct StepProgress {
  // Running products of the betas, in double.
  double beta1_product = 1.0;
  double beta2_product = 1.0;
  uint64_t steps = 0;  // applied
};

// The per-step scalars of one parameter: computed once by the decider in double,
// rounded to float, recorded as bits with the decision, never recomputed on
// redo. Their meaning is the optimizer's own.
using StepScalars = std::array<float, 8>;

// One run of elements of one parameter within one chunk.
struct UpdateRun {
  float* master = nullptr;                    // [count] read and written
  std::array<float*, kMaxStates> state = {};  // [count] each; those it has
  const void* grad = nullptr;                 // [count] of grad_dtype, the tree sum, unscaled yet
  void* weight = nullptr;                     // [count] of weight_dtype, written only
  size_t count = 0;  // any; master etc. need 128-byte alignment only for speed
  DType grad_dtype = DType::kFloat32;
  DType weight_dtype = DType::kFloat32;
  float grad_factor = 1.0f;  // unscale and clip; multiplies the fp32 gradient
  const StepScalars* scalars = nullptr;
  UndoLog* undo = nullptr;          // null: not logged
  uint32_t undo_epoch = 0;          // low 32 bits of the `applied` this update leads to
  uint32_t position = 0;            // of element 0 of this run within its chunk
  uint64_t element = 0;             // of element 0 in the flat space; for stochastic rounding
  uint64_t steps = 0;               // of the parameter, this one included; for the same
  bool nontemporal_weights = true;  // caller issues StoreFence() before publishing
};

// An optimizer. Instances are immutable, live for ever and are thread-safe.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string_view name() const = 0;
  // The names in files, as PyTorch has them ("exp_avg", "exp_avg_sq"), of the state arrays that it
  // keeps per element, each a fp32 that begins as 0: at most kMaxStates.
  virtual std::vector<std::string_view> state_names() const = 0;
  int num_states() const { return static_cast<int>(state_names().size()); }
  // Whether a state of 0 makes eps a divisor, so that it must not be 0 in fp32.
  virtual bool divides_by_eps() const { return false; }
  // Advances `progress` by one applied step and returns that step's scalars.
  virtual StepScalars Step(const Hyperparameters& hyper, StepProgress* progress) const = 0;
  // Updates one run on the given ISA. All pointers are valid for `count`
  // elements and do not overlap. Stores are in the order undo.h demands.
  virtual void Update(Isa isa, const UpdateRun& run) const = 0;

  // An optimizer with trust ratios scales the step of each parameter by a function of two norms,
  // which must be known before any element of it is updated.
  virtual bool has_trust_ratio() const { return false; }
  // Leaves the direction of the step in the master's place. On copies: the state is advanced too.
  virtual void Direction(Isa, const UpdateRun&) const {}
  // Completes a parameter's scalars, which came of Step; returns the ratio.
  virtual double SetTrust(const Hyperparameters&, double /*parameter_norm*/,
                          double /*direction_norm*/, StepScalars*) const {
    return 1;
  }
};

// By name ("adamw"); null when there is none of that name.
const Optimizer* FindOptimizer(std::string_view name);
// Adds one that lives for ever; false when there is one of its name. Before other threads may look.
bool AddOptimizer(const Optimizer* optimizer);
// All names, sorted, for messages.
std::vector<std::string_view> OptimizerNames();

// Makes the calling thread's non-temporal stores visible before its later ones.
void StoreFence();

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_OPTIMIZER_H_

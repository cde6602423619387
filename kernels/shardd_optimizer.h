// An optimizer of your own, without changing shardd: the one header that it needs.
//
// Write the element-wise formula as a struct, and name it in SHARDD_DEFINE_OPTIMIZER:
//
//   #include "shardd_optimizer.h"
//   struct SignDescent {
//     static constexpr const char* kName = "sign_descent";      // of the job's configuration
//     static constexpr const char* kStateNames[] = {"exp_avg"};  // at most 3, of checkpoints
//     // Once a step and parameter: up to 8 floats that Element reads. step = 1, 2, ...
//     static void Step(const shardd_hyperparameters& hyper, uint64_t step, float* scalars) {
//       scalars[0] = hyper.beta1;
//       scalars[1] = hyper.lr;
//     }
//     // Once an element: the gradient (clipped and unscaled), the fp32 master weight, its states.
//     static void Element(const float* s, float grad, float& master, float* state) {
//       state[0] = s[0] * state[0] + (1 - s[0]) * grad;
//       master -= state[0] > 0 ? s[1] : state[0] < 0 ? -s[1] : 0;
//     }
//   };
//   SHARDD_DEFINE_OPTIMIZER(SignDescent)
//
//   g++ -std=c++20 -O3 -march=x86-64-v3 -shared -fPIC sign_descent.cc -o sign_descent.so
//   shardctl optimizer check sign_descent.so
//   shardd --optimizer_libraries=/path/to/sign_descent.so
//
// A job then has `"optimizer": "sign_descent"`. All else is shardd's: reduction, clipping, working
// weights in any dtype, undo and redo, checkpoints. States begin as 0.
//
// What a formula must be, so that a step can be cut, repeated and redone with the same bits:
//   - a function of its arguments alone: no memory of its own, no random numbers, no I/O;
//   - element-wise: the result for an element does not depend on its neighbours, on its place in
//     the array, or on how many there are. (Compiled by one compiler with one set of flags it is.)
//   - finite where gradient, weight and states are: a state of 0 must not be a divisor.
// `shardctl optimizer check` and the daemon, when it loads the object, try all of that, and refuse
// it otherwise. Values below 2^-125 are stored as 0 and every NaN as 0x7FC00000, as for shardd's
// own; update runs with subnormals flushed. Several threads call it at the same time.
#ifndef SHARDD_OPTIMIZER_H_
#define SHARDD_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>

// Changes whenever a structure below does. A daemon loads objects of its own version only.
#define SHARDD_OPTIMIZER_ABI_VERSION 1
#define SHARDD_OPTIMIZER_MAX_STATES 3
#define SHARDD_OPTIMIZER_SCALARS 8

extern "C" {

// Of the parameter's group, in this step.
struct shardd_hyperparameters {
  double lr, beta1, beta2, eps, weight_decay;
  double momentum, dampening, nesterov /* 0 or 1 */, lr_decay;
};

struct shardd_optimizer_description {
  uint32_t abi_version;   // SHARDD_OPTIMIZER_ABI_VERSION
  uint32_t struct_bytes;  // sizeof(shardd_optimizer_description)
  const char* name;       // 1 to 32 of [a-z0-9_], none of shardd's own
  uint32_t num_states;
  uint32_t reserved;
  const char* state_names[SHARDD_OPTIMIZER_MAX_STATES];  // 1 to 32 of [a-z0-9_], all different
  // scalars[8] are 0 when it is called.
  void (*step)(const shardd_hyperparameters* hyper, uint64_t step, float* scalars);
  // `count` elements; arrays do not overlap. states[i] is null from num_states on.
  void (*update)(const float* scalars, size_t count, const float* grad, float* master,
                 float* const* states);
};

// The symbol that shardd looks up; lives for ever.
__attribute__((visibility("default"))) const shardd_optimizer_description* shardd_optimizer(void);

}  // extern "C"

namespace shardd_optimizer_detail {

template <class Formula>
constexpr uint32_t kStates = sizeof(Formula::kStateNames) / sizeof(Formula::kStateNames[0]);

template <class Formula>
void Step(const shardd_hyperparameters* hyper, uint64_t step, float* scalars) {
  Formula::Step(*hyper, step, scalars);
}

template <class Formula>
void Update(const float* scalars, size_t count, const float* __restrict grad,
            float* __restrict master, float* const* states) {
  constexpr uint32_t kCount = kStates<Formula>;
  float* __restrict a = states[0];
  float* __restrict b = states[1];
  float* __restrict c = states[2];
  float s[SHARDD_OPTIMIZER_SCALARS];
  for (int i = 0; i < SHARDD_OPTIMIZER_SCALARS; ++i) s[i] = scalars[i];
  for (size_t i = 0; i < count; ++i) {
    float state[SHARDD_OPTIMIZER_MAX_STATES] = {};
    if (kCount > 0) state[0] = a[i];
    if (kCount > 1) state[1] = b[i];
    if (kCount > 2) state[2] = c[i];
    float weight = master[i];
    Formula::Element(s, grad[i], weight, state);
    master[i] = weight;
    if (kCount > 0) a[i] = state[0];
    if (kCount > 1) b[i] = state[1];
    if (kCount > 2) c[i] = state[2];
  }
}

template <class Formula>
const shardd_optimizer_description* Describe() {
  static_assert(kStates<Formula> <= SHARDD_OPTIMIZER_MAX_STATES, "at most 3 states");
  static const shardd_optimizer_description description = [] {
    shardd_optimizer_description d = {};
    d.abi_version = SHARDD_OPTIMIZER_ABI_VERSION;
    d.struct_bytes = sizeof(d);
    d.name = Formula::kName;
    d.num_states = kStates<Formula>;
    for (uint32_t i = 0; i < d.num_states; ++i) d.state_names[i] = Formula::kStateNames[i];
    d.step = Step<Formula>;
    d.update = Update<Formula>;
    return d;
  }();
  return &description;
}

}  // namespace shardd_optimizer_detail

#define SHARDD_DEFINE_OPTIMIZER(Formula)                              \
  extern "C" const shardd_optimizer_description* shardd_optimizer() { \
    return shardd_optimizer_detail::Describe<Formula>();              \
  }

#endif  // SHARDD_OPTIMIZER_H_

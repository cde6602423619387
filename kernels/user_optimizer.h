// Optimizers that users bring as shared objects (shardd_optimizer.h).
#ifndef SHARDD_KERNELS_USER_OPTIMIZER_H_
#define SHARDD_KERNELS_USER_OPTIMIZER_H_

#include <memory>
#include <string>

#include "kernels/optimizer.h"
#include "kernels/shardd_optimizer.h"

namespace shardd::kernels {

struct LoadedOptimizer {
  const Optimizer* optimizer = nullptr;  // lives for ever, as its shared object does
  std::string problem;                   // why there is none
};

// Checks and loads a shared object; it stays loaded. First a child process does it and runs the
// formula, so that one that crashes or hangs (for 20 seconds) is refused too: call it before other
// threads are started. Does not add it to the registry (AddOptimizer).
LoadedOptimizer LoadUserOptimizer(const std::string& path);

// What is wrong with a description and the formula behind it, or "". Runs the formula here.
std::string CheckUserOptimizer(const shardd_optimizer_description& description);

// The optimizer of a description that CheckUserOptimizer has passed. `description` outlives it.
std::unique_ptr<Optimizer> MakeUserOptimizer(const shardd_optimizer_description& description);

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_USER_OPTIMIZER_H_

#include "kernels/optimizer.h"

#include <algorithm>

#include "kernels/optimizers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <atomic>
#endif

namespace shardd::kernels {
namespace {

// A new optimizer is added here; the conformance suite takes its list from
// OptimizerNames().
std::vector<const Optimizer*>& AllOptimizers() {
  static std::vector<const Optimizer*>* const all = new std::vector<const Optimizer*>{
      AdamW(), AdamWAmsgrad(), Adam(), AdamAmsgrad(), Sgd(), Adagrad(), RmsProp(), Lion(), Lamb()};
  return *all;
}

}  // namespace

const Optimizer* FindOptimizer(std::string_view name) {
  for (const Optimizer* optimizer : AllOptimizers()) {
    if (optimizer->name() == name) return optimizer;
  }
  return nullptr;
}

bool AddOptimizer(const Optimizer* optimizer) {
  if (FindOptimizer(optimizer->name()) != nullptr) return false;
  AllOptimizers().push_back(optimizer);
  return true;
}

std::vector<std::string_view> OptimizerNames() {
  std::vector<std::string_view> names;
  for (const Optimizer* optimizer : AllOptimizers()) names.push_back(optimizer->name());
  std::sort(names.begin(), names.end());
  return names;
}

void StoreFence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace shardd::kernels

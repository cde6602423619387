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
std::array<const Optimizer*, 1> AllOptimizers() { return {AdamW()}; }

}  // namespace

const Optimizer* FindOptimizer(std::string_view name) {
  for (const Optimizer* optimizer : AllOptimizers()) {
    if (optimizer->name() == name) return optimizer;
  }
  return nullptr;
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

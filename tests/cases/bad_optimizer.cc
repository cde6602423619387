// Optimizer objects that must be refused; which one is said at compile time.
#include <csignal>

#include "kernels/shardd_optimizer.h"

#ifdef NO_SYMBOL
extern "C" __attribute__((visibility("default"))) int another_symbol() { return 0; }
#else
namespace {

struct Bad {
#ifdef TAKEN_NAME
  static constexpr const char* kName = "adamw";
#else
  static constexpr const char* kName = "bad";
#endif
  static constexpr const char* kStateNames[] = {"exp_avg"};
  static void Step(const shardd_hyperparameters& hyper, uint64_t, float* s) {
    s[0] = static_cast<float>(hyper.lr);
  }
  static void Element(const float* s, float grad, float& master, float* state) {
#ifdef CRASHES
    std::raise(SIGSEGV);
#endif
    state[0] = grad;
    master -= s[0] * grad;
  }
};

#ifdef NOT_ELEMENTWISE
void Mean(const float* s, size_t count, const float* grad, float* master, float* const*) {
  float sum = 0;
  for (size_t i = 0; i < count; ++i) sum += grad[i];
  for (size_t i = 0; i < count; ++i) master[i] -= s[0] * sum / static_cast<float>(count);
}
#endif

}  // namespace

extern "C" const shardd_optimizer_description* shardd_optimizer() {
  static shardd_optimizer_description description = *shardd_optimizer_detail::Describe<Bad>();
#ifdef WRONG_ABI
  description.abi_version = 99;
#endif
#ifdef NOT_ELEMENTWISE
  description.update = Mean;
#endif
  return &description;
}
#endif

// AdaBelief (Zhuang et al., 2020) as an optimizer object for shardd: Adam whose second moment is
// that of the gradient's distance from its own average, with decoupled weight decay.
//
//   m = beta1 m + (1 - beta1) g            m_hat = m / (1 - beta1^t)
//   s = beta2 s + (1 - beta2) (g - m)^2 + eps      s_hat = s / (1 - beta2^t)
//   p = p - lr (m_hat / (sqrt(s_hat) + eps) + weight_decay p)
#include <cmath>

#include "kernels/shardd_optimizer.h"  // installed as <shardd/shardd_optimizer.h>

namespace {

struct AdaBelief {
  static constexpr const char* kName = "adabelief";
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_var"};

  static void Step(const shardd_hyperparameters& hyper, uint64_t step, float* s) {
    const double correction1 = 1 - std::pow(hyper.beta1, static_cast<double>(step));
    const double correction2 = 1 - std::pow(hyper.beta2, static_cast<double>(step));
    s[0] = static_cast<float>(hyper.beta1);
    s[1] = static_cast<float>(1 - hyper.beta1);
    s[2] = static_cast<float>(hyper.beta2);
    s[3] = static_cast<float>(1 - hyper.beta2);
    s[4] = static_cast<float>(hyper.eps);
    s[5] = static_cast<float>(hyper.lr / correction1);
    s[6] = static_cast<float>(1 / std::sqrt(correction2));
    s[7] = static_cast<float>(hyper.lr * hyper.weight_decay);
  }

  static void Element(const float* s, float grad, float& master, float* state) {
    state[0] = s[0] * state[0] + s[1] * grad;
    const float distance = grad - state[0];
    state[1] = s[2] * state[1] + s[3] * distance * distance + s[4];
    const float denominator = std::sqrt(state[1]) * s[6] + s[4];
    master -= s[5] * state[0] / denominator + s[7] * master;
  }
};

}  // namespace

SHARDD_DEFINE_OPTIMIZER(AdaBelief)

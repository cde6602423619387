#include <cmath>

#include "kernels/optimizers.h"
#include "kernels/targets.h"

namespace shardd::kernels {
namespace {

class AdamWOptimizer final : public Optimizer {
 public:
  std::string_view name() const override { return "adamw"; }
  int num_states() const override { return 2; }
  std::vector<std::string_view> state_names() const override { return {"exp_avg", "exp_avg_sq"}; }

  StepScalars Step(const Hyperparameters& hyper, BetaProducts* products) const override {
    products->beta1 *= hyper.beta1;
    products->beta2 *= hyper.beta2;
    return {static_cast<float>(hyper.beta1),
            static_cast<float>(1.0 - hyper.beta1),
            static_cast<float>(hyper.beta2),
            static_cast<float>(1.0 - hyper.beta2),
            static_cast<float>(1.0 / std::sqrt(1.0 - products->beta2)),
            static_cast<float>(hyper.eps),
            static_cast<float>(hyper.lr / (1.0 - products->beta1)),
            static_cast<float>(hyper.lr * hyper.weight_decay)};
  }

  void Update(Isa isa, const UpdateRun& run) const override {
    SHARDD_FOR_ISA(isa, UpdateAdamW)(run);
  }
};

}  // namespace

const Optimizer* AdamW() {
  static const AdamWOptimizer* const optimizer = new AdamWOptimizer;
  return optimizer;
}

}  // namespace shardd::kernels

// The Adam family: the scalars of a step, and which formula of adam-inl.h each one is.
#include <algorithm>
#include <cmath>

#include "kernels/optimizers.h"
#include "kernels/targets.h"

namespace shardd::kernels {
namespace {

// Advances the products and fills in what the family has in common (AdamMoments).
StepScalars AdamScalars(const Hyperparameters& hyper, StepProgress* progress) {
  ++progress->steps;
  progress->beta1_product *= hyper.beta1;
  progress->beta2_product *= hyper.beta2;
  return {static_cast<float>(hyper.beta1),
          static_cast<float>(1.0 - hyper.beta1),
          static_cast<float>(hyper.beta2),
          static_cast<float>(1.0 - hyper.beta2),
          static_cast<float>(1.0 / std::sqrt(1.0 - progress->beta2_product)),
          static_cast<float>(hyper.eps),
          0,
          0};
}

class AdamFamily : public Optimizer {
 public:
  AdamFamily(std::string_view name, bool amsgrad) : name_(name), amsgrad_(amsgrad) {}
  std::string_view name() const override { return name_; }
  std::vector<std::string_view> state_names() const override {
    if (amsgrad_) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq"};
  }
  bool divides_by_eps() const override { return true; }

 protected:
  const std::string_view name_;
  const bool amsgrad_;
};

class AdamWOptimizer final : public AdamFamily {
 public:
  using AdamFamily::AdamFamily;
  StepScalars Step(const Hyperparameters& hyper, StepProgress* progress) const override {
    StepScalars scalars = AdamScalars(hyper, progress);
    scalars[6] = static_cast<float>(hyper.lr / (1.0 - progress->beta1_product));
    scalars[7] = static_cast<float>(hyper.lr * hyper.weight_decay);
    return scalars;
  }
  void Update(Isa isa, const UpdateRun& run) const override {
    amsgrad_ ? SHARDD_FOR_ISA(isa, UpdateAdamWAmsgrad)(run) : SHARDD_FOR_ISA(isa, UpdateAdamW)(run);
  }
};

class AdamOptimizer final : public AdamFamily {
 public:
  using AdamFamily::AdamFamily;
  StepScalars Step(const Hyperparameters& hyper, StepProgress* progress) const override {
    StepScalars scalars = AdamScalars(hyper, progress);
    scalars[6] = static_cast<float>(-hyper.lr / (1.0 - progress->beta1_product));
    scalars[7] = static_cast<float>(hyper.weight_decay);
    return scalars;
  }
  void Update(Isa isa, const UpdateRun& run) const override {
    amsgrad_ ? SHARDD_FOR_ISA(isa, UpdateAdamAmsgrad)(run) : SHARDD_FOR_ISA(isa, UpdateAdam)(run);
  }
};

class LambOptimizer final : public AdamFamily {
 public:
  LambOptimizer() : AdamFamily("lamb", false) {}
  StepScalars Step(const Hyperparameters& hyper, StepProgress* progress) const override {
    StepScalars scalars = AdamScalars(hyper, progress);
    scalars[1] = static_cast<float>(-hyper.lr);
    scalars[6] = static_cast<float>(1.0 / (1.0 - progress->beta1_product));
    scalars[7] = static_cast<float>(hyper.weight_decay);
    return scalars;
  }
  void Update(Isa isa, const UpdateRun& run) const override {
    SHARDD_FOR_ISA(isa, UpdateLamb)(run);
  }

  bool has_trust_ratio() const override { return true; }
  void Direction(Isa isa, const UpdateRun& run) const override {
    SHARDD_FOR_ISA(isa, UpdateLambDirection)(run);
  }
  double SetTrust(const Hyperparameters& hyper, double parameter_norm, double direction_norm,
                  StepScalars* scalars) const override {
    double trust = 1;
    if (parameter_norm > 0 && direction_norm > 0) {
      const double least = hyper.min_trust > 0 ? hyper.min_trust : 0.01;
      const double most = hyper.max_trust > 0 ? hyper.max_trust : 10;
      trust = std::clamp(parameter_norm / direction_norm, std::min(least, most), most);
    }
    (*scalars)[1] = static_cast<float>(-hyper.lr * trust);
    return trust;
  }
};

}  // namespace

const Optimizer* AdamW() {
  static const Optimizer* const optimizer = new AdamWOptimizer("adamw", false);
  return optimizer;
}
const Optimizer* AdamWAmsgrad() {
  static const Optimizer* const optimizer = new AdamWOptimizer("adamw_amsgrad", true);
  return optimizer;
}
const Optimizer* Adam() {
  static const Optimizer* const optimizer = new AdamOptimizer("adam", false);
  return optimizer;
}
const Optimizer* AdamAmsgrad() {
  static const Optimizer* const optimizer = new AdamOptimizer("adam_amsgrad", true);
  return optimizer;
}
const Optimizer* Lamb() {
  static const Optimizer* const optimizer = new LambOptimizer;
  return optimizer;
}

}  // namespace shardd::kernels

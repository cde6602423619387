// SGD, Adagrad, RMSprop and Lion: the scalars of a step (gradient_descent-inl.h).
#include "kernels/optimizers.h"
#include "kernels/targets.h"

namespace shardd::kernels {
namespace {

class SgdOptimizer final : public Optimizer {
 public:
  std::string_view name() const override { return "sgd"; }
  std::vector<std::string_view> state_names() const override { return {"momentum_buffer"}; }
  StepScalars Step(const Hyperparameters& hyper, StepProgress* progress) const override {
    const bool first = progress->steps++ == 0;
    return {static_cast<float>(hyper.weight_decay),
            static_cast<float>(hyper.momentum),
            first ? 1.0f : static_cast<float>(1.0 - hyper.dampening),
            hyper.nesterov ? 1.0f : 0.0f,
            hyper.nesterov ? static_cast<float>(hyper.momentum) : 1.0f,
            static_cast<float>(-hyper.lr),
            0,
            0};
  }
  void Update(Isa isa, const UpdateRun& run) const override { SHARDD_FOR_ISA(isa, UpdateSgd)(run); }
};

class AdagradOptimizer final : public Optimizer {
 public:
  std::string_view name() const override { return "adagrad"; }
  std::vector<std::string_view> state_names() const override { return {"sum"}; }
  bool divides_by_eps() const override { return true; }
  StepScalars Step(const Hyperparameters& hyper, StepProgress* progress) const override {
    const double lr = hyper.lr / (1.0 + static_cast<double>(progress->steps++) * hyper.lr_decay);
    return {static_cast<float>(hyper.weight_decay), static_cast<float>(hyper.eps),
            static_cast<float>(-lr)};
  }
  void Update(Isa isa, const UpdateRun& run) const override {
    SHARDD_FOR_ISA(isa, UpdateAdagrad)(run);
  }
};

class RmsPropOptimizer final : public Optimizer {
 public:
  std::string_view name() const override { return "rmsprop"; }
  std::vector<std::string_view> state_names() const override {
    return {"square_avg", "momentum_buffer"};
  }
  bool divides_by_eps() const override { return true; }
  StepScalars Step(const Hyperparameters& hyper, StepProgress* progress) const override {
    ++progress->steps;
    return {static_cast<float>(hyper.weight_decay), static_cast<float>(hyper.beta2),
            static_cast<float>(1.0 - hyper.beta2),  static_cast<float>(hyper.eps),
            static_cast<float>(hyper.momentum),     static_cast<float>(-hyper.lr)};
  }
  void Update(Isa isa, const UpdateRun& run) const override {
    SHARDD_FOR_ISA(isa, UpdateRmsProp)(run);
  }
};

class LionOptimizer final : public Optimizer {
 public:
  std::string_view name() const override { return "lion"; }
  std::vector<std::string_view> state_names() const override { return {"exp_avg"}; }
  StepScalars Step(const Hyperparameters& hyper, StepProgress* progress) const override {
    ++progress->steps;
    return {static_cast<float>(hyper.beta1), static_cast<float>(1.0 - hyper.beta1),
            static_cast<float>(hyper.beta2), static_cast<float>(1.0 - hyper.beta2),
            static_cast<float>(hyper.lr),    static_cast<float>(hyper.lr * hyper.weight_decay)};
  }
  void Update(Isa isa, const UpdateRun& run) const override {
    SHARDD_FOR_ISA(isa, UpdateLion)(run);
  }
};

}  // namespace

const Optimizer* Sgd() {
  static const Optimizer* const optimizer = new SgdOptimizer;
  return optimizer;
}
const Optimizer* Adagrad() {
  static const Optimizer* const optimizer = new AdagradOptimizer;
  return optimizer;
}
const Optimizer* RmsProp() {
  static const Optimizer* const optimizer = new RmsPropOptimizer;
  return optimizer;
}
const Optimizer* Lion() {
  static const Optimizer* const optimizer = new LionOptimizer;
  return optimizer;
}

}  // namespace shardd::kernels

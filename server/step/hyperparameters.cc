#include "server/step/hyperparameters.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace shardd::step {

namespace {

absl::Status CheckField(const std::string& path, const char* field, double value, bool ok,
                        const char* rule) {
  if (ok) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, ".", field, " is ", value, "; it must be ", rule));
}

}  // namespace

absl::Status CheckHyperparameters(const v1::Hyperparameters& h, const kernels::Optimizer& optimizer,
                                  const std::string& path) {
  const auto non_negative = [](double x) { return std::isfinite(x) && x >= 0; };
  const auto beta = [](double x) { return x >= 0 && x < 1; };
  absl::Status status = CheckField(path, "lr", h.lr(), non_negative(h.lr()), "finite and >= 0");
  status.Update(CheckField(path, "beta1", h.beta1(), beta(h.beta1()), "in [0, 1)"));
  status.Update(CheckField(path, "beta2", h.beta2(), beta(h.beta2()), "in [0, 1)"));
  // The kernels add it in fp32 and flush subnormals: a smaller one is 0 there, and 0 / 0 makes a
  // NaN of every element that never had a gradient.
  constexpr double kLeast = std::numeric_limits<float>::min();
  const bool divides = optimizer.divides_by_eps();
  status.Update(CheckField(path, "eps", h.eps(),
                           non_negative(h.eps()) && (!divides || h.eps() >= kLeast),
                           divides ? "finite and at least 1.18e-38" : "finite and >= 0"));
  status.Update(CheckField(path, "weight_decay", h.weight_decay(), non_negative(h.weight_decay()),
                           "finite and >= 0"));
  status.Update(CheckField(path, "momentum", h.momentum(), beta(h.momentum()), "in [0, 1)"));
  status.Update(CheckField(path, "dampening", h.dampening(),
                           h.dampening() >= 0 && h.dampening() <= 1, "in [0, 1]"));
  status.Update(
      CheckField(path, "lr_decay", h.lr_decay(), non_negative(h.lr_decay()), "finite and >= 0"));
  status.Update(
      CheckField(path, "min_trust", h.min_trust(), non_negative(h.min_trust()), "finite and >= 0"));
  status.Update(CheckField(
      path, "max_trust", h.max_trust(),
      non_negative(h.max_trust()) && (h.max_trust() == 0 || h.max_trust() >= h.min_trust()),
      "0, or finite and at least min_trust"));
  if (status.ok() && h.nesterov() && (h.momentum() == 0 || h.dampening() != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ".nesterov is true; it needs a momentum above 0 and dampening 0, not ",
                     h.momentum(), " and ", h.dampening()));
  }
  return status;
}

kernels::Hyperparameters ToKernel(const v1::Hyperparameters& h) {
  return {.lr = h.lr(),
          .beta1 = h.beta1(),
          .beta2 = h.beta2(),
          .eps = h.eps(),
          .weight_decay = h.weight_decay(),
          .momentum = h.momentum(),
          .dampening = h.dampening(),
          .nesterov = h.nesterov(),
          .lr_decay = h.lr_decay(),
          .min_trust = h.min_trust(),
          .max_trust = h.max_trust()};
}

contract::DecisionGroup ToRecord(const v1::Hyperparameters& h) {
  return {h.lr(), h.beta1(), h.beta2(), h.eps(), h.weight_decay()};
}

}  // namespace shardd::step

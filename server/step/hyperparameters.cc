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

absl::Status CheckHyperparameters(const v1::Hyperparameters& h, const std::string& path) {
  const auto non_negative = [](double x) { return std::isfinite(x) && x >= 0; };
  const auto beta = [](double x) { return x >= 0 && x < 1; };
  absl::Status status = CheckField(path, "lr", h.lr(), non_negative(h.lr()), "finite and >= 0");
  status.Update(CheckField(path, "beta1", h.beta1(), beta(h.beta1()), "in [0, 1)"));
  status.Update(CheckField(path, "beta2", h.beta2(), beta(h.beta2()), "in [0, 1)"));
  // The kernels add it in fp32 and flush subnormals: a smaller one is 0 there, and 0 / 0 makes a
  // NaN of every element that never had a gradient.
  status.Update(CheckField(
      path, "eps", h.eps(),
      non_negative(h.eps()) && h.eps() >= static_cast<double>(std::numeric_limits<float>::min()),
      "finite and at least 1.18e-38"));
  status.Update(CheckField(path, "weight_decay", h.weight_decay(), non_negative(h.weight_decay()),
                           "finite and >= 0"));
  return status;
}

kernels::Hyperparameters ToKernel(const v1::Hyperparameters& h) {
  return {h.lr(), h.beta1(), h.beta2(), h.eps(), h.weight_decay()};
}

contract::DecisionGroup ToRecord(const v1::Hyperparameters& h) {
  return {h.lr(), h.beta1(), h.beta2(), h.eps(), h.weight_decay()};
}

}  // namespace shardd::step

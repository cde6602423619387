#include "tests/golden/metadata.h"

#include <cmath>
#include <cstdio>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace shardd::golden {

using safetensors::Reader;

absl::Status Malformed(const Reader& reader, std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("golden file ", reader.path(), ": ", std::string(what)));
}

absl::StatusOr<Form> FormOf(const Reader& reader) {
  if (reader.metadata().contains("optimizer")) return Form::kOptimizer;
  if (reader.metadata().contains("model")) return Form::kModel;
  if (reader.Find("params_f64") != nullptr) return Form::kOptimizer;
  if (reader.Find("losses_f64") != nullptr) return Form::kModel;
  return Malformed(reader,
                   "it is of neither form: an optimizer's has param0, grads and params_f64, a "
                   "model's param.*, inputs, labels and losses_f64");
}

absl::StatusOr<double> NumberOf(const Reader& reader, std::string_view key) {
  const auto entry = reader.metadata().find(std::string(key));
  double value = 0;
  if (entry == reader.metadata().end()) {
    return Malformed(reader, "its metadata lacks " + std::string(key));
  }
  if (entry->second == "True" || entry->second == "False") {
    return entry->second == "True" ? 1.0 : 0.0;
  }
  if (!absl::SimpleAtod(entry->second, &value) || std::isnan(value)) {
    return Malformed(reader,
                     absl::StrCat(std::string(key), " is '", entry->second, "', no number"));
  }
  return value;
}

absl::StatusOr<int64_t> CountOf(const Reader& reader, std::string_view key) {
  constexpr double kLargest = 1e9;
  const absl::StatusOr<double> value = NumberOf(reader, key);
  if (!value.ok()) return value.status();
  if (*value < 1 || *value > kLargest || std::floor(*value) != *value) {
    return Malformed(reader, absl::StrCat(std::string(key), " is ", *value,
                                          " where a whole number of at least 1 is due"));
  }
  return static_cast<int64_t>(*value);
}

absl::StatusOr<kernels::Hyperparameters> HyperparametersOf(const Reader& reader,
                                                           std::string_view prefix,
                                                           bool needs_eps) {
  const std::string before(prefix);
  kernels::Hyperparameters hyper;
  struct Entry {
    const char* name;
    double* value;
    bool required;
  };
  double nesterov = 0;
  const bool adam =
      reader.metadata().contains(before + "betas") || reader.metadata().contains(before + "beta1");
  const Entry entries[] = {
      {"lr", &hyper.lr, true},
      {"weight_decay", &hyper.weight_decay, true},
      {"beta1", &hyper.beta1, adam},
      {"beta2", &hyper.beta2, adam},
      {"eps", &hyper.eps, needs_eps},
      {"momentum", &hyper.momentum, false},
      {"dampening", &hyper.dampening, false},
      {"nesterov", &nesterov, false},
      {"lr_decay", &hyper.lr_decay, false},
      {"min_trust", &hyper.min_trust, false},
      {"max_trust", &hyper.max_trust, false},
  };
  const auto betas = reader.metadata().find(before + "betas");
  const bool pair = betas != reader.metadata().end();
  if (pair &&
      std::sscanf(betas->second.c_str(), " %*[([]%lf , %lf", &hyper.beta1, &hyper.beta2) != 2) {
    return Malformed(reader, absl::StrCat("betas is '", betas->second, "', not two numbers"));
  }
  for (const auto& [name, value, required] : entries) {
    if (pair && (value == &hyper.beta1 || value == &hyper.beta2)) continue;
    if (!required && !reader.metadata().contains(before + name)) continue;
    const absl::StatusOr<double> number = NumberOf(reader, before + name);
    if (!number.ok()) return number.status();
    *value = *number;
  }
  hyper.nesterov = nesterov != 0;
  return hyper;
}

}  // namespace shardd::golden

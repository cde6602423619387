// Every optimizer of the registry has a golden file and agrees with it.
#include "tests/golden/optimizer_golden.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/match.h"
#include "kernels/optimizer.h"

namespace shardd::golden {
namespace {

std::string PathOf(std::string_view optimizer) {
  return "tests/golden/optimizer_" + std::string(optimizer) + ".safetensors";
}

TEST(OptimizerGolden, EveryOptimizerOnEveryIsa) {
  for (const std::string_view name : kernels::OptimizerNames()) {
    for (const kernels::Isa isa : kernels::SupportedIsas()) {
      const auto result = CheckOptimizer(PathOf(name), isa);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->optimizer, std::string(name));
      EXPECT_GE(result->steps, 12u);
      EXPECT_GE(result->elements, 257u);
      EXPECT_TRUE(result->passed())
          << name << " on " << IsaName(isa) << ": " << result->worst << " tolerances off at step "
          << result->worst_step << ", element " << result->worst_element;
      std::printf("%s on %s: worst error %.2f of the tolerance\n", result->optimizer.c_str(),
                  IsaName(isa), result->worst);
    }
  }
}

// The file's bytes with `change` applied, as a new file.
template <class Change>
std::string Altered(const char* name, Change change) {
  std::ifstream in(PathOf("adamw"), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  change(&bytes);
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

void Replace(std::string* bytes, const std::string& from, const std::string& to) {
  const size_t at = bytes->find(from);
  ASSERT_NE(at, std::string::npos);
  bytes->replace(at, from.size(), to);
}

TEST(OptimizerGolden, AWrongValueFails) {
  // The last float64: a parameter after the last step.
  const std::string off = Altered("off", [](std::string* bytes) {
    double value;
    std::memcpy(&value, bytes->data() + bytes->size() - 8, 8);
    value += 3e-7 + 5e-7 * std::abs(value);
    std::memcpy(bytes->data() + bytes->size() - 8, &value, 8);
  });
  const auto result = CheckOptimizer(off, kernels::Isa::kScalar);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->passed());
  EXPECT_EQ(result->worst_step, result->steps - 1);
  EXPECT_EQ(result->worst_element, result->elements - 1);

  const std::string nan = Altered("nan", [](std::string* bytes) {
    bytes->replace(bytes->size() - 8, 8, std::string(8, '\xFF'));
  });
  const auto not_a_number = CheckOptimizer(nan, kernels::Isa::kScalar);
  ASSERT_TRUE(not_a_number.ok());
  EXPECT_FALSE(not_a_number->passed());
}

TEST(OptimizerGolden, AnotherHyperparameterFails) {
  const std::string path = Altered("decay", [](std::string* bytes) {
    Replace(bytes, "\"weight_decay\":\"0.01\"", "\"weight_decay\":\"0.02\"");
  });
  const auto result = CheckOptimizer(path, kernels::Isa::kScalar);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->passed());
}

TEST(OptimizerGolden, WhatIsNoGoldenFileIsRefused) {
  EXPECT_EQ(CheckOptimizer("absent", kernels::Isa::kScalar).status().code(),
            absl::StatusCode::kNotFound);
  for (const size_t size : {0, 7, 8, 100, 30'000}) {
    const auto path = Altered("short", [size](std::string* bytes) { bytes->resize(size); });
    EXPECT_EQ(CheckOptimizer(path, kernels::Isa::kScalar).status().code(),
              absl::StatusCode::kDataLoss)
        << size;
  }
  const std::string path =
      Altered("unknown", [](std::string* bytes) { Replace(bytes, "adamw", "adamv"); });
  const absl::Status status = CheckOptimizer(path, kernels::Isa::kScalar).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "adamv")) << status;
}

}  // namespace
}  // namespace shardd::golden

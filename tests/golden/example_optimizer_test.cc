// The example of a user's own optimizer is what it says it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string_view>

#include "kernels/user_optimizer.h"

namespace shardd::kernels {
namespace {

constexpr char kPath[] = "deploy/examples/adabelief.so";

TEST(ExampleOptimizer, IsLoaded) {
  const LoadedOptimizer loaded = LoadUserOptimizer(kPath);
  ASSERT_NE(loaded.optimizer, nullptr) << loaded.problem;
  EXPECT_EQ(loaded.optimizer->name(), "adabelief");
  EXPECT_THAT(loaded.optimizer->state_names(),
              testing::ElementsAre(std::string_view("exp_avg"), std::string_view("exp_avg_var")));
  EXPECT_EQ(FindOptimizer("adabelief"), nullptr);
  EXPECT_TRUE(AddOptimizer(loaded.optimizer));
  EXPECT_EQ(FindOptimizer("adabelief"), loaded.optimizer);
  EXPECT_FALSE(AddOptimizer(loaded.optimizer));
}

// The equations of the example in double, for some steps.
TEST(ExampleOptimizer, IsAdaBelief) {
  const LoadedOptimizer loaded = LoadUserOptimizer(kPath);
  ASSERT_NE(loaded.optimizer, nullptr) << loaded.problem;
  const Hyperparameters hyper{
      .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
  float master = 0.5f, m = 0, v = 0, weight;
  double p = 0.5, dm = 0, dv = 0;
  StepProgress progress;
  for (int t = 1; t <= 20; ++t) {
    const float grad = std::sin(static_cast<float>(t));
    const StepScalars scalars = loaded.optimizer->Step(hyper, &progress);
    UpdateRun run;
    run.master = &master;
    run.state = {&m, &v};
    run.grad = &grad;
    run.weight = &weight;
    run.count = 1;
    run.scalars = &scalars;
    loaded.optimizer->Update(BestIsa(), run);
    dm = 0.9 * dm + 0.1 * grad;
    dv = 0.99 * dv + 0.01 * (grad - dm) * (grad - dm) + 1e-8;
    p -= 0.01 *
         (dm / (1 - std::pow(0.9, t)) / (std::sqrt(dv / (1 - std::pow(0.99, t))) + 1e-8) + 0.1 * p);
    EXPECT_NEAR(master, p, 1e-6) << t;
    EXPECT_EQ(weight, master);
  }
}

}  // namespace
}  // namespace shardd::kernels

#include "kernels/trust_ratio.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/reduce.h"

namespace shardd::kernels {
namespace {

class TrustMeterTest : public testing::TestWithParam<Isa> {
 protected:
  void Fill(size_t count) {
    for (auto* values : {&master_, &m_, &v_, &grad_}) values->resize(count);
    for (size_t i = 0; i < count; ++i) {
      master_[i] = std::sin(static_cast<float>(i));
      m_[i] = 0.1f * std::cos(static_cast<float>(3 * i));
      v_[i] = 0.01f + 0.001f * static_cast<float>(i % 13);
      grad_[i] = 0.5f * std::sin(static_cast<float>(7 * i + 1));
    }
    StepProgress progress;
    scalars_ = lamb_.Step(hyper_, &progress);
  }
  UpdateRun Run(size_t first, size_t count) {
    UpdateRun run;
    run.master = &master_[first];
    run.state = {&m_[first], &v_[first]};
    run.grad = &grad_[first];
    run.count = count;
    run.grad_factor = 0.5f;
    run.scalars = &scalars_;
    return run;
  }
  TrustSums Measure(TrustMeter& meter, Isa isa, const UpdateRun& run) {
    return meter.Measure(lamb_, isa, {}, {run.master, {run.state[0], run.state[1]}}, run);
  }

  const Optimizer& lamb_ = *FindOptimizer("lamb");
  Hyperparameters hyper_{.lr = 0.1, .weight_decay = 0.01};
  StepScalars scalars_;
  std::vector<float> master_, m_, v_, grad_;
};

TEST_P(TrustMeterTest, IsTheSumOfSquaresAndChangesNothing) {
  Fill(kBlockElements);
  const auto master = master_, m = m_, v = v_;
  TrustMeter meter;
  for (const size_t count : {1, 31, 257, 4096}) {
    double of_parameter = 0, of_direction = 0;
    for (size_t i = 0; i < count; ++i) {
      const double g = 0.5 * grad_[i], p = master[i];
      const double moment = (0.9 * m[i] + 0.1 * g) / (1 - 0.9);
      const double second = (0.999 * v[i] + 0.001 * g * g) / (1 - 0.999);
      const double r = moment / (std::sqrt(second) + hyper_.eps) + 0.01 * p;
      of_parameter += p * p;
      of_direction += r * r;
    }
    const TrustSums sums = Measure(meter, GetParam(), Run(0, count));
    EXPECT_NEAR(sums.parameter, of_parameter, 1e-12 * of_parameter);
    EXPECT_NEAR(sums.direction, of_direction, 1e-5 * of_direction);
  }
  EXPECT_TRUE(master == master_ && m == m_ && v == v_);
  EXPECT_EQ(Measure(meter, GetParam(), Run(0, 0)).parameter, 0);
}

TEST_P(TrustMeterTest, TheBitsOfTheScalarOne) {
  Fill(kBlockElements);
  TrustMeter meter;
  for (size_t first = 0; first < 64; first += 32) {
    for (const size_t count : {1, 100, 3000}) {
      const TrustSums a = Measure(meter, Isa::kScalar, Run(first, count));
      const TrustSums b = Measure(meter, GetParam(), Run(first, count));
      EXPECT_EQ(a.parameter, b.parameter);
      EXPECT_EQ(a.direction, b.direction);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, TrustMeterTest, testing::ValuesIn(SupportedIsas()),
                         [](const auto& info) { return IsaName(info.param); });

TEST(Lamb, TheRatioIsClampedAndIsOneWhereANormIsZero) {
  const Optimizer& lamb = *FindOptimizer("lamb");
  Hyperparameters hyper{.lr = 2};
  StepScalars scalars{};
  EXPECT_EQ(lamb.SetTrust(hyper, 3, 4, &scalars), 0.75);
  EXPECT_EQ(scalars[1], -1.5f);
  EXPECT_EQ(lamb.SetTrust(hyper, 1, 1000, &scalars), 0.01);
  EXPECT_EQ(lamb.SetTrust(hyper, 1000, 1, &scalars), 10);
  EXPECT_EQ(lamb.SetTrust(hyper, 0, 1, &scalars), 1);
  EXPECT_EQ(lamb.SetTrust(hyper, 1, 0, &scalars), 1);
  EXPECT_EQ(scalars[1], -2.0f);
  hyper.min_trust = 0.5;
  hyper.max_trust = 0.6;
  EXPECT_EQ(lamb.SetTrust(hyper, 3, 4, &scalars), 0.6);
  EXPECT_EQ(lamb.SetTrust(hyper, 1, 4, &scalars), 0.5);
}

}  // namespace
}  // namespace shardd::kernels

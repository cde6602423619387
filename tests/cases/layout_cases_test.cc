// Sizes and shapes: every element is trained once, whichever rank owns it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <mutex>

#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

// Element i of parameter p.
float Value(size_t p, uint64_t i) {
  return 0.25f * static_cast<float>(p + 1) + 0.5f * static_cast<float>(i % 7) - 1.0f;
}

// Trains one step over `world` ranks with slot gradients that sum to `world` * Value,
// and checks that the first moment (beta1 = 0) is the mean at every element, and that
// every master moved against its gradient.
void CheckShapes(uint32_t world, const std::vector<std::vector<int64_t>>& shapes) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("shapes", world);
  std::vector<ParameterSpec> parameters;
  for (size_t p = 0; p < shapes.size(); ++p) {
    ParameterSpec spec;
    spec.name = "p" + std::to_string(p);
    spec.shape = shapes[p];
    parameters.push_back(spec);
  }
  ForEachRank(world, [&](uint32_t rank) {
    auto session = OpenRank(daemon.socket(), rank, world, job, parameters);
    const auto decision = TakeStep(session.get(), DType::kFloat32,
                                   [](uint32_t, size_t p, uint64_t i) { return Value(p, i); });
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_EQ(decision->result, StepResult::kApplied);
    for (size_t p = 0; p < parameters.size(); ++p) {
      const std::vector<float> mean = ReadAll(session.get(), StateKind::kMoment0, p);
      const std::vector<float> master = ReadAll(session.get(), StateKind::kMaster, p);
      const auto weights = session->WaitWeights(p);
      ASSERT_TRUE(weights.ok()) << weights.status();
      uint64_t elements = 1;
      for (int64_t extent : shapes[p]) elements *= static_cast<uint64_t>(extent);
      ASSERT_EQ(mean.size(), elements) << "parameter " << p;
      for (uint64_t i = 0; i < elements; ++i) {
        EXPECT_EQ(mean[i], Value(p, i)) << "parameter " << p << " element " << i;
        const float g = Value(p, i);
        if (g != 0) {
          EXPECT_NEAR(master[i], -0.01f * std::copysign(1.0f, g), 1e-5) << p << ":" << i;
        }
        EXPECT_EQ(std::bit_cast<uint32_t>(static_cast<const float*>(*weights)[i]),
                  std::bit_cast<uint32_t>(master[i]));
      }
    }
    EXPECT_TRUE(session->Close().ok());
  });
}

TEST(LayoutCases, Sizes124Over4Ranks) { CheckShapes(4, {{1}, {2}, {4}}); }
TEST(LayoutCases, Sizes124Over8Ranks) { CheckShapes(8, {{1}, {2}, {4}}); }
TEST(LayoutCases, Size3Over4Ranks) { CheckShapes(4, {{3}}); }
TEST(LayoutCases, Sizes8And0And24Over2Ranks) { CheckShapes(2, {{8}, {0}, {24}}); }
TEST(LayoutCases, ShapeWithZeroExtent) { CheckShapes(2, {{4, 4}, {0, 8}}); }
TEST(LayoutCases, ScalarShape) { CheckShapes(1, {{}}); }
TEST(LayoutCases, ParameterAcrossBucketsAndChunks) {
  CheckShapes(3, {{5}, {3, 5000}, {4096}, {1}});
}

TEST(LayoutCases, StridesThatAreNotContiguousAreRefusedByName) {
  DaemonProcess daemon;
  ParameterSpec spec;
  spec.name = "transposed";
  spec.shape = {2, 3};
  spec.strides = {1, 2};
  const auto session =
      Session::Open(RankOptions(daemon.socket(), 0, 1), SmallJob("strides", 1), {spec});
  ASSERT_FALSE(session.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(session.status())) << session.status();
  EXPECT_NE(session.status().message().find("transposed"), absl::string_view::npos);
  spec.strides = {3, 1};
  const auto good =
      Session::Open(RankOptions(daemon.socket(), 0, 1), SmallJob("strides", 1), {spec});
  EXPECT_TRUE(good.ok()) << good.status();
}

}  // namespace
}  // namespace shardd::test

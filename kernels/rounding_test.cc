#include "kernels/rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/hostile_values.h"

namespace shardd::kernels {
namespace {

class RoundingTest : public testing::TestWithParam<Isa> {
 protected:
  std::vector<uint16_t> Round(const std::vector<float>& in, const RoundingKey& key,
                              uint64_t element) const {
    std::vector<uint16_t> out(in.size());
    RoundStochastically(GetParam(), in.data(), in.size(), key, element, out.data());
    return out;
  }
};

TEST_P(RoundingTest, GivesANeighbourOfEveryValueAndItselfWhereItIsABFloat16) {
  const std::vector<float> in = HostileFloats(300'001, 1);
  const std::vector<uint16_t> out = Round(in, {1, 2, 3}, 99);
  for (size_t i = 0; i < in.size(); ++i) {
    const uint32_t bits = FloatToBits(CanonicalizeNan(Flush(in[i])));
    const uint16_t below = static_cast<uint16_t>(bits >> 16);
    if ((bits & 0xFFFF) == 0) {
      ASSERT_EQ(out[i], below) << std::hex << bits;
    } else {
      ASSERT_TRUE(out[i] == below || out[i] == below + 1) << std::hex << bits << " " << out[i];
    }
  }
}

// Upwards as often as the value lies near the upper neighbour; over elements, steps, arrays and
// seeds alike. With 2^20 draws the standard deviation is 0.0005 at most.
TEST_P(RoundingTest, IsRightOnAverage) {
  constexpr size_t kCount = 1 << 20;
  for (const uint32_t low : {0x0001u, 0x1000u, 0x4000u, 0x8000u, 0xC000u, 0xFFFFu}) {
    const std::vector<float> in(kCount, BitsToFloat(0x3F800000u | low));
    const double expected = low / 65536.0;
    for (const uint64_t seed : {0u, 1u, 12345u}) {
      double up = 0;
      for (const uint16_t w : Round(in, {seed, 7, 1}, 4000)) up += w == 0x3F81;
      EXPECT_NEAR(up / kCount, expected, 0.003) << low << " seed " << seed;
    }
    const std::vector<float> one = {in[0]};
    double over_steps = 0, over_arrays = 0;
    constexpr uint32_t kDraws = 1 << 16;
    for (uint32_t k = 0; k < kDraws; ++k) {
      over_steps += Round(one, {3, k, 1}, 5)[0] == 0x3F81;
      over_arrays += Round(one, {3, 9, k % 4}, k * 4096)[0] == 0x3F81;
    }
    EXPECT_NEAR(over_steps / kDraws, expected, 0.012) << low;
    EXPECT_NEAR(over_arrays / kDraws, expected, 0.012) << low;
  }
}

// What is drawn for one element, step, array or seed says nothing of its neighbour's.
TEST_P(RoundingTest, DrawsAreIndependent) {
  constexpr size_t kCount = 1 << 18;
  const std::vector<float> in(kCount, BitsToFloat(0x3F808000u));
  const RoundingKey key = {11, 22, 1};
  const std::vector<uint16_t> base = Round(in, key, 0);
  const auto agreement = [&](const std::vector<uint16_t>& other) {
    double same = 0;
    for (size_t i = 0; i < kCount; ++i) same += base[i] == other[i];
    return same / kCount;
  };
  EXPECT_NEAR(agreement(Round(in, {12, 22, 1}, 0)), 0.5, 0.01);
  EXPECT_NEAR(agreement(Round(in, {11, 23, 1}, 0)), 0.5, 0.01);
  EXPECT_NEAR(agreement(Round(in, {11, 22, 2}, 0)), 0.5, 0.01);
  EXPECT_NEAR(agreement(Round(in, key, 1)), 0.5, 0.01);
  EXPECT_NEAR(agreement(Round(in, key, 4096)), 0.5, 0.01);
  EXPECT_NEAR(agreement(Round(in, key, uint64_t{1} << 32)), 0.5, 0.01);
  EXPECT_EQ(agreement(Round(in, key, 0)), 1.0);
}

TEST_P(RoundingTest, AnyCutGivesTheSameBitsOnEveryIsa) {
  const std::vector<float> in = HostileFloats(20'000, 2);
  const RoundingKey key = {5, 6, 0};
  std::vector<uint16_t> whole(in.size()), pieces(in.size());
  RoundStochastically(Isa::kScalar, in.data(), in.size(), key, 1000, whole.data());
  for (size_t i = 0, n = 1; i < in.size(); i += n, n = n % 257 + 1) {
    const size_t count = std::min(n, in.size() - i);
    RoundStochastically(GetParam(), &in[i], count, key, 1000 + i, &pieces[i]);
  }
  EXPECT_EQ(pieces, whole);
}

INSTANTIATE_TEST_SUITE_P(All, RoundingTest, testing::ValuesIn(SupportedIsas()),
                         [](const auto& info) { return std::string(IsaName(info.param)); });

}  // namespace
}  // namespace shardd::kernels

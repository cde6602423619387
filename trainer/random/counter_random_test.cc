#include "trainer/random/counter_random.h"

#include <cmath>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace shardd::random {
namespace {

// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  using A4 = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}), (A4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (A4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (A4{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterRandom, IsAFunctionOfSeedStreamAndIndex) {
  const CounterRandom a(1, 2), b(1, 2), other_seed(3, 2), other_stream(1, 4);
  EXPECT_EQ(a.Bits(77), b.Bits(77));
  EXPECT_NE(a.Bits(77), a.Bits(78));
  EXPECT_NE(a.Bits(77), other_seed.Bits(77));
  EXPECT_NE(a.Bits(77), other_stream.Bits(77));
  EXPECT_NE(StreamOf("h.0.ln_1.weight"), StreamOf("h.1.ln_1.weight"));
  EXPECT_EQ(a.Below(5, 0), 0u);
}

TEST(CounterRandom, NormalMoments) {
  const CounterRandom random(7, StreamOf("w"));
  const int n = 200000;
  double sum = 0, square = 0, fourth = 0;
  for (int i = 0; i < n; ++i) {
    const double x = random.Normal(i);
    sum += x;
    square += x * x;
    fourth += x * x * x * x;
  }
  // Five standard errors of each.
  EXPECT_NEAR(sum / n, 0.0, 5 * std::sqrt(1.0 / n));
  EXPECT_NEAR(square / n, 1.0, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(fourth / n, 3.0, 5 * std::sqrt(96.0 / n));
}

TEST(CounterRandom, BelowIsUniform) {
  const CounterRandom random(7, 1);
  std::vector<int> seen(10);
  for (int i = 0; i < 10000; ++i) ++seen[random.Below(i, 10)];
  for (int count : seen) EXPECT_NEAR(count, 1000, 150);
}

TEST(Permutation, EveryIndexOnce) {
  for (uint64_t size : {1u, 2u, 3u, 4u, 5u, 16u, 17u, 1000u, 4097u}) {
    const Permutation permutation(11, 3, size);
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < size; ++i) {
      const uint64_t to = permutation(i);
      EXPECT_LT(to, size);
      seen.insert(to);
    }
    EXPECT_EQ(seen.size(), size);
  }
  const Permutation a(11, 3, 1000), b(12, 3, 1000), c(11, 4, 1000);
  int same_seed = 0, same_stream = 0, fixed = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    same_seed += a(i) == b(i);
    same_stream += a(i) == c(i);
    fixed += a(i) == i;
  }
  EXPECT_LT(same_seed, 10);
  EXPECT_LT(same_stream, 10);
  EXPECT_LT(fixed, 10);
}

}  // namespace
}  // namespace shardd::random

#include "kernels/cast.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/hostile_values.h"

namespace shardd::kernels {
namespace {

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// F and canonical NaN, stated on values rather than bits.
float Prepared(uint32_t bits) {
  const float x = FromBits(bits);
  if (std::isnan(x)) return FromBits(0x7FC00000);
  return std::fabs(x) < 0x1p-125f ? 0.0f : x;
}

// The nearest value of a 16-bit format whose values are in increasing order of
// their bits, found by comparison of distances: independent of the kernels' bit
// tricks. `infinity` is the pattern of +Inf, `overflow` the value that it stands
// for as a neighbour of the largest finite one.
uint16_t Nearest(float x, float (*widen)(uint16_t), uint16_t infinity, double overflow,
                 bool ties_away) {
  if (std::isnan(x)) return infinity | (infinity == 0x7F80 ? 0x40 : 0x200);
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(double{x});
  uint16_t low = 0, high = infinity;  // widen(low) <= magnitude < widen(high), or high is Inf
  while (high - low > 1) {
    const uint16_t middle = low + (high - low) / 2;
    (widen(middle) <= magnitude ? low : high) = middle;
  }
  if (std::isinf(x)) return sign | infinity;
  const double above = high == infinity ? overflow : double{widen(high)};
  const double down = magnitude - double{widen(low)}, up = above - magnitude;
  if (down < up) return sign | low;
  if (up < down) return sign | high;
  return sign | (ties_away || low % 2 == 1 ? high : low);
}

float WidenBf16(uint16_t bits) { return FromBits(uint32_t{bits} << 16); }

float WidenFp16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const double mantissa = bits & 1023;
  double value;
  if (exponent == 31) {
    value = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, -24);
  } else {
    value = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

class CastOnIsa : public testing::TestWithParam<Isa> {
 protected:
  template <class Out>
  static std::vector<Out> Weights(Isa isa, const std::vector<float>& in, DType dtype) {
    std::vector<Out> out(in.size());
    MasterToWeight(isa, in.data(), in.size(), out.data(), dtype);
    return out;
  }
  template <class Out>
  static std::vector<Out> Grads(Isa isa, const std::vector<float>& in, DType dtype) {
    std::vector<Out> out(in.size());
    Fp32ToGrad(isa, in.data(), in.size(), out.data(), dtype);
    return out;
  }
};

TEST_P(CastOnIsa, NearestByDistance) {
  const std::vector<float> in = HostileFloats(300'000, 11);
  const auto bf16 = Weights<uint16_t>(GetParam(), in, DType::kBFloat16);
  const auto fp16 = Weights<uint16_t>(GetParam(), in, DType::kFloat16);
  const auto fp32 = Weights<float>(GetParam(), in, DType::kFloat32);
  const auto grad_bf16 = Grads<uint16_t>(GetParam(), in, DType::kBFloat16);
  const auto grad_fp16 = Grads<uint16_t>(GetParam(), in, DType::kFloat16);
  const auto grad_fp32 = Grads<float>(GetParam(), in, DType::kFloat32);
  for (size_t i = 0; i < in.size(); ++i) {
    const float x = Prepared(Bits(in[i]));
    ASSERT_EQ(bf16[i], Nearest(x, WidenBf16, 0x7F80, 0x1p128, true)) << in[i];
    ASSERT_EQ(fp16[i], Nearest(x, WidenFp16, 0x7C00, 0x1p16, false)) << in[i];
    ASSERT_EQ(Bits(fp32[i]), Bits(x)) << in[i];
    ASSERT_EQ(grad_bf16[i], Nearest(x, WidenBf16, 0x7F80, 0x1p128, false)) << in[i];
    ASSERT_EQ(grad_fp16[i], fp16[i]) << in[i];
    ASSERT_EQ(Bits(grad_fp32[i]), Bits(x)) << in[i];
  }
}

TEST_P(CastOnIsa, EverySixteenBitValueWidensExactly) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> bf16(all.size()), fp16(all.size());
  ScopedFlushToZero flush;  // subnormals of both formats must survive it
  ToFp32(GetParam(), all.data(), DType::kBFloat16, all.size(), bf16.data());
  ToFp32(GetParam(), all.data(), DType::kFloat16, all.size(), fp16.data());
  for (size_t i = 0; i < all.size(); ++i) {
    const bool bf16_nan = (all[i] & 0x7FFF) > 0x7F80, fp16_nan = (all[i] & 0x7FFF) > 0x7C00;
    ASSERT_EQ(Bits(bf16[i]), bf16_nan ? 0x7FC00000u : uint32_t{all[i]} << 16);
    ASSERT_EQ(Bits(fp16[i]), fp16_nan ? 0x7FC00000u : Bits(WidenFp16(all[i])));
  }
}

TEST_P(CastOnIsa, EverySizeAndNothingBeyond) {
  for (size_t count = 0; count <= 257; ++count) {
    const std::vector<float> in = HostileFloats(count, static_cast<uint32_t>(count) + 1);
    for (const DType dtype : kAllDTypes) {
      const size_t bytes = count * DTypeSize(dtype);
      std::vector<uint8_t> expected(bytes + 8, 0xA5), actual(bytes + 8, 0xA5);
      MasterToWeight(Isa::kScalar, in.data(), count, expected.data(), dtype);
      MasterToWeight(GetParam(), in.data(), count, actual.data(), dtype);
      ASSERT_EQ(expected, actual) << count;
      Fp32ToGrad(Isa::kScalar, in.data(), count, expected.data(), dtype);
      Fp32ToGrad(GetParam(), in.data(), count, actual.data(), dtype);
      ASSERT_EQ(expected, actual) << count;
      std::vector<float> wide(count + 2, 7.0f), wide_scalar(count + 2, 7.0f);
      ToFp32(Isa::kScalar, actual.data(), dtype, count, wide_scalar.data());
      ToFp32(GetParam(), actual.data(), dtype, count, wide.data());
      ASSERT_EQ(std::memcmp(wide.data(), wide_scalar.data(), wide.size() * 4), 0) << count;
    }
  }
}

// All 2^32 fp32 patterns: the rules of docs/numerics.md for bf16, and that the
// ties-away rule loses nothing when a master is split. fp16 is compared with the
// scalar cast, which NearestByDistance checks.
TEST_P(CastOnIsa, AllMasters) {
  constexpr size_t kBatch = 1 << 16;
  constexpr uint32_t kThreads = 2;
  std::vector<std::string> failures(kThreads);
  // All of them for what users run, an eighth that holds every exponent and both
  // signs for the others.
  const bool all = GetParam() == BestIsa();
  const auto sweep = [&failures, all](uint32_t thread) {
    std::vector<float> in(kBatch);
    std::vector<uint16_t> weight(kBatch), grad(kBatch), half(kBatch), half_scalar(kBatch);
    for (uint32_t batch = thread; batch < 65536; batch += kThreads) {
      if (!all && batch % 16 != 5 && batch % 16 != 10) continue;
      for (uint32_t i = 0; i < kBatch; ++i) {
        const uint32_t bits = batch << 16 | i;
        std::memcpy(&in[i], &bits, sizeof bits);
      }
      MasterToWeight(GetParam(), in.data(), kBatch, weight.data(), DType::kBFloat16);
      Fp32ToGrad(GetParam(), in.data(), kBatch, grad.data(), DType::kBFloat16);
      uint32_t wrong = 0;
      for (uint32_t i = 0; i < kBatch; ++i) {
        uint32_t x = batch << 16 | i;
        if ((x & 0x7FFFFFFF) > 0x7F800000) x = 0x7FC00000;
        if ((x & 0x7F000000) == 0) x = 0;
        const uint32_t low = x & 0xFFFF, w = weight[i];
        wrong |= w ^ ((x + 0x8000) >> 16);
        wrong |= (((w - (low >> 15)) << 16) | low) ^ x;
        const uint32_t round_up = low > 0x8000 || (low == 0x8000 && ((x >> 16) & 1) != 0);
        wrong |= grad[i] ^ ((x >> 16) + round_up);
      }
      if (wrong != 0) failures[thread] += "bf16 batch " + std::to_string(batch) + "; ";
      // fp16 on a sample of batches that holds every exponent and both signs.
      if (batch % 16 == 5 || batch % 16 == 10) {
        MasterToWeight(GetParam(), in.data(), kBatch, half.data(), DType::kFloat16);
        MasterToWeight(Isa::kScalar, in.data(), kBatch, half_scalar.data(), DType::kFloat16);
        if (half != half_scalar) failures[thread] += "fp16 batch " + std::to_string(batch) + "; ";
      }
    }
  };
  std::thread other(sweep, 1);
  sweep(0);
  other.join();
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
}

std::string Name(const testing::TestParamInfo<Isa>& info) { return IsaName(info.param); }
INSTANTIATE_TEST_SUITE_P(All, CastOnIsa, testing::ValuesIn(SupportedIsas()), Name);

}  // namespace
}  // namespace shardd::kernels

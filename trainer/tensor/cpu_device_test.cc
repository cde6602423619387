#include "trainer/tensor/cpu_device.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "trainer/tensor/cpu_gemm.h"
#include "trainer/tensor/cpu_kernels.h"

namespace shardd::tensor {
namespace {

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

TEST(CpuKernels, Bf16ToFloatIsExactAndBackIsIdentity) {
  std::vector<uint16_t> all(65536), back(65536);
  for (uint32_t i = 0; i < 65536; ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(65536);
  cpu::Cast({all.data(), DType::kBFloat16}, 65536, {wide.data(), DType::kFloat32});
  cpu::Cast({wide.data(), DType::kFloat32}, 65536, {back.data(), DType::kBFloat16});
  for (uint32_t i = 0; i < 65536; ++i) {
    ASSERT_EQ(Bits(wide[i]), i << 16);
    if (std::isnan(wide[i])) {
      ASSERT_TRUE((back[i] & 0x7f80) == 0x7f80 && (back[i] & 0x7f) != 0) << i;
    } else {
      ASSERT_EQ(back[i], i);
    }
  }
}

TEST(CpuKernels, FloatToBf16RoundsToNearestEven) {
  std::vector<float> in;
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) in.push_back(FromBits(random()));
  for (uint32_t low : {0x0u, 0x1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
    for (uint32_t high : {0x0u, 0x1u, 0x7fu, 0x80u, 0x3f80u, 0x3f81u, 0x7f7fu, 0x7f80u, 0x7fffu,
                          0x8000u, 0xff7fu, 0xffffu}) {
      in.push_back(FromBits(high << 16 | low));
    }
  }
  std::vector<uint16_t> out(in.size());
  cpu::Cast({in.data(), DType::kFloat32}, in.size(), {out.data(), DType::kBFloat16});
  for (size_t i = 0; i < in.size(); ++i) {
    const float wide = FromBits(static_cast<uint32_t>(out[i]) << 16);
    if (std::isnan(in[i])) {
      ASSERT_TRUE(std::isnan(wide)) << i;
      continue;
    }
    const uint32_t bits = Bits(in[i]);
    ASSERT_EQ(out[i], static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)) << i;
  }
}

TEST(CpuKernels, Fp16ToFloatIsExact) {
  for (uint32_t first = 0; first < 65536; first += 4096) {
    std::vector<uint16_t> in(4096);
    for (uint32_t i = 0; i < 4096; ++i) in[i] = static_cast<uint16_t>(first + i);
    std::vector<float> out(4096);
    cpu::Cast({in.data(), DType::kFloat16}, 4096, {out.data(), DType::kFloat32});
    for (uint32_t i = 0; i < 4096; ++i) {
      const uint32_t h = first + i;
      const int exponent = h >> 10 & 31;
      const double fraction = h & 1023;
      const double sign = h & 0x8000 ? -1 : 1;
      if (exponent == 31) {
        ASSERT_EQ(std::isnan(out[i]), fraction != 0) << h;
        if (fraction == 0) {
          ASSERT_EQ(out[i], sign * INFINITY);
        }
        continue;
      }
      const double value =
          exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      ASSERT_EQ(out[i], static_cast<float>(sign * value)) << h;
    }
  }
}

TEST(CpuKernels, SoftmaxIsStableAndKeepsNaN) {
  std::vector<float> s = {1000.0f, 1001.0f, -1000.0f, 7.0f};
  const float lse = cpu::SoftmaxRow(s.data(), 3, 4);
  EXPECT_NEAR(lse, 1001 + std::log1p(std::exp(-1.0)), 1e-3);
  EXPECT_NEAR(s[0] + s[1], 1.0f, 1e-6);
  EXPECT_EQ(s[2], 0.0f);
  EXPECT_EQ(s[3], 0.0f) << "beyond the valid scores";
  for (size_t at = 0; at < 40; ++at) {
    std::vector<float> row(40, 1.0f);
    row[at] = NAN;
    EXPECT_TRUE(std::isnan(cpu::LogSumExpRow({row.data(), DType::kFloat32}, 40))) << at;
    EXPECT_TRUE(std::isnan(cpu::SoftmaxRow(row.data(), 40, 40))) << at;
    EXPECT_TRUE(std::isnan(row[at]));
  }
  std::vector<float> x = {NAN, 100.0f, -100.0f, INFINITY}, y(4);
  cpu::Gelu({x.data(), DType::kFloat32}, 4, {y.data(), DType::kFloat32});
  EXPECT_TRUE(std::isnan(y[0]));
  EXPECT_EQ(y[1], 100.0f);
  EXPECT_NEAR(y[2], 0.0f, 1e-30);
  EXPECT_EQ(y[3], INFINITY);
}

std::vector<float> RandomFloats(size_t count, int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

// Every combination of transposes, bias, accumulation and dtype against double.
TEST(CpuGemm, AgreesWithDouble) {
  cpu::GemmRunner runner;
  struct Size {
    int64_t m, n, k;
  };
  for (const Size& size : {Size{1, 1, 1}, Size{5, 7, 3}, Size{33, 17, 65}, Size{64, 48, 0},
                           Size{0, 4, 4}, Size{128, 96, 200}}) {
    for (int mask = 0; mask < 64; ++mask) {
      const bool ta = mask & 1, tb = mask & 2, bf16_in = mask & 4, bf16_out = mask & 8;
      const bool bias = mask & 16, accumulate = mask & 32;
      if (bias && accumulate) continue;
      const auto [m, n, k] = size;
      std::vector<float> a = RandomFloats(m * k, 1), b = RandomFloats(k * n, 2);
      std::vector<float> c = RandomFloats(m * n, 3), v = RandomFloats(n, 4);
      std::vector<uint16_t> a16(a.size()), b16(b.size()), c16(c.size());
      const auto round = [](std::vector<float>& wide, std::vector<uint16_t>& narrow) {
        const size_t count = wide.size();
        cpu::Cast({wide.data(), DType::kFloat32}, count, {narrow.data(), DType::kBFloat16});
        cpu::Cast({narrow.data(), DType::kBFloat16}, count, {wide.data(), DType::kFloat32});
      };
      if (bf16_in) round(a, a16), round(b, b16);
      if (bf16_out) round(c, c16);
      const std::vector<float> before = c;
      const auto in = [&](std::vector<float>& wide, std::vector<uint16_t>& narrow) {
        return bf16_in ? ConstBuffer{narrow.data(), DType::kBFloat16}
                       : ConstBuffer{wide.data(), DType::kFloat32};
      };
      runner.Run(
          {.m = m,
           .n = n,
           .k = k,
           .a = in(a, a16),
           .b = in(b, b16),
           .c = bf16_out ? Buffer{c16.data(), DType::kBFloat16} : Buffer{c.data(), DType::kFloat32},
           .transpose_a = ta,
           .transpose_b = tb,
           .accumulate = accumulate,
           .bias = bias ? v.data() : nullptr});
      if (bf16_out) {
        cpu::Cast({c16.data(), DType::kBFloat16}, c.size(), {c.data(), DType::kFloat32});
      }
      const double tolerance = bf16_out ? 6e-3 : 2e-6;
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          double sum = (accumulate ? before[i * n + j] : 0.0) + (bias ? v[j] : 0.0);
          double scale = std::fabs(sum) + 1e-3;
          for (int64_t l = 0; l < k; ++l) {
            const double product = static_cast<double>(ta ? a[l * m + i] : a[i * k + l]) *
                                   (tb ? b[j * k + l] : b[l * n + j]);
            sum += product;
            scale += std::fabs(product);
          }
          ASSERT_NEAR(c[i * n + j], sum, tolerance * scale) << m << n << k << " mask " << mask;
        }
      }
    }
  }
}

// Products do not depend on where the operands lie.
TEST(CpuGemm, AddressesChangeNoBit) {
  cpu::GemmRunner runner;
  const int64_t m = 96, n = 80, k = 150;
  const std::vector<float> a = RandomFloats(m * k, 1), b = RandomFloats(k * n, 2);
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    std::vector<float> first;
    for (size_t shift : {0u, 1u, 7u, 13u}) {
      const size_t size = DTypeSize(dtype);
      std::vector<char> a_at((m * k + shift) * size), b_at((k * n + 2 * shift) * size);
      std::vector<float> c(m * n + shift);
      cpu::Cast({a.data(), DType::kFloat32}, m * k, {a_at.data() + shift * size, dtype});
      cpu::Cast({b.data(), DType::kFloat32}, k * n, {b_at.data() + 2 * shift * size, dtype});
      runner.Run({.m = m,
                  .n = n,
                  .k = k,
                  .a = {a_at.data() + shift * size, dtype},
                  .b = {b_at.data() + 2 * shift * size, dtype},
                  .c = {c.data() + shift, DType::kFloat32}});
      const std::vector<float> result(c.begin() + shift, c.end());
      if (first.empty()) first = result;
      EXPECT_EQ(std::memcmp(first.data(), result.data(), first.size() * 4), 0) << shift;
    }
  }
}

// All but matrix products: the same bits for any number of threads.
TEST(CpuDevice, ThreadsChangeNoBitOfReductions) {
  const int64_t rows = 333, cols = 70, heads = 7;
  const std::vector<float> x = RandomFloats(rows * 3 * cols, 1), dy = RandomFloats(rows * cols, 2);
  const std::vector<float> gain = RandomFloats(cols, 3);
  std::vector<int32_t> ids(rows);
  for (int64_t r = 0; r < rows; ++r) ids[r] = static_cast<int32_t>(r * r % 11);
  std::vector<float> first;
  for (int threads : {1, 2, 3}) {
    CpuDevice device({.threads = threads});
    std::vector<float> all;
    std::vector<float> out(rows * cols), mean(rows), rstd(rows), d_gain(cols), d_bias(cols);
    const auto keep = [&](const std::vector<float>& v) {
      all.insert(all.end(), v.begin(), v.end());
    };
    const auto f32 = [](auto& v) { return Buffer{const_cast<float*>(v.data()), DType::kFloat32}; };
    device.ColumnSum(f32(dy), rows, cols, false, d_bias.data());
    keep(d_bias);
    const LayerNormArgs norm = {.rows = rows,
                                .cols = cols,
                                .x = f32(x),
                                .gain = gain.data(),
                                .bias = gain.data(),
                                .mean = mean.data(),
                                .rstd = rstd.data()};
    device.LayerNorm(norm, f32(out));
    keep(out);
    device.LayerNormBackward(norm, f32(dy), false, f32(out), false, d_gain.data(), true,
                             d_bias.data());
    keep(out), keep(d_gain), keep(d_bias);
    std::vector<float> lse(rows * heads), d_qkv(rows * 3 * cols), table(11 * cols);
    const AttentionArgs attention = {.batch = 1,
                                     .length = rows,
                                     .heads = heads,
                                     .head_dim = cols / heads,
                                     .qkv = f32(x),
                                     .lse = lse.data()};
    device.CausalAttention(attention, f32(out));
    keep(out);
    device.CausalAttentionBackward(attention, f32(out), f32(dy), f32(d_qkv));
    keep(d_qkv);
    device.ScatterAddRows(f32(dy), ids.data(), rows, cols, 11, false, table.data());
    keep(table);
    if (first.empty()) first = all;
    ASSERT_EQ(first.size(), all.size());
    EXPECT_EQ(std::memcmp(first.data(), all.data(), all.size() * 4), 0) << threads;
  }
}

TEST(CpuDevice, MemoryIsReused) {
  CpuDevice device({.threads = 1});
  for (int i = 0; i < 100; ++i) {
    void* a = device.Allocate(100000);
    void* b = device.Allocate(99000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 64, 0u);
    device.Free(a, 100000);
    device.Free(b, 99000);
  }
  EXPECT_LE(device.reserved_bytes(), 2u * 131072);
}

}  // namespace
}  // namespace shardd::tensor

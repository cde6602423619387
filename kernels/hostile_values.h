// Test data: ordinary values mixed with those that kernels get wrong.
#ifndef SHARDD_KERNELS_HOSTILE_VALUES_H_
#define SHARDD_KERNELS_HOSTILE_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/dtype.h"

namespace shardd::kernels {

// Bit patterns of fp32: NaN with payloads and signs, infinities, zeros,
// subnormals, both sides of 2^-126 and of the flush bound 2^-125, ties of every
// rounding to 16 bits, fp16's range, values whose square overflows, the largest.
inline const std::vector<uint32_t>& HostileFloatBits() {
  static const auto* const bits = new std::vector<uint32_t>{
      0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FFFFFFF, 0xFFFFFFFF,
      0x7FA55555, 0x7F800000, 0xFF800000, 0x00000000, 0x80000000, 0x00000001, 0x80000001,
      0x007FFFFF, 0x807FFFFF, 0x00400000, 0x00800000, 0x80800000, 0x00800001, 0x00FFFFFF,
      0x80FFFFFF, 0x01000000, 0x81000000, 0x01000001, 0x017FFFFF, 0x01800000, 0x1F800000,
      0x20000000, 0x0D000000, 0x32800000, 0x33000000, 0x33000001, 0x33800000, 0x387FC000,
      0x387FE000, 0x387FFFFF, 0x38800000, 0x38801000, 0x38803000, 0x3F800000, 0xBF800000,
      0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F817FFF, 0x3F801000, 0x3F803000,
      0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x5F000000, 0x5F800000, 0x7F000000,
      0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7EFFFFFF, 0x358637BD, 0x322BCC77,
  };
  return *bits;
}

// A third hostile, a third ordinary (about 1, with many exponents), a third of
// any bits. The same for the same seed.
inline std::vector<float> HostileFloats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  const std::vector<uint32_t>& hostile = HostileFloatBits();
  std::vector<float> values(count);
  for (float& value : values) {
    uint32_t bits = random();
    const uint32_t kind = random() % 3;
    if (kind == 0) bits = hostile[bits % hostile.size()];
    if (kind == 1) bits = (bits & 0x807FFFFF) | ((100 + random() % 32) << 23);
    std::memcpy(&value, &bits, sizeof value);
  }
  return values;
}

// Values of a dtype: for 16 bits a third of them the upper or lower half of a
// hostile fp32, the rest any bits.
inline std::vector<uint8_t> HostileArray(DType dtype, size_t count, uint32_t seed) {
  std::vector<uint8_t> bytes(count * DTypeSize(dtype));
  if (dtype == DType::kFloat32) {
    const std::vector<float> values = HostileFloats(count, seed);
    if (count != 0) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  std::mt19937 random(seed);
  const std::vector<uint32_t>& hostile = HostileFloatBits();
  // 1 and 0x3FF: fp16's least and largest subnormal; 0x7C01: its signalling NaN.
  const uint16_t special[] = {0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0x7C00,
                              0xFC00, 0x7C01, 0xFDFF, 0x7E00, 0x8000, 0x0000};
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits = static_cast<uint16_t>(random());
    const uint32_t kind = random() % 4;
    if (kind == 0) bits = static_cast<uint16_t>(hostile[bits % hostile.size()] >> 16);
    if (kind == 1) bits = special[bits % std::size(special)];
    std::memcpy(&bytes[2 * i], &bits, sizeof bits);
  }
  return bytes;
}

inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_HOSTILE_VALUES_H_

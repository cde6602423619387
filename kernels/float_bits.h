// The rules of docs/numerics.md for single values: flush, canonical NaN, and the
// conversions between fp32 and the 16-bit formats. Usable in device code.
#ifndef SHARDD_KERNELS_FLOAT_BITS_H_
#define SHARDD_KERNELS_FLOAT_BITS_H_

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SHARDD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SHARDD_HOST_DEVICE inline
#endif

namespace shardd::kernels {

inline constexpr uint32_t kCanonicalNanBits = 0x7FC00000u;
inline constexpr uint16_t kBFloat16NanBits = 0x7FC0u;
inline constexpr uint16_t kFloat16NanBits = 0x7E00u;
inline constexpr uint32_t kExponentMask = 0x7F800000u;
// Zero in a value of magnitude below 2^-125.
inline constexpr uint32_t kFlushMask = 0x7F000000u;

SHARDD_HOST_DEVICE uint32_t FloatToBits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

SHARDD_HOST_DEVICE float BitsToFloat(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

SHARDD_HOST_DEVICE bool IsNanBits(uint32_t bits) { return (bits & 0x7FFFFFFFu) > kExponentMask; }

// F of docs/numerics.md: +0 for |x| < 2^-125, else x.
SHARDD_HOST_DEVICE float Flush(float x) { return (FloatToBits(x) & kFlushMask) == 0 ? 0.0f : x; }

// x, or the canonical NaN for any NaN.
SHARDD_HOST_DEVICE float CanonicalizeNan(float x) {
  return IsNanBits(FloatToBits(x)) ? BitsToFloat(kCanonicalNanBits) : x;
}

// bf16 to nearest, ties away from zero: working weights. `x` is no NaN but the
// canonical one.
SHARDD_HOST_DEVICE uint16_t BFloat16TiesAway(float x) {
  return static_cast<uint16_t>((FloatToBits(x) + 0x8000u) >> 16);
}

// The low half that goes with BFloat16TiesAway, and both together again.
SHARDD_HOST_DEVICE uint16_t LowWord(float x) {
  return static_cast<uint16_t>(FloatToBits(x) & 0xFFFFu);
}
SHARDD_HOST_DEVICE float JoinWords(uint16_t weight, uint16_t low) {
  const uint32_t carry = static_cast<uint32_t>(low) >> 15;
  return BitsToFloat(((static_cast<uint32_t>(weight) - carry) << 16) | low);
}

// bf16 to nearest even; NaN becomes canonical.
SHARDD_HOST_DEVICE uint16_t BFloat16TiesEven(float x) {
  const uint32_t bits = FloatToBits(x);
  if (IsNanBits(bits)) return kBFloat16NanBits;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// fp16 to nearest even, subnormals kept; NaN becomes canonical.
SHARDD_HOST_DEVICE uint16_t Float16TiesEven(float x) {
  const uint32_t bits = FloatToBits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > kExponentMask) return kFloat16NanBits;
  if (magnitude >= 0x47800000u) return sign | 0x7C00u;  // 2^16 and more, Inf
  uint32_t shift, value;
  if (magnitude >= 0x38800000u) {  // normal in fp16: rebias 127 -> 15
    shift = 13;
    value = magnitude - 0x38000000u;
  } else {
    const uint32_t exponent = magnitude >> 23;
    if (exponent < 102) return sign;  // below 2^-25: half the least subnormal
    shift = 126 - exponent;
    value = (magnitude & 0x7FFFFFu) | 0x800000u;
  }
  const uint32_t half_minus_one = (1u << (shift - 1)) - 1;
  // A carry out of the mantissa moves into the exponent, up to Inf, as it should.
  return sign | static_cast<uint16_t>((value + half_minus_one + ((value >> shift) & 1u)) >> shift);
}

SHARDD_HOST_DEVICE float WidenBFloat16(uint16_t x) {
  return BitsToFloat(static_cast<uint32_t>(x) << 16);
}

// Exact; fp16 subnormals are normal in fp32. A NaN becomes canonical.
SHARDD_HOST_DEVICE float WidenFloat16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = x & 0x7FFFu;
  if (magnitude > 0x7C00u) return BitsToFloat(kCanonicalNanBits);
  if (magnitude == 0x7C00u) return BitsToFloat(sign | kExponentMask);
  if (magnitude >= 0x0400u) return BitsToFloat(sign | ((magnitude << 13) + 0x38000000u));
  // magnitude * 2^-24, exact: the product of an integer below 2^10 and a power of two.
  const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return BitsToFloat(sign | FloatToBits(value));
}

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_FLOAT_BITS_H_

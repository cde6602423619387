// The lane type of one value: the reference that every other lane must equal bit
// for bit, on the CPU and in device code.
//
// A lane type gives the element-wise formulas their arithmetic. Every operation
// rounds once, to nearest even, and flushes its result.
#ifndef SHARDD_KERNELS_SCALAR_LANE_H_
#define SHARDD_KERNELS_SCALAR_LANE_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/float_bits.h"
#include "kernels/rounding.h"

namespace shardd::kernels {

// Built with FMA hardware: std::fma is the
// same without, but slow.
struct ScalarLane {
  using V = float;
  using BlockSums = struct ScalarBlockSums;
  static constexpr size_t kWidth = 1;

  static SHARDD_HOST_DEVICE V Set(float x) { return Flush(x); }

#if defined(__CUDA_ARCH__)
  static SHARDD_HOST_DEVICE V Add(V a, V b) { return Flush(__fadd_rn(a, b)); }
  static SHARDD_HOST_DEVICE V Sub(V a, V b) { return Flush(__fsub_rn(a, b)); }
  static SHARDD_HOST_DEVICE V Div(V a, V b) { return Flush(__fdiv_rn(a, b)); }
  static SHARDD_HOST_DEVICE V MulUnflushed(V a, V b) { return __fmul_rn(a, b); }
  static SHARDD_HOST_DEVICE V FmaUnflushed(V a, V b, V c) { return __fmaf_rn(a, b, c); }
  static SHARDD_HOST_DEVICE V Sqrt(V a) { return __fsqrt_rn(a); }
#else
  static SHARDD_HOST_DEVICE V Add(V a, V b) { return Flush(a + b); }
  static SHARDD_HOST_DEVICE V Sub(V a, V b) { return Flush(a - b); }
  static SHARDD_HOST_DEVICE V Div(V a, V b) { return Flush(a / b); }
  static SHARDD_HOST_DEVICE V MulUnflushed(V a, V b) { return a * b; }
  // a * b + c, rounded once.
  static SHARDD_HOST_DEVICE V FmaUnflushed(V a, V b, V c) { return std::fma(a, b, c); }
  // Not flushed: a root of a flushed value is 0 or above 2^-63.
  static SHARDD_HOST_DEVICE V Sqrt(V a) { return std::sqrt(a); }
#endif

  static SHARDD_HOST_DEVICE V Mul(V a, V b) { return Flush(MulUnflushed(a, b)); }
  static SHARDD_HOST_DEVICE V Fma(V a, V b, V c) { return Flush(FmaUnflushed(a, b, c)); }

  // The larger; b where either is NaN.
  static SHARDD_HOST_DEVICE V Max(V a, V b) { return a > b ? a : b; }
  // size, -size or 0, as x is positive, negative or neither.
  static SHARDD_HOST_DEVICE V WithSignOf(V x, V size) {
    return x > 0.0f ? size : x < 0.0f ? -size : 0.0f;
  }

  static SHARDD_HOST_DEVICE V Canonical(V x) { return CanonicalizeNan(x); }

  static SHARDD_HOST_DEVICE bool AnyNan(V a, V b, V c) { return a != a || b != b || c != c; }

  static SHARDD_HOST_DEVICE V LoadRaw(const float* p) { return *p; }
  static SHARDD_HOST_DEVICE V Load(const float* p) { return Flush(*p); }
  static SHARDD_HOST_DEVICE void Store(V x, float* p) { *p = x; }
  // A canonical master as its working weight and its low word, and back.
  static SHARDD_HOST_DEVICE void StoreSplit(V x, uint16_t* weight, uint16_t* low) {
    *weight = BFloat16TiesAway(x);
    *low = LowWord(x);
  }
  static SHARDD_HOST_DEVICE V LoadSplit(const uint16_t* weight, const uint16_t* low) {
    return JoinWords(*weight, *low);
  }
  // A canonical value, rounded stochastically as element `index` of a block (rounding.h).
  static SHARDD_HOST_DEVICE void StoreStochastic(V x, uint64_t block_key, uint32_t index,
                                                 uint16_t* p) {
    *p = BFloat16Stochastic(x, RandomBits(block_key, index));
  }
  // A hint for faster lanes.
  static SHARDD_HOST_DEVICE void PrefetchRead(const void*) {}

  // Element `index` of an array of kDType, widened and flushed.
  template <DType kDType>
  static SHARDD_HOST_DEVICE V LoadAs(const void* base, size_t index) {
    if constexpr (kDType == DType::kFloat32) {
      return Flush(static_cast<const float*>(base)[index]);
    } else if constexpr (kDType == DType::kBFloat16) {
      return Flush(WidenBFloat16(static_cast<const uint16_t*>(base)[index]));
    } else {
      return Flush(WidenFloat16(static_cast<const uint16_t*>(base)[index]));
    }
  }

  // Element `index` of an array of kDType, widened exactly, not flushed.
  template <DType kDType>
  static SHARDD_HOST_DEVICE V LoadExact(const void* base, size_t index) {
    if constexpr (kDType == DType::kFloat32) {
      return static_cast<const float*>(base)[index];
    } else if constexpr (kDType == DType::kBFloat16) {
      return WidenBFloat16(static_cast<const uint16_t*>(base)[index]);
    } else {
      return WidenFloat16(static_cast<const uint16_t*>(base)[index]);
    }
  }

  // Stores canonical `x` rounded to nearest even.
  template <DType kDType>
  static SHARDD_HOST_DEVICE void StoreNearest(V x, void* base, size_t index) {
    if constexpr (kDType == DType::kFloat32) {
      static_cast<float*>(base)[index] = x;
    } else if constexpr (kDType == DType::kBFloat16) {
      static_cast<uint16_t*>(base)[index] = BFloat16TiesEven(x);
    } else {
      static_cast<uint16_t*>(base)[index] = Float16TiesEven(x);
    }
  }

  // Stores `x` around the caches where kStream and the hardware can; `p` is then
  // aligned to 64 bytes at lane 0.
  template <bool kStream>
  static SHARDD_HOST_DEVICE void StoreInOrder(V x, float* p) {
    *p = x;
  }

  // Stores canonical `x` as a working weight. kStream is a hint to bypass the
  // caches, which this lane does not take.
  template <DType kDType, bool kStream>
  static SHARDD_HOST_DEVICE void StoreWeight(V x, void* base, size_t index) {
    if constexpr (kDType == DType::kFloat32) {
      static_cast<float*>(base)[index] = x;
    } else if constexpr (kDType == DType::kBFloat16) {
      static_cast<uint16_t*>(base)[index] = BFloat16TiesAway(x);
    } else {
      static_cast<uint16_t*>(base)[index] = Float16TiesEven(x);
    }
  }
};

// The sums of squares of one block, by lane number mod 32, and the largest
// magnitude seen, as bits.
struct ScalarBlockSums {
  double lanes[32] = {};
  uint32_t largest = 0;

  // Adds an element whose index mod 32 is kLane.
  template <size_t kLane>
  SHARDD_HOST_DEVICE void Add(float x) {
    lanes[kLane] = std::fma(static_cast<double>(x), static_cast<double>(x), lanes[kLane]);
    const uint32_t magnitude = FloatToBits(x) & 0x7FFFFFFFu;
    if (magnitude > largest) largest = magnitude;
  }

  SHARDD_HOST_DEVICE void CopyLanes(double* out) const {
    for (int i = 0; i < 32; ++i) out[i] = lanes[i];
  }
  SHARDD_HOST_DEVICE uint32_t Largest() const { return largest; }
};

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_SCALAR_LANE_H_

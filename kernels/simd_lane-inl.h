// The lane type of one Highway vector: the operations of ScalarLane
// (scalar_lane.h), the same bits. Included inside namespace HWY_NAMESPACE of each
// target, without a guard.

namespace hn = hwy::HWY_NAMESPACE;

using LaneFloats = hn::ScalableTag<float>;
using LaneBits = hn::RebindToUnsigned<LaneFloats>;
using LaneWords = hn::Rebind<uint16_t, LaneFloats>;
using LaneHalves = hn::Rebind<hwy::float16_t, LaneFloats>;
using LaneDoubles = hn::ScalableTag<double>;

struct SimdBlockSums;

struct SimdLane {
  using V = hn::Vec<LaneFloats>;
  using Bits = hn::Vec<LaneBits>;
  using Words = hn::Vec<LaneWords>;
  static constexpr size_t kWidth = HWY_LANES(float);

  static HWY_INLINE V Flush(V x) {
    const Bits bits = hn::BitCast(LaneBits(), x);
    const Bits mask = hn::Set(LaneBits(), kFlushMask);
#if HWY_TARGET == HWY_AVX3
    // One test and one masked move instead of and, compare, move.
    return V{_mm512_maskz_mov_ps(_mm512_test_epi32_mask(bits.raw, mask.raw), x.raw)};
#else
    const auto tiny = hn::Eq(hn::And(bits, mask), hn::Zero(LaneBits()));
    return hn::IfThenZeroElse(hn::RebindMask(LaneFloats(), tiny), x);
#endif
  }

  static HWY_INLINE V Set(float x) { return Flush(hn::Set(LaneFloats(), x)); }
  static HWY_INLINE V Add(V a, V b) { return Flush(hn::Add(a, b)); }
  static HWY_INLINE V Sub(V a, V b) { return Flush(hn::Sub(a, b)); }
  static HWY_INLINE V MulUnflushed(V a, V b) { return hn::Mul(a, b); }
  static HWY_INLINE V FmaUnflushed(V a, V b, V c) { return hn::MulAdd(a, b, c); }
  static HWY_INLINE V Mul(V a, V b) { return Flush(MulUnflushed(a, b)); }
  static HWY_INLINE V Div(V a, V b) { return Flush(hn::Div(a, b)); }
  static HWY_INLINE V Fma(V a, V b, V c) { return Flush(FmaUnflushed(a, b, c)); }
  static HWY_INLINE V Sqrt(V a) { return hn::Sqrt(a); }

  static HWY_INLINE V Max(V a, V b) { return hn::IfThenElse(hn::Gt(a, b), a, b); }
  static HWY_INLINE V WithSignOf(V x, V size) {
    const V zero = hn::Zero(LaneFloats());
    const V negative = hn::IfThenElseZero(hn::Lt(x, zero), hn::Neg(size));
    return hn::IfThenElse(hn::Gt(x, zero), size, negative);
  }

  static HWY_INLINE V Canonical(V x) {
    const V nan = hn::BitCast(LaneFloats(), hn::Set(LaneBits(), kCanonicalNanBits));
    return hn::IfThenElse(hn::IsNaN(x), nan, x);
  }

  // Whether some lane of a, b or c is NaN.
  static HWY_INLINE bool AnyNan(V a, V b, V c) {
#if HWY_TARGET == HWY_AVX3
    const __mmask16 ab = _mm512_cmp_ps_mask(a.raw, b.raw, _CMP_UNORD_Q);
    return _kortestz_mask16_u8(ab, _mm512_cmp_ps_mask(c.raw, c.raw, _CMP_UNORD_Q)) == 0;
#else
    const __m256 ab = _mm256_cmp_ps(a.raw, b.raw, _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(ab, _mm256_cmp_ps(c.raw, c.raw, _CMP_UNORD_Q))) != 0;
#endif
  }

  static HWY_INLINE V LoadRaw(const float* p) { return hn::LoadU(LaneFloats(), p); }
  static HWY_INLINE V Load(const float* p) { return Flush(LoadRaw(p)); }
  // Of the cache line at p, which may lie beyond an array.
  static HWY_INLINE void PrefetchRead(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }
  static HWY_INLINE void Store(V x, float* p) { hn::StoreU(x, LaneFloats(), p); }

  template <DType kDType>
  static HWY_INLINE V LoadExact(const void* base, size_t index) {
    if constexpr (kDType == DType::kFloat32) {
      return LoadRaw(static_cast<const float*>(base) + index);
    } else {
      const Words words = hn::LoadU(LaneWords(), static_cast<const uint16_t*>(base) + index);
      if constexpr (kDType == DType::kBFloat16) {
        return WidenBFloat16(words);
      } else {
        return hn::PromoteTo(LaneFloats(), hn::BitCast(LaneHalves(), words));
      }
    }
  }

  template <DType kDType>
  static HWY_INLINE V LoadAs(const void* base, size_t index) {
    if constexpr (kDType == DType::kBFloat16) {
      // Flushed before it is widened: half the bits.
      const Words words = hn::LoadU(LaneWords(), static_cast<const uint16_t*>(base) + index);
      return WidenBFloat16(FlushBFloat16(words));
    } else {
      return Flush(LoadExact<kDType>(base, index));
    }
  }

  static HWY_INLINE V WidenBFloat16(Words words) {
    return hn::BitCast(LaneFloats(), hn::ShiftLeft<16>(hn::PromoteTo(LaneBits(), words)));
  }

  static HWY_INLINE Words FlushBFloat16(Words words) {
    const Words mask = hn::Set(LaneWords(), static_cast<uint16_t>(kFlushMask >> 16));
#if HWY_TARGET == HWY_AVX3
    return Words{_mm256_maskz_mov_epi16(_mm256_test_epi16_mask(words.raw, mask.raw), words.raw)};
#else
    return hn::IfThenZeroElse(hn::Eq(hn::And(words, mask), hn::Zero(LaneWords())), words);
#endif
  }

  template <bool kStream>
  static HWY_INLINE void StoreMaybeStreamed(V x, float* p) {
    if constexpr (kStream) {
      hn::Stream(x, LaneFloats(), p);
    } else {
      hn::StoreU(x, LaneFloats(), p);
    }
  }

  template <bool kStream>
  static HWY_INLINE void StoreWords(Words words, void* base, size_t index) {
    uint16_t* const p = static_cast<uint16_t*>(base) + index;
    if constexpr (kStream) {
      hn::Stream(words, LaneWords(), p);
    } else {
      hn::StoreU(words, LaneWords(), p);
    }
  }

  // Highway's own conversions to bf16 truncate.
  static HWY_INLINE Words UpperWords(Bits bits) {
    return hn::TruncateTo(LaneWords(), hn::ShiftRight<16>(bits));
  }
  static HWY_INLINE Words BFloat16TiesAway(V x) {
    return UpperWords(hn::Add(hn::BitCast(LaneBits(), x), hn::Set(LaneBits(), 0x8000u)));
  }
  static HWY_INLINE Words BFloat16TiesEven(V x) {
    const Bits bits = hn::BitCast(LaneBits(), x);
    const Bits odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(LaneBits(), 1u));
    return UpperWords(hn::Add(hn::Add(bits, odd), hn::Set(LaneBits(), 0x7FFFu)));
  }
  static HWY_INLINE Words Float16TiesEven(V x) {
    return hn::BitCast(LaneWords(), hn::DemoteTo(LaneHalves(), x));
  }

  static HWY_INLINE void StoreSplit(V x, uint16_t* weight, uint16_t* low) {
    hn::StoreU(BFloat16TiesAway(x), LaneWords(), weight);
    const Bits bits = hn::And(hn::BitCast(LaneBits(), x), hn::Set(LaneBits(), 0xFFFFu));
    hn::StoreU(hn::TruncateTo(LaneWords(), bits), LaneWords(), low);
  }
  // Elements index, index + 1, ... of a block (rounding.h).
  static HWY_INLINE void StoreStochastic(V x, uint64_t block_key, uint32_t index, uint16_t* p) {
    const LaneBits tag;
    Bits r = hn::Mul(hn::Iota(tag, index), hn::Set(tag, 0x9E3779B1u));
    r = hn::Add(r, hn::Set(tag, static_cast<uint32_t>(block_key)));
    r = hn::Mul(hn::Xor(r, hn::ShiftRight<16>(r)), hn::Set(tag, 0x85EBCA6Bu));
    r = hn::Xor(r, hn::Set(tag, static_cast<uint32_t>(block_key >> 32)));
    r = hn::Mul(hn::Xor(r, hn::ShiftRight<13>(r)), hn::Set(tag, 0xC2B2AE35u));
    const Bits rounded = hn::Add(hn::BitCast(tag, x), hn::ShiftRight<16>(r));
    hn::StoreU(UpperWords(rounded), LaneWords(), p);
  }
  static HWY_INLINE V LoadSplit(const uint16_t* weight, const uint16_t* low) {
    const Bits upper = hn::PromoteTo(LaneBits(), hn::LoadU(LaneWords(), weight));
    const Bits lower = hn::PromoteTo(LaneBits(), hn::LoadU(LaneWords(), low));
    const Bits whole = hn::Sub(upper, hn::ShiftRight<15>(lower));
    return hn::BitCast(LaneFloats(), hn::Or(hn::ShiftLeft<16>(whole), lower));
  }

  template <DType kDType, bool kStream>
  static HWY_INLINE void StoreWeight(V x, void* base, size_t index) {
    if constexpr (kDType == DType::kFloat32) {
      StoreMaybeStreamed<kStream>(x, static_cast<float*>(base) + index);
    } else if constexpr (kDType == DType::kBFloat16) {
      StoreWords<kStream>(BFloat16TiesAway(x), base, index);
    } else {
      StoreWords<kStream>(Float16TiesEven(x), base, index);
    }
  }

  template <DType kDType>
  static HWY_INLINE void StoreNearest(V x, void* base, size_t index) {
    if constexpr (kDType == DType::kFloat32) {
      Store(x, static_cast<float*>(base) + index);
    } else if constexpr (kDType == DType::kBFloat16) {
      StoreWords<false>(BFloat16TiesEven(x), base, index);
    } else {
      StoreWords<false>(Float16TiesEven(x), base, index);
    }
  }
};

// Two lanes in lock-step. A formula is one long chain of dependent operations, of
// which a core's scheduler holds about two: side by side in program order, they
// overlap.
template <class One>
struct PairOf {
  struct V {
    typename One::V lo, hi;
  };
  static constexpr size_t kWidth = 2 * One::kWidth;

  static HWY_INLINE V Set(float x) { return {One::Set(x), One::Set(x)}; }
  static HWY_INLINE V Add(V a, V b) { return {One::Add(a.lo, b.lo), One::Add(a.hi, b.hi)}; }
  static HWY_INLINE V Sub(V a, V b) { return {One::Sub(a.lo, b.lo), One::Sub(a.hi, b.hi)}; }
  static HWY_INLINE V Mul(V a, V b) { return {One::Mul(a.lo, b.lo), One::Mul(a.hi, b.hi)}; }
  static HWY_INLINE V Div(V a, V b) { return {One::Div(a.lo, b.lo), One::Div(a.hi, b.hi)}; }
  static HWY_INLINE V Sqrt(V a) { return {One::Sqrt(a.lo), One::Sqrt(a.hi)}; }
  static HWY_INLINE V Fma(V a, V b, V c) {
    return {One::Fma(a.lo, b.lo, c.lo), One::Fma(a.hi, b.hi, c.hi)};
  }
  static HWY_INLINE V MulUnflushed(V a, V b) {
    return {One::MulUnflushed(a.lo, b.lo), One::MulUnflushed(a.hi, b.hi)};
  }
  static HWY_INLINE V FmaUnflushed(V a, V b, V c) {
    return {One::FmaUnflushed(a.lo, b.lo, c.lo), One::FmaUnflushed(a.hi, b.hi, c.hi)};
  }
  static HWY_INLINE V Max(V a, V b) { return {One::Max(a.lo, b.lo), One::Max(a.hi, b.hi)}; }
  static HWY_INLINE V WithSignOf(V x, V size) {
    return {One::WithSignOf(x.lo, size.lo), One::WithSignOf(x.hi, size.hi)};
  }
  static HWY_INLINE V Canonical(V x) { return {One::Canonical(x.lo), One::Canonical(x.hi)}; }
  static HWY_INLINE bool AnyNan(V a, V b, V c) {
    return One::AnyNan(a.lo, b.lo, c.lo) || One::AnyNan(a.hi, b.hi, c.hi);
  }

  static HWY_INLINE V LoadRaw(const float* p) {
    return {One::LoadRaw(p), One::LoadRaw(p + One::kWidth)};
  }
  static HWY_INLINE V Load(const float* p) { return {One::Load(p), One::Load(p + One::kWidth)}; }
  static HWY_INLINE void Store(V x, float* p) {
    One::Store(x.lo, p);
    One::Store(x.hi, p + One::kWidth);
  }
  template <DType kDType>
  static HWY_INLINE V LoadAs(const void* base, size_t index) {
    return {One::template LoadAs<kDType>(base, index),
            One::template LoadAs<kDType>(base, index + One::kWidth)};
  }
  template <DType kDType, bool kStream>
  static HWY_INLINE void StoreWeight(V x, void* base, size_t index) {
    One::template StoreWeight<kDType, kStream>(x.lo, base, index);
    One::template StoreWeight<kDType, kStream>(x.hi, base, index + One::kWidth);
  }
};

// The fastest: AVX2 0.94 ns an element against 1.27 for SimdLane, AVX-512 0.78
// against 1.04, in the L2 cache of a Zen 4 core.
using SimdQuadLane = PairOf<PairOf<SimdLane>>;

// Two vectors of neighbouring elements, the even ones and the odd ones apart: two
// bf16 then widen by one shift and one mask, where in order they would need two
// promotions and two shifts. For the reduction; Store and LoadRaw keep this order
// (scratch rows), StoreInOrder and StoreNearest put elements back in theirs.
struct SimdEvenOddLane {
  using One = SimdLane;
  struct V {
    One::V even, odd;
  };
  using BlockSums = SimdBlockSums;
  static constexpr size_t kWidth = 2 * One::kWidth;

  static HWY_INLINE V Add(V a, V b) { return {One::Add(a.even, b.even), One::Add(a.odd, b.odd)}; }
  static HWY_INLINE V Canonical(V x) { return {One::Canonical(x.even), One::Canonical(x.odd)}; }
  static HWY_INLINE void PrefetchRead(const void* p) { One::PrefetchRead(p); }

  static HWY_INLINE V LoadRaw(const float* p) {
    return {One::LoadRaw(p), One::LoadRaw(p + One::kWidth)};
  }
  static HWY_INLINE void Store(V x, float* p) {
    One::Store(x.even, p);
    One::Store(x.odd, p + One::kWidth);
  }

  template <DType kDType>
  static HWY_INLINE V LoadAs(const void* base, size_t index) {
    if constexpr (kDType == DType::kBFloat16) {
      return LoadBFloat16(static_cast<const uint16_t*>(base) + index);
    } else {
      const One::V low = One::LoadAs<kDType>(base, index);
      const One::V high = One::LoadAs<kDType>(base, index + One::kWidth);
      return {hn::ConcatEven(LaneFloats(), high, low), hn::ConcatOdd(LaneFloats(), high, low)};
    }
  }

  static HWY_INLINE V LoadBFloat16(const uint16_t* p) {
    const hn::ScalableTag<uint16_t> words_tag;
    auto words = hn::LoadU(words_tag, p);
    const auto mask = hn::Set(words_tag, static_cast<uint16_t>(kFlushMask >> 16));
#if HWY_TARGET == HWY_AVX3
    words.raw = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(words.raw, mask.raw), words.raw);
#else
    words = hn::IfThenZeroElse(hn::Eq(hn::And(words, mask), hn::Zero(words_tag)), words);
#endif
    const One::Bits bits = hn::BitCast(LaneBits(), words);
    return {hn::BitCast(LaneFloats(), hn::ShiftLeft<16>(bits)),
            hn::BitCast(LaneFloats(), hn::And(bits, hn::Set(LaneBits(), 0xFFFF0000u)))};
  }

  // The first half of the elements in their order, and the second.
  static HWY_INLINE void InOrder(V x, One::V* low, One::V* high) {
#if HWY_TARGET == HWY_AVX3
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    low->raw = _mm512_permutex2var_ps(x.even.raw, first, x.odd.raw);
    high->raw = _mm512_permutex2var_ps(x.even.raw, second, x.odd.raw);
#else
    const One::V lower = hn::InterleaveLower(LaneFloats(), x.even, x.odd);
    const One::V upper = hn::InterleaveUpper(LaneFloats(), x.even, x.odd);
    *low = hn::ConcatLowerLower(LaneFloats(), upper, lower);
    *high = hn::ConcatUpperUpper(LaneFloats(), upper, lower);
#endif
  }

  template <bool kStream>
  static HWY_INLINE void StoreInOrder(V x, float* p) {
    One::V low, high;
    InOrder(x, &low, &high);
    One::StoreMaybeStreamed<kStream>(low, p);
    One::StoreMaybeStreamed<kStream>(high, p + One::kWidth);
  }
  template <DType kDType>
  static HWY_INLINE void StoreNearest(V x, void* base, size_t index) {
    One::V low, high;
    InOrder(x, &low, &high);
    One::StoreNearest<kDType>(low, base, index);
    One::StoreNearest<kDType>(high, base, index + One::kWidth);
  }
};

// The 32 lane sums of a block as vectors of doubles. Those of one
// SimdEvenOddLane::V are four vectors: lower and upper half of the even elements,
// then of the odd ones.
struct SimdBlockSums {
  static constexpr size_t kDoubles = HWY_LANES(double);

  template <size_t kLane>
  HWY_INLINE void Add(SimdEvenOddLane::V x) {
    AddOne<kLane / kDoubles>(x.even);
    AddOne<kLane / kDoubles + 2>(x.odd);
  }

  template <size_t kIndex>
  HWY_INLINE void AddOne(SimdLane::V x) {
    const hn::Half<LaneFloats> half;
    AddDoubles<kIndex>(hn::PromoteTo(LaneDoubles(), hn::LowerHalf(half, x)));
    AddDoubles<kIndex + 1>(hn::PromoteTo(LaneDoubles(), hn::UpperHalf(half, x)));
    const auto magnitude = hn::And(hn::BitCast(LaneBits(), x), hn::Set(LaneBits(), 0x7FFFFFFFu));
    largest = hn::Max(largest, magnitude);
  }

  template <size_t kIndex>
  HWY_INLINE void AddDoubles(hn::Vec<LaneDoubles> x) {
    lanes[kIndex] = hn::MulAdd(x, x, lanes[kIndex]);
  }

  HWY_INLINE void CopyLanes(double* out) const {
    for (size_t i = 0; i < 32 / kDoubles; ++i) {
      double values[kDoubles];
      hn::StoreU(lanes[i], LaneDoubles(), values);
      const size_t odd = i % 4 / 2, upper = i % 2, first = i / 4 * SimdEvenOddLane::kWidth;
      for (size_t j = 0; j < kDoubles; ++j) {
        out[first + 2 * (upper * kDoubles + j) + odd] = values[j];
      }
    }
  }

  HWY_INLINE uint32_t Largest() const {
    uint32_t bits[HWY_LANES(uint32_t)], result = 0;
    hn::StoreU(largest, LaneBits(), bits);
    for (const uint32_t value : bits) result = value > result ? value : result;
    return result;
  }

  hn::Vec<LaneDoubles> lanes[32 / kDoubles];
  hn::Vec<LaneBits> largest;
};

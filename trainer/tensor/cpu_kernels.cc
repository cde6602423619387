#include "trainer/tensor/cpu_kernels.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "trainer/tensor/cpu_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace shardd::tensor::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Storage types as the templates see them.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <class D>
HWY_INLINE hn::Vec<D> LoadFp32(D d, const float* p) {
  return hn::LoadU(d, p);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadFp32(D d, const Bf16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<uint32_t, D> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadFp32(D d, const Fp16* p) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}

template <class D, class V>
HWY_INLINE void StoreFp32(D d, V v, float* p) {
  hn::StoreU(v, d, p);
}

// To nearest even; a NaN keeps its sign and becomes quiet.
template <class D, class V>
HWY_INLINE void StoreFp32(D d, V v, Bf16* p) {
  const hn::Rebind<int16_t, D> d16;
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  const auto kept = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
  // The arithmetic shift leaves values that fit 16 bits, so DemoteTo is exact.
  const auto high = hn::ShiftRight<16>(hn::BitCast(di, kept));
  hn::StoreU(hn::DemoteTo(d16, high), d16, reinterpret_cast<int16_t*>(p));
}

// Calls f(descriptor, index) over [0, count): whole vectors, then single lanes.
template <class F>
HWY_INLINE void ForEach(size_t count, const F& f) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) f(d, i);
  const hn::CappedTag<float, 1> d1;
  for (; i < count; ++i) f(d1, i);
}

// Folds f(descriptor, index) over [0, count) with `add` from `init`, four vectors
// at a time so that latency does not bound it. The order depends on count alone.
template <class F, class Op, class Reduce>
HWY_INLINE float Fold(size_t count, float init, const F& f, const Op& op, const Reduce& reduce) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  auto a0 = hn::Set(d, init), a1 = a0, a2 = a0, a3 = a0;
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    a0 = op(a0, f(d, i));
    a1 = op(a1, f(d, i + lanes));
    a2 = op(a2, f(d, i + 2 * lanes));
    a3 = op(a3, f(d, i + 3 * lanes));
  }
  for (; i + lanes <= count; i += lanes) a0 = op(a0, f(d, i));
  const hn::CappedTag<float, 1> d1;
  auto tail = hn::Set(d1, init);
  for (; i < count; ++i) tail = op(tail, f(d1, i));
  const float whole = reduce(d, op(op(a0, a1), op(a2, a3)));
  return hn::GetLane(op(hn::Set(d1, whole), tail));
}

template <class F>
HWY_INLINE float Sum(size_t count, const F& f) {
  return Fold(
      count, 0.0f, f, [](auto a, auto b) { return hn::Add(a, b); },
      [](auto d, auto v) { return hn::GetLane(hn::SumOfLanes(d, v)); });
}

template <class F>
HWY_INLINE float Maximum(size_t count, const F& f) {
  return Fold(
      count, -INFINITY, f, [](auto a, auto b) { return hn::Max(a, b); },
      [](auto d, auto v) { return hn::GetLane(hn::MaxOfLanes(d, v)); });
}

// e^x within 2 ulp; 0 below -87, e^88 above 88, NaN for NaN. The polynomial is
// the classical minimax one on |r| <= ln(2)/2.
template <class D, class V>
HWY_INLINE V Exp(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V clamped = hn::Min(hn::Max(x, hn::Set(d, -87.0f)), hn::Set(d, 88.0f));
  const V n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504f)));
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  V p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, n));
  const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  const V flushed = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), scaled);
  return hn::IfThenElse(hn::IsNaN(x), x, flushed);
}

template <class D, class V>
HWY_INLINE V Sigmoid(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, Exp(d, hn::Neg(x))));
}

// Runs `body` with pointers of the buffers' types.
template <class Body>
HWY_INLINE void WithInput(ConstBuffer in, const Body& body) {
  switch (in.dtype) {
    case DType::kBFloat16:
      return body(static_cast<const Bf16*>(in.data));
    case DType::kFloat16:
      return body(static_cast<const Fp16*>(in.data));
    default:
      return body(static_cast<const float*>(in.data));
  }
}
// As WithInput, for what activations and their gradients are: fp32 or bf16.
template <class Body>
HWY_INLINE void WithActivation(ConstBuffer in, const Body& body) {
  if (in.dtype == DType::kBFloat16) return body(static_cast<const Bf16*>(in.data));
  return body(static_cast<const float*>(in.data));
}
template <class Body>
HWY_INLINE void WithOutput(Buffer out, const Body& body) {
  if (out.dtype == DType::kBFloat16) return body(static_cast<Bf16*>(out.data));
  return body(static_cast<float*>(out.data));
}

void CastImpl(ConstBuffer in, size_t count, Buffer out) {
  WithInput(in, [&](auto* x) {
    WithOutput(out, [&](auto* y) {
      ForEach(count, [&](auto d, size_t i) { StoreFp32(d, LoadFp32(d, x + i), y + i); });
    });
  });
}

void CastScaledImpl(ConstBuffer in, float scale, size_t count, float* out) {
  WithActivation(in, [&](auto* x) {
    ForEach(count, [&](auto d, size_t i) {
      StoreFp32(d, hn::Mul(LoadFp32(d, x + i), hn::Set(d, scale)), out + i);
    });
  });
}

void AddImpl(ConstBuffer a, ConstBuffer b, size_t count, Buffer out) {
  WithActivation(a, [&](auto* x) {
    WithActivation(b, [&](auto* y) {
      WithOutput(out, [&](auto* z) {
        ForEach(count, [&](auto d, size_t i) {
          StoreFp32(d, hn::Add(LoadFp32(d, x + i), LoadFp32(d, y + i)), z + i);
        });
      });
    });
  });
}

void AddRowsIntoImpl(ConstBuffer x, size_t rows, size_t cols, float* sum) {
  WithActivation(x, [&](auto* data) {
    for (size_t r = 0; r < rows; ++r) {
      auto* row = data + r * cols;
      ForEach(cols, [&](auto d, size_t i) {
        StoreFp32(d, hn::Add(LoadFp32(d, sum + i), LoadFp32(d, row + i)), sum + i);
      });
    }
  });
}

// gelu(x) = x * sigmoid(u), u = 2 * sqrt(2/pi) * (x + 0.044715 x^3): the tanh form,
// since (1 + tanh(v)) / 2 = sigmoid(2v).
constexpr float kGeluLinear = 1.5957691216f;  // 2 * sqrt(2/pi)
constexpr float kGeluCubic = 0.0713548163f;   // the same * 0.044715

void GeluImpl(ConstBuffer in, size_t count, Buffer out) {
  WithActivation(in, [&](auto* x) {
    WithOutput(out, [&](auto* y) {
      ForEach(count, [&](auto d, size_t i) {
        const auto v = LoadFp32(d, x + i);
        const auto slope =
            hn::MulAdd(hn::Mul(v, v), hn::Set(d, kGeluCubic), hn::Set(d, kGeluLinear));
        StoreFp32(d, hn::Mul(v, Sigmoid(d, hn::Mul(v, slope))), y + i);
      });
    });
  });
}

void GeluBackwardImpl(ConstBuffer in, ConstBuffer grad, size_t count, Buffer out) {
  WithActivation(in, [&](auto* x) {
    WithActivation(grad, [&](auto* dy) {
      WithOutput(out, [&](auto* dx) {
        ForEach(count, [&](auto d, size_t i) {
          const auto v = LoadFp32(d, x + i);
          const auto v2 = hn::Mul(v, v);
          const auto linear = hn::Set(d, kGeluLinear);
          const auto slope = hn::MulAdd(v2, hn::Set(d, kGeluCubic), linear);
          const auto s = Sigmoid(d, hn::Mul(v, slope));
          const auto du = hn::MulAdd(v2, hn::Set(d, 3 * kGeluCubic), linear);
          const auto ds = hn::Mul(s, hn::Sub(hn::Set(d, 1.0f), s));
          const auto derivative = hn::MulAdd(hn::Mul(v, ds), du, s);
          StoreFp32(d, hn::Mul(derivative, LoadFp32(d, dy + i)), dx + i);
        });
      });
    });
  });
}

void LayerNormRowImpl(ConstBuffer in, const float* gain, const float* bias, float eps, size_t cols,
                      float* mean, float* rstd, Buffer out) {
  WithActivation(in, [&](auto* x) {
    const float n = static_cast<float>(cols);
    const float m = Sum(cols, [&](auto d, size_t i) { return LoadFp32(d, x + i); }) / n;
    const float variance = Sum(cols,
                               [&](auto d, size_t i) {
                                 const auto c = hn::Sub(LoadFp32(d, x + i), hn::Set(d, m));
                                 return hn::Mul(c, c);
                               }) /
                           n;
    const float r = 1.0f / std::sqrt(variance + eps);
    *mean = m;
    *rstd = r;
    WithOutput(out, [&](auto* y) {
      ForEach(cols, [&](auto d, size_t i) {
        const auto hat = hn::Mul(hn::Sub(LoadFp32(d, x + i), hn::Set(d, m)), hn::Set(d, r));
        StoreFp32(d, hn::MulAdd(hat, LoadFp32(d, gain + i), LoadFp32(d, bias + i)), y + i);
      });
    });
  });
}

template <class X, class G, class Out>
HWY_INLINE void LayerNormBackwardTyped(const X* x, const float* gain, float mean, float rstd,
                                       const G* dy, size_t cols, bool accumulate_dx, Out* dx,
                                       float* d_gain, float* d_bias) {
  const auto hat = [&](auto d, size_t i) {
    return hn::Mul(hn::Sub(LoadFp32(d, x + i), hn::Set(d, mean)), hn::Set(d, rstd));
  };
  const auto scaled = [&](auto d, size_t i) {
    return hn::Mul(LoadFp32(d, dy + i), LoadFp32(d, gain + i));
  };
  const float n = static_cast<float>(cols);
  const float c1 = Sum(cols, scaled) / n;
  const float c2 =
      Sum(cols, [&](auto d, size_t i) { return hn::Mul(scaled(d, i), hat(d, i)); }) / n;
  ForEach(cols, [&](auto d, size_t i) {
    const auto h = hat(d, i);
    const auto g = LoadFp32(d, dy + i);
    StoreFp32(d, hn::MulAdd(g, h, LoadFp32(d, d_gain + i)), d_gain + i);
    StoreFp32(d, hn::Add(g, LoadFp32(d, d_bias + i)), d_bias + i);
    const auto centred = hn::Sub(scaled(d, i), hn::Set(d, c1));
    auto v = hn::Mul(hn::NegMulAdd(h, hn::Set(d, c2), centred), hn::Set(d, rstd));
    if (accumulate_dx) v = hn::Add(v, LoadFp32(d, dx + i));
    StoreFp32(d, v, dx + i);
  });
}

void LayerNormBackwardRowImpl(ConstBuffer in, const float* gain, float mean, float rstd,
                              ConstBuffer grad, size_t cols, bool accumulate_dx, Buffer out,
                              float* d_gain, float* d_bias) {
  WithActivation(in, [&](auto* x) {
    WithActivation(grad, [&](auto* dy) {
      WithOutput(out, [&](auto* dx) {
        LayerNormBackwardTyped(x, gain, mean, rstd, dy, cols, accumulate_dx, dx, d_gain, d_bias);
      });
    });
  });
}

HWY_INLINE void Zero(float* out, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) out[i] = 0.0f;
}

float SoftmaxRowImpl(float* s, size_t valid, size_t padded) {
  const float m = Maximum(valid, [&](auto d, size_t i) { return LoadFp32(d, s + i); });
  ForEach(valid, [&](auto d, size_t i) {
    StoreFp32(d, Exp(d, hn::Sub(LoadFp32(d, s + i), hn::Set(d, m))), s + i);
  });
  const float sum = Sum(valid, [&](auto d, size_t i) { return LoadFp32(d, s + i); });
  const float inverse = 1.0f / sum;
  ForEach(valid, [&](auto d, size_t i) {
    StoreFp32(d, hn::Mul(LoadFp32(d, s + i), hn::Set(d, inverse)), s + i);
  });
  Zero(s, valid, padded);
  return m + std::log(sum);
}

void SoftmaxFromLseRowImpl(float* s, float lse, size_t valid, size_t padded) {
  ForEach(valid, [&](auto d, size_t i) {
    StoreFp32(d, Exp(d, hn::Sub(LoadFp32(d, s + i), hn::Set(d, lse))), s + i);
  });
  Zero(s, valid, padded);
}

void SoftmaxBackwardRowImpl(const float* p, float dot, size_t count, float* d_p) {
  ForEach(count, [&](auto d, size_t i) {
    StoreFp32(d, hn::Mul(LoadFp32(d, p + i), hn::Sub(LoadFp32(d, d_p + i), hn::Set(d, dot))),
              d_p + i);
  });
}

float DotImpl(const float* a, const float* b, size_t count) {
  return Sum(count,
             [&](auto d, size_t i) { return hn::Mul(LoadFp32(d, a + i), LoadFp32(d, b + i)); });
}

float LogSumExpRowImpl(ConstBuffer in, size_t count) {
  float result = 0;
  WithActivation(in, [&](auto* x) {
    const float m = Maximum(count, [&](auto d, size_t i) { return LoadFp32(d, x + i); });
    const float sum = Sum(count, [&](auto d, size_t i) {
      return Exp(d, hn::Sub(LoadFp32(d, x + i), hn::Set(d, m)));
    });
    result = m + std::log(sum);
  });
  return result;
}

void CrossEntropyBackwardRowImpl(ConstBuffer in, float lse, float scale, size_t count, Buffer out) {
  WithActivation(in, [&](auto* x) {
    WithOutput(out, [&](auto* dx) {
      ForEach(count, [&](auto d, size_t i) {
        const auto p = Exp(d, hn::Sub(LoadFp32(d, x + i), hn::Set(d, lse)));
        StoreFp32(d, hn::Mul(p, hn::Set(d, scale)), dx + i);
      });
    });
  });
}

}  // namespace shardd::tensor::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace shardd::tensor::cpu {

HWY_EXPORT(CastImpl);
HWY_EXPORT(CastScaledImpl);
HWY_EXPORT(AddImpl);
HWY_EXPORT(AddRowsIntoImpl);
HWY_EXPORT(GeluImpl);
HWY_EXPORT(GeluBackwardImpl);
HWY_EXPORT(LayerNormRowImpl);
HWY_EXPORT(LayerNormBackwardRowImpl);
HWY_EXPORT(SoftmaxRowImpl);
HWY_EXPORT(SoftmaxFromLseRowImpl);
HWY_EXPORT(SoftmaxBackwardRowImpl);
HWY_EXPORT(DotImpl);
HWY_EXPORT(LogSumExpRowImpl);
HWY_EXPORT(CrossEntropyBackwardRowImpl);

void Cast(ConstBuffer in, size_t count, Buffer out) {
  HWY_DYNAMIC_DISPATCH(CastImpl)(in, count, out);
}
void CastScaled(ConstBuffer in, float scale, size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(CastScaledImpl)(in, scale, count, out);
}
void Add(ConstBuffer a, ConstBuffer b, size_t count, Buffer out) {
  HWY_DYNAMIC_DISPATCH(AddImpl)(a, b, count, out);
}
void AddRowsInto(ConstBuffer x, size_t rows, size_t cols, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddRowsIntoImpl)(x, rows, cols, sum);
}
void Gelu(ConstBuffer x, size_t count, Buffer y) { HWY_DYNAMIC_DISPATCH(GeluImpl)(x, count, y); }
void GeluBackward(ConstBuffer x, ConstBuffer dy, size_t count, Buffer dx) {
  HWY_DYNAMIC_DISPATCH(GeluBackwardImpl)(x, dy, count, dx);
}
void LayerNormRow(ConstBuffer x, const float* gain, const float* bias, float eps, size_t cols,
                  float* mean, float* rstd, Buffer y) {
  HWY_DYNAMIC_DISPATCH(LayerNormRowImpl)(x, gain, bias, eps, cols, mean, rstd, y);
}
void LayerNormBackwardRow(ConstBuffer x, const float* gain, float mean, float rstd, ConstBuffer dy,
                          size_t cols, bool accumulate_dx, Buffer dx, float* d_gain,
                          float* d_bias) {
  HWY_DYNAMIC_DISPATCH(LayerNormBackwardRowImpl)
  (x, gain, mean, rstd, dy, cols, accumulate_dx, dx, d_gain, d_bias);
}
float SoftmaxRow(float* scores, size_t valid, size_t padded) {
  return HWY_DYNAMIC_DISPATCH(SoftmaxRowImpl)(scores, valid, padded);
}
void SoftmaxFromLseRow(float* scores, float lse, size_t valid, size_t padded) {
  HWY_DYNAMIC_DISPATCH(SoftmaxFromLseRowImpl)(scores, lse, valid, padded);
}
void SoftmaxBackwardRow(const float* p, float dot, size_t count, float* d_p) {
  HWY_DYNAMIC_DISPATCH(SoftmaxBackwardRowImpl)(p, dot, count, d_p);
}
float Dot(const float* a, const float* b, size_t count) {
  return HWY_DYNAMIC_DISPATCH(DotImpl)(a, b, count);
}
float LogSumExpRow(ConstBuffer x, size_t count) {
  return HWY_DYNAMIC_DISPATCH(LogSumExpRowImpl)(x, count);
}
void CrossEntropyBackwardRow(ConstBuffer x, float lse, float scale, size_t count, Buffer d) {
  HWY_DYNAMIC_DISPATCH(CrossEntropyBackwardRowImpl)(x, lse, scale, count, d);
}

}  // namespace shardd::tensor::cpu
#endif  // HWY_ONCE

// Casts over a lane type; included inside each CPU namespace, as adamw-inl.h is.

template <class Lane, DType kDType>
struct WeightCast {
  static constexpr DType kIn = DType::kFloat32, kOut = kDType;
  static SHARDD_LANE_FUNCTION void Apply(const void* in, size_t i, void* out) {
    const auto x = Lane::Canonical(Lane::template LoadAs<DType::kFloat32>(in, i));
    Lane::template StoreWeight<kDType, false>(x, out, i);
  }
};

template <class Lane, DType kDType>
struct GradCast {
  static constexpr DType kIn = DType::kFloat32, kOut = kDType;
  static SHARDD_LANE_FUNCTION void Apply(const void* in, size_t i, void* out) {
    const auto x = Lane::Canonical(Lane::template LoadAs<DType::kFloat32>(in, i));
    Lane::template StoreNearest<kDType>(x, out, i);
  }
};

template <class Lane, DType kDType>
struct WideningCast {
  static constexpr DType kIn = kDType, kOut = DType::kFloat32;
  static SHARDD_LANE_FUNCTION void Apply(const void* in, size_t i, void* out) {
    const auto x = Lane::Canonical(Lane::template LoadExact<kDType>(in, i));
    Lane::Store(x, static_cast<float*>(out) + i);
  }
};

// Whole lanes, then the rest by way of padded copies: nothing beyond the arrays
// is read or written.
template <class Lane, class Cast>
void CastLoop(const void* in, size_t count, void* out) {
  size_t i = 0;
  for (; i + Lane::kWidth <= count; i += Lane::kWidth) Cast::Apply(in, i, out);
  if (i == count) return;
  alignas(64) float padded_in[Lane::kWidth] = {};
  alignas(64) float padded_out[Lane::kWidth] = {};
  constexpr size_t kInSize = DTypeSize(Cast::kIn), kOutSize = DTypeSize(Cast::kOut);
  std::memcpy(padded_in, static_cast<const char*>(in) + i * kInSize, (count - i) * kInSize);
  Cast::Apply(padded_in, 0, padded_out);
  std::memcpy(static_cast<char*>(out) + i * kOutSize, padded_out, (count - i) * kOutSize);
}

// CastLoop with Cast<Lane, dtype>.
template <class Lane, template <class, DType> class Cast>
void CastAny(const void* in, size_t count, void* out, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CastLoop<Lane, Cast<Lane, DType::kFloat32>>(in, count, out);
    case DType::kBFloat16:
      return CastLoop<Lane, Cast<Lane, DType::kBFloat16>>(in, count, out);
    case DType::kFloat16:
      return CastLoop<Lane, Cast<Lane, DType::kFloat16>>(in, count, out);
  }
}

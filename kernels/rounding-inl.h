// Stochastic rounding over a lane type; included inside each CPU namespace.

template <class Lane>
void StochasticLoop(const float* in, size_t count, uint64_t block_key, uint32_t first,
                    uint16_t* out) {
  const auto round = [&](const float* from, size_t i, uint16_t* to) {
    const auto x = Lane::Canonical(Lane::Load(from));
    Lane::StoreStochastic(x, block_key, first + static_cast<uint32_t>(i), to);
  };
  size_t i = 0;
  for (; i + Lane::kWidth <= count; i += Lane::kWidth) round(in + i, i, out + i);
  if (i == count) return;
  float padded[Lane::kWidth] = {};
  uint16_t rounded[Lane::kWidth];
  std::memcpy(padded, in + i, (count - i) * sizeof(float));
  round(padded, i, rounded);
  std::memcpy(out + i, rounded, (count - i) * sizeof(uint16_t));
}

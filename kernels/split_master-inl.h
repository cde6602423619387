// The split master over a lane type; included inside each CPU namespace.

// Whole lanes, then the rest by way of padded copies: nothing beyond the arrays is touched.
template <class Lane>
void SplitLoop(const float* master, size_t count, uint16_t* weights, uint16_t* low) {
  size_t i = 0;
  for (; i + Lane::kWidth <= count; i += Lane::kWidth) {
    Lane::StoreSplit(Lane::Canonical(Lane::LoadRaw(master + i)), weights + i, low + i);
  }
  if (i == count) return;
  float padded[Lane::kWidth] = {};
  uint16_t upper[Lane::kWidth], lower[Lane::kWidth];
  std::memcpy(padded, master + i, (count - i) * sizeof(float));
  Lane::StoreSplit(Lane::Canonical(Lane::LoadRaw(padded)), upper, lower);
  std::memcpy(weights + i, upper, (count - i) * sizeof(uint16_t));
  std::memcpy(low + i, lower, (count - i) * sizeof(uint16_t));
}

template <class Lane>
void JoinLoop(const uint16_t* weights, const uint16_t* low, size_t count, float* master) {
  size_t i = 0;
  for (; i + Lane::kWidth <= count; i += Lane::kWidth) {
    Lane::Store(Lane::LoadSplit(weights + i, low + i), master + i);
  }
  if (i == count) return;
  uint16_t upper[Lane::kWidth] = {}, lower[Lane::kWidth] = {};
  float padded[Lane::kWidth];
  std::memcpy(upper, weights + i, (count - i) * sizeof(uint16_t));
  std::memcpy(lower, low + i, (count - i) * sizeof(uint16_t));
  Lane::Store(Lane::LoadSplit(upper, lower), padded);
  std::memcpy(master + i, padded, (count - i) * sizeof(float));
}

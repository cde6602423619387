// Counter-based random numbers: the value at (seed, stream, index) is a pure
// function of the three, so whoever asks, and in whatever order, gets the same.
#ifndef SHARDD_TRAINER_RANDOM_COUNTER_RANDOM_H_
#define SHARDD_TRAINER_RANDOM_COUNTER_RANDOM_H_

#include <array>
#include <cstdint>
#include <string_view>

namespace shardd::random {

// Philox 4x32 with 10 rounds (Salmon et al., 2011).
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A 64-bit stream id for a name.
uint64_t StreamOf(std::string_view name);

// One stream of one seed. Copyable, stateless, thread-safe.
class CounterRandom {
 public:
  CounterRandom(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}

  // 64 uniform bits.
  uint64_t Bits(uint64_t index) const;
  // Uniform in [0, bound), without bias beyond 2^-64; 0 if bound is 0.
  uint64_t Below(uint64_t index, uint64_t bound) const;
  // Standard normal; elements 2i and 2i+1 come from one block.
  double Normal(uint64_t index) const;

 private:
  uint64_t seed_;
  uint64_t stream_;
};

// A permutation of [0, size) keyed by (seed, stream), evaluated point by point.
class Permutation {
 public:
  Permutation(uint64_t seed, uint64_t stream, uint64_t size);
  // Where `index` < size goes.
  uint64_t operator()(uint64_t index) const;

 private:
  CounterRandom random_;
  uint64_t size_;
  int half_bits_;  // the Feistel network permutes [0, 4^half_bits)
};

}  // namespace shardd::random

#endif  // SHARDD_TRAINER_RANDOM_COUNTER_RANDOM_H_

// Stochastic rounding to bf16: the fp32 value's low half, plus 16 random bits, carries into the
// upper half or not. On average nothing is lost of an update that is too small for a bf16.
//
// The bits are a hash of a seed, of how many optimizer steps the parameter carries, of the element
// in the flat space, and of which array it is: no state, so that a redo, another number of ranks or
// another ISA rounds the same way.
#ifndef SHARDD_KERNELS_ROUNDING_H_
#define SHARDD_KERNELS_ROUNDING_H_

#include <cstddef>
#include <cstdint>

#include "kernels/float_bits.h"
#include "kernels/isa.h"

namespace shardd::kernels {

// One array of a parameter after some step. `array` 0 is the working weight, 1 and up the moments.
struct RoundingKey {
  uint64_t seed = 0;
  uint64_t steps = 0;  // applied to the parameter, this one included
  uint32_t array = 0;
};

// Elements that have a key of their own.
inline constexpr uint64_t kRoundingBlock = 4096;

// splitmix64's finalizer (Steele et al. 2014).
SHARDD_HOST_DEVICE uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The key of the elements [block, block + 1) * kRoundingBlock.
SHARDD_HOST_DEVICE uint64_t BlockKey(const RoundingKey& key, uint64_t block) {
  uint64_t bits = MixBits(key.seed + 0x9E3779B97F4A7C15u);
  bits = MixBits(bits + key.steps);
  return MixBits(bits + (static_cast<uint64_t>(key.array) << 56) + block);
}

// 16 random bits for element `index` of a block: murmur3's finalizer (Appleby) of half the key, the
// other half coming in between.
SHARDD_HOST_DEVICE uint32_t RandomBits(uint64_t block_key, uint32_t index) {
  uint32_t x = static_cast<uint32_t>(block_key) + index * 0x9E3779B1u;
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x ^= static_cast<uint32_t>(block_key >> 32);
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x >> 16;
}

// `x` is no NaN but the canonical one.
SHARDD_HOST_DEVICE uint16_t BFloat16Stochastic(float x, uint32_t random_bits) {
  return static_cast<uint16_t>((FloatToBits(x) + random_bits) >> 16);
}

// Elements [element, element + count) of the flat space, flushed, NaN canonical.
void RoundStochastically(Isa isa, const float* in, size_t count, const RoundingKey& key,
                         uint64_t element, uint16_t* out);

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_ROUNDING_H_

#include "trainer/random/counter_random.h"

#include <cmath>
#include <numbers>

namespace shardd::random {
namespace {

std::array<uint32_t, 4> Block(uint64_t seed, uint64_t stream, uint64_t index) {
  return Philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                     static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                    {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

uint64_t Join(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

// In (0, 1): 53 bits and a half, so that its logarithm exists.
double OpenUnit(uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c;
}

uint64_t StreamOf(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  // Spread the last characters over all bits.
  hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccd;
  hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53;
  return hash ^ (hash >> 33);
}

uint64_t CounterRandom::Bits(uint64_t index) const {
  const auto block = Block(seed_, stream_, index >> 1);
  return (index & 1) == 0 ? Join(block[0], block[1]) : Join(block[2], block[3]);
}

uint64_t CounterRandom::Below(uint64_t index, uint64_t bound) const {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(Bits(index)) * bound >> 64);
}

double CounterRandom::Normal(uint64_t index) const {
  const auto block = Block(seed_, stream_, index >> 1);
  const double radius = std::sqrt(-2.0 * std::log(OpenUnit(Join(block[0], block[1]))));
  const double angle = 2.0 * std::numbers::pi * OpenUnit(Join(block[2], block[3]));
  return (index & 1) == 0 ? radius * std::cos(angle) : radius * std::sin(angle);
}

Permutation::Permutation(uint64_t seed, uint64_t stream, uint64_t size)
    : random_(seed, stream), size_(size), half_bits_(1) {
  while (half_bits_ < 32 && (uint64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
}

uint64_t Permutation::operator()(uint64_t index) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  // A Feistel network permutes a power of four; walking its cycle until the value
  // is in range makes that a permutation of [0, size). Under 4 turns on average.
  do {
    uint64_t left = index >> half_bits_, right = index & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t mixed = random_.Bits((right * 8 + round) * 2) & mask;
      const uint64_t swapped = left ^ mixed;
      left = right;
      right = swapped;
    }
    index = left << half_bits_ | right;
  } while (index >= size_);
  return index;
}

}  // namespace shardd::random

#include "server/step/chunk_gate.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>
#include <vector>

namespace shardd::step {
namespace {

TEST(ChunkGate, OneClaimAtATime) {
  ChunkGate gate(2);
  EXPECT_TRUE(gate.TryClaim(0));
  EXPECT_FALSE(gate.TryClaim(0));
  EXPECT_TRUE(gate.TryClaim(1));
  gate.Release(0);
  EXPECT_TRUE(gate.TryClaim(0));
}

TEST(ChunkGate, ClaimWaitsForTheRelease) {
  ChunkGate gate(1);
  gate.Claim(0);
  int written = 0;
  std::thread waiter([&] {
    const ChunkClaim claim(&gate, 0);
    EXPECT_EQ(written, 1);
  });
  written = 1;
  gate.Release(0);
  waiter.join();
  EXPECT_TRUE(gate.TryClaim(0));
}

// Writers fill a chunk with one value; a copier must never see two.
TEST(ChunkGate, NobodySeesATornChunk) {
  constexpr int kChunks = 4, kRounds = 2000;
  ChunkGate gate(kChunks);
  std::array<std::array<uint64_t, 64>, kChunks> data{};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        auto& chunk = data[static_cast<size_t>(i % kChunks)];
        const ChunkClaim claim(&gate, static_cast<uint64_t>(i % kChunks));
        const uint64_t next = chunk[0] + 1;
        for (uint64_t& value : chunk) value = next;
      }
    });
  }
  for (int i = 0; i < kRounds; ++i) {
    const ChunkClaim claim(&gate, static_cast<uint64_t>(i % kChunks));
    const auto copy = data[static_cast<size_t>(i % kChunks)];
    for (uint64_t value : copy) ASSERT_EQ(value, copy[0]);
  }
  for (std::thread& thread : threads) thread.join();
  uint64_t sum = 0;
  for (const auto& chunk : data) sum += chunk[63];
  EXPECT_EQ(sum, 2u * kRounds);
}

}  // namespace
}  // namespace shardd::step

// The harnesses on the same random inputs every day, without a fuzzer: they are linked
// in, one a test. What they check aborts.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

TEST(RandomInputs, TheDaemonAnswersAndLives) {
  std::mt19937_64 random(20240607);
  for (int run = 0; run < 400; ++run) {
    std::vector<uint8_t> input(random() % 600);
    // Small values are what counts and indices look like.
    const uint64_t mask = run % 3 == 0 ? 0x03 : 0xff;
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random() & mask);
    // The first byte says what is put right: every choice comes.
    if (!input.empty()) input[0] = static_cast<uint8_t>(run);
    ASSERT_EQ(LLVMFuzzerTestOneInput(input.data(), input.size()), 0);
  }
}

}  // namespace

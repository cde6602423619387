#include "kernels/isa.h"

#include <gtest/gtest.h>

#include <thread>

namespace shardd::kernels {
namespace {

TEST(Isa, ScalarIsAlwaysThereAndTheBestIsLast) {
  const std::vector<Isa> isas = SupportedIsas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.front(), Isa::kScalar);
  EXPECT_EQ(isas.back(), BestIsa());
  for (size_t i = 1; i < isas.size(); ++i) EXPECT_LT(isas[i - 1], isas[i]);
}

TEST(Isa, NamesAreDistinct) {
  EXPECT_STREQ(IsaName(Isa::kScalar), "scalar");
  EXPECT_STREQ(IsaName(Isa::kAvx2), "avx2");
  EXPECT_STREQ(IsaName(Isa::kAvx512), "avx512");
}

// volatile: at run time, on the hardware.
float Halve(float x) {
  volatile float value = x;
  value = value * 0.5f;
  return value;
}

TEST(ScopedFlushToZero, FlushesWithinItsScopeOnItsThread) {
  const float least_normal = 0x1p-126f;
  EXPECT_EQ(Halve(least_normal), 0x1p-127f);
  {
    ScopedFlushToZero flush;
    EXPECT_EQ(Halve(least_normal), 0.0f);
    { ScopedFlushToZero nested; }
    EXPECT_EQ(Halve(least_normal), 0.0f);
  }
  EXPECT_EQ(Halve(least_normal), 0x1p-127f);
}

}  // namespace
}  // namespace shardd::kernels

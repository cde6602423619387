#include "server/env/budget.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"

namespace shardd::env {
namespace {

TEST(Budget, IsHardAndComesBack) {
  Budget budget(100);
  auto first = budget.Reserve(60, "job 'a'");
  ASSERT_TRUE(first.ok());
  const auto refused = budget.Reserve(41, "job 'b'");
  ASSERT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_EQ(
      refused.status().message(),
      "job 'b' needs 41 bytes, but of the daemon's budget of 100 (memory.budget_bytes) 40 are "
      "left; raise it or delete a job");
  EXPECT_TRUE(budget.Reserve(40, "job 'c'").ok());  // and gone at once
  EXPECT_EQ(budget.used(), 60u);
  BudgetLease moved = *std::move(first);
  EXPECT_EQ(budget.used(), 60u);
  moved = BudgetLease();
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_FALSE(budget.Reserve(~uint64_t{0}, "job 'd'").ok());
}

}  // namespace
}  // namespace shardd::env

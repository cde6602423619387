#include "server/checkpoint/operation.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace shardd::checkpoint {
namespace {

TEST(Operation, ReportsWhatChangesAndCountsBytes) {
  std::vector<v1::CheckpointProgress> reports;
  Operation operation([&](const v1::CheckpointProgress& p) { reports.push_back(p); });
  operation.Update([](v1::CheckpointProgress* p) { p->set_stage("writing"); });
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(operation.Advance(3).ok());
  EXPECT_EQ(operation.progress().done_bytes(), 3000u);
  ASSERT_GE(reports.size(), 1u);
  EXPECT_EQ(reports[0].stage(), "writing");
  EXPECT_LT(reports.size(), 1000u);  // not one for each
}

TEST(Operation, CancelEndsWaitsAndIsToldOnce) {
  Operation operation([](const v1::CheckpointProgress&) {});
  int told = 0;
  operation.OnCancel([&] { ++told; });
  std::thread waiter([&] { EXPECT_FALSE(operation.WaitUntil(absl::InfiniteFuture())); });
  operation.Cancel();
  operation.Cancel();
  waiter.join();
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(absl::IsCancelled(operation.Advance(1)));
  operation.OnCancel([&] { ++told; });  // too late: at once
  EXPECT_EQ(told, 2);
}

TEST(Throttle, KeepsToItsRateAndStopsWhenCancelled) {
  Operation operation([](const v1::CheckpointProgress&) {});
  Throttle throttle(10'000'000, &operation);
  const absl::Time start = absl::Now();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(throttle.Spend(100'000).ok());
  // 19 of the 20 parts had to be waited for, less what an idle throttle saves up.
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(19 * 10 - 60));
  Throttle slow(1, &operation);
  ASSERT_TRUE(slow.Spend(1 << 20).ok());  // the first is due at once
  std::thread canceller([&] { operation.Cancel(); });
  EXPECT_TRUE(absl::IsCancelled(slow.Spend(1)));
  canceller.join();
  EXPECT_TRUE(absl::IsCancelled(Throttle(0, &operation).Spend(1)));
}

}  // namespace
}  // namespace shardd::checkpoint

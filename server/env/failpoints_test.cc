#include "server/env/failpoints.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

namespace shardd::env {
namespace {

constexpr char kPoint[] = "step.decide.before";

TEST(Failpoints, HoldsAThreadUntilReleased) {
  Failpoints points;
  ASSERT_TRUE(points.Arm(kPoint, FailpointAction::kWait, 2).ok());
  int passed = 0;
  std::thread thread([&] {
    for (int i = 0; i < 5; ++i) {
      points.Reach(kPoint);
      ++passed;
    }
  });
  const auto hits = points.AwaitHit(kPoint, absl::Seconds(30));
  ASSERT_TRUE(hits.ok()) << hits.status();
  EXPECT_EQ(*hits, 3u);
  EXPECT_EQ(passed, 2);  // the thread is held: nobody else writes
  ASSERT_TRUE(points.Release(kPoint).ok());
  thread.join();
  EXPECT_EQ(passed, 5);  // released means disarmed
}

TEST(Failpoints, NobodyComesInTime) {
  Failpoints points;
  ASSERT_TRUE(points.Arm(kPoint, FailpointAction::kWait, 0).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(points.AwaitHit(kPoint, absl::Milliseconds(1)).status()));
}

TEST(Failpoints, UnknownNamesListTheKnownOnes) {
  Failpoints points;
  const absl::Status status = points.Arm("step.decid", FailpointAction::kWait, 0);
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_NE(status.message().find(kPoint), absl::string_view::npos);
  EXPECT_TRUE(absl::IsFailedPrecondition(points.Release(kPoint)));
}

TEST(Failpoints, ReleaseAllLetsEverybodyGoNowAndLater) {
  Failpoints points;
  ASSERT_TRUE(points.Arm(kPoint, FailpointAction::kWait, 0).ok());
  std::thread thread([&] {
    points.Reach(kPoint);
    points.Reach(kPoint);
  });
  ASSERT_TRUE(points.AwaitHit(kPoint, absl::Seconds(30)).ok());
  points.ReleaseAll();
  thread.join();
}

TEST(Failpoints, KillKills) {
  const pid_t child = fork();
  if (child == 0) {
    Failpoints points;
    points.Arm(kPoint, FailpointAction::kKill, 0).IgnoreError();
    points.Reach(kPoint);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

}  // namespace
}  // namespace shardd::env

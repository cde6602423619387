#include "client/retry.h"

#include <gtest/gtest.h>

#include <vector>

namespace shardd {
namespace {

using absl::Milliseconds;

constexpr Backoff kBackoff = {.first = Milliseconds(10), .most = Milliseconds(50)};

class RetryTest : public testing::Test {
 protected:
  // What attempts give, in order; the last one for good.
  absl::Status Retry(std::vector<absl::Status> results) {
    return RetryUntil(
        start_ + Milliseconds(200), kBackoff,
        {[this] { return now_; },
         [this](absl::Duration pause) {
           pauses_.push_back(pause);
           now_ += pause;
         }},
        [&] {
          now_ += cost_;
          return results[std::min(attempts_++, results.size() - 1)];
        },
        [](const absl::Status& status) { return absl::IsUnavailable(status); });
  }

  const absl::Time start_ = absl::UnixEpoch();
  absl::Time now_ = start_;
  absl::Duration cost_ = absl::ZeroDuration();  // of an attempt
  size_t attempts_ = 0;
  std::vector<absl::Duration> pauses_;
};

TEST_F(RetryTest, PausesGrowUpToTheMost) {
  EXPECT_EQ(Retry({absl::UnavailableError("not yet")}).message(), "not yet");
  EXPECT_EQ(pauses_,
            (std::vector<absl::Duration>{Milliseconds(10), Milliseconds(20), Milliseconds(40),
                                         Milliseconds(50), Milliseconds(50), Milliseconds(30)}));
  EXPECT_EQ(attempts_, 7u) << "one of them at the deadline";
  EXPECT_EQ(now_, start_ + Milliseconds(200));
}

TEST_F(RetryTest, EndsWithTheFirstSuccess) {
  EXPECT_TRUE(Retry({absl::UnavailableError(""), absl::UnavailableError(""), {}}).ok());
  EXPECT_EQ(attempts_, 3u);
  EXPECT_EQ(now_, start_ + Milliseconds(30));
}

TEST_F(RetryTest, AnErrorThatDoesNotPassEndsIt) {
  const absl::Status status = Retry({absl::UnavailableError(""), absl::NotFoundError("no")});
  EXPECT_EQ(status, absl::NotFoundError("no"));
  EXPECT_EQ(attempts_, 2u);
}

TEST_F(RetryTest, AttemptsThatTakeLongAreFewButOneIsMade) {
  cost_ = Milliseconds(300);
  EXPECT_FALSE(Retry({absl::UnavailableError("")}).ok());
  EXPECT_EQ(attempts_, 2u) << "the one that began in time, and the last one";
  now_ = start_ + absl::Hours(1);
  attempts_ = 0;
  EXPECT_TRUE(Retry({absl::OkStatus()}).ok());
  EXPECT_EQ(attempts_, 1u);
}

TEST_F(RetryTest, TheMostHoldsHoweverManyAttempts) {
  EXPECT_EQ(kBackoff.Before(0), absl::ZeroDuration());
  EXPECT_EQ(kBackoff.Before(1), Milliseconds(10));
  EXPECT_EQ(kBackoff.Before(4'000'000'000), Milliseconds(50));
}

}  // namespace
}  // namespace shardd

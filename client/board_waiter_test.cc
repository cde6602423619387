#include "client/board_waiter.h"

#include <gtest/gtest.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "absl/time/clock.h"
#include "client/fake_daemon.h"

namespace shardd {
namespace {

using contract::BoardState;
using contract::kLineBytes;
using contract::kSegmentPage;
using contract::SessionState;

constexpr uint64_t kGeneration = 5;

// A board of our own, beside the life line to a daemon.
class BoardWaiterTest : public testing::Test {
 protected:
  BoardWaiterTest() {
    char pattern[] = "/tmp/board_waiter_XXXXXX";
    directory_ = mkdtemp(pattern);
    daemon_ = std::make_unique<FakeDaemon>(directory_ + "/s");
    attach_ = *AttachConnection::Connect(directory_ + "/s", absl::Now() + absl::Seconds(20));
    auto layout = *contract::Layout::Create({{"w", {32}, 0}}, {});
    contract::WeightsHeader header{};
    header.magic = contract::kWeightsMagic;
    header.version = contract::kFormatVersion;
    header.weight_dtype = 1;
    header.layout_hash = layout.hash();
    header.flat_elements = layout.flat_elements();
    header.buckets = 1;
    header.session_lines = 1;
    header.bucket_lines_offset = 2 * kSegmentPage;
    header.session_lines_offset = 2 * kSegmentPage + kLineBytes;
    header.weights_offset = 3 * kSegmentPage;
    header.total_bytes = 4 * kSegmentPage;
    memory_ = *MemoryFile::Create("segment", header.total_bytes, false);
    std::memcpy(memory_.data(), &header, sizeof(header));
    WeightsSegment::Expected expected;
    expected.bytes = header.total_bytes;
    expected.weight_dtype = kernels::DType::kFloat32;
    segment_ = *WeightsSegment::Map(contract::UniqueFd(dup(memory_.fd())), layout, expected);
    board().state.store(static_cast<uint32_t>(BoardState::kReady));
    board().generation.store(kGeneration);
    line().session.store(attach_->session());
    line().state.store(static_cast<uint32_t>(SessionState::kAttached));
    waiter_ = std::make_unique<BoardWaiter>(segment_.get(), attach_.get());
  }
  ~BoardWaiterTest() override {
    daemon_.reset();
    rmdir(directory_.c_str());
  }
  contract::Board& board() {
    return *reinterpret_cast<contract::Board*>(memory_.data() + kSegmentPage);
  }
  contract::SessionLine& line() {
    return *reinterpret_cast<contract::SessionLine*>(memory_.data() + 2 * kSegmentPage +
                                                     kLineBytes);
  }
  void Wake() {
    board().event.fetch_add(1);
    syscall(SYS_futex, &board().event, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  BoardEvent Wait(absl::FunctionRef<bool()> done, absl::Duration timeout = absl::Seconds(30)) {
    return waiter_->Wait(kGeneration, done, absl::Now() + timeout);
  }
  static bool Never() { return false; }

  std::string directory_;
  std::unique_ptr<FakeDaemon> daemon_;
  std::unique_ptr<AttachConnection> attach_;
  MemoryFile memory_;
  std::unique_ptr<WeightsSegment> segment_;
  std::unique_ptr<BoardWaiter> waiter_;
};

TEST_F(BoardWaiterTest, ReturnsAtOnceWhenItHolds) {
  EXPECT_EQ(waiter_->Check(kGeneration), BoardEvent::kDone);
  EXPECT_EQ(Wait([] { return true; }, absl::ZeroDuration()), BoardEvent::kDone);
}

TEST_F(BoardWaiterTest, IsWokenByEvents) {
  std::atomic<uint64_t> asked{0};
  std::atomic<bool> condition{false};
  BoardEvent result = BoardEvent::kDeadline;
  std::thread waiter([&] {
    result = Wait([&] {
      ++asked;
      return condition.load();
    });
  });
  // Events that change nothing for this waiter: it asks again each time.
  for (uint64_t i = 1; i < 50; ++i) {
    const uint64_t before = asked;
    Wake();
    while (asked == before) std::this_thread::yield();
  }
  condition = true;
  Wake();
  waiter.join();
  EXPECT_EQ(result, BoardEvent::kDone);
}

TEST_F(BoardWaiterTest, WhatStandsInTheWayComesBeforeTheCondition) {
  const auto always = [] { return true; };
  board().generation.store(kGeneration + 1);
  EXPECT_EQ(Wait(always), BoardEvent::kRegrouped);
  line().session.store(attach_->session() + 1);
  EXPECT_EQ(Wait(always), BoardEvent::kRefused) << "its place was taken";
  line().session.store(attach_->session());
  line().state.store(static_cast<uint32_t>(SessionState::kRefused));
  EXPECT_EQ(Wait(always), BoardEvent::kRefused) << "a refusal is no regrouping";
  board().state.store(static_cast<uint32_t>(BoardState::kDeleted));
  EXPECT_EQ(Wait(always), BoardEvent::kDeleted);
  board().state.store(static_cast<uint32_t>(BoardState::kFailed));
  EXPECT_EQ(Wait(always), BoardEvent::kFailed);
  EXPECT_EQ(waiter_->Check(kGeneration), BoardEvent::kFailed);
}

TEST_F(BoardWaiterTest, AChangeOfGenerationEndsAWait) {
  BoardEvent result = BoardEvent::kDone;
  std::thread waiter([&] { result = Wait(Never); });
  board().generation.store(kGeneration + 1);
  Wake();
  waiter.join();
  EXPECT_EQ(result, BoardEvent::kRegrouped);
}

TEST_F(BoardWaiterTest, TheDeadlineEndsAWait) {
  const absl::Time begin = absl::Now();
  EXPECT_EQ(Wait(Never, absl::Milliseconds(120)), BoardEvent::kDeadline);
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(120));
}

// Nobody wakes the waiters of a daemon that was killed.
TEST_F(BoardWaiterTest, AHangUpEndsAWaitWithoutAnEvent) {
  BoardEvent result = BoardEvent::kDone;
  std::thread waiter([&] { result = Wait(Never); });
  daemon_.reset();
  waiter.join();
  EXPECT_EQ(result, BoardEvent::kDaemonGone);
}

}  // namespace
}  // namespace shardd

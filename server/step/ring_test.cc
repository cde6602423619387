#include "server/step/ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "server/env/fault_guard.h"

namespace shardd::step {
namespace {

using contract::kSegmentPage;

constexpr uint32_t kEntries = 64;
constexpr uint64_t kDataBytes = 3 * kSegmentPage;
constexpr uint64_t kBytes = 2 * kSegmentPage + kDataBytes;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

class RingTest : public testing::Test {
 protected:
  RingTest() {
    env::InstallFaultHandler();
    header_.magic = contract::kRingMagic;
    header_.version = contract::kFormatVersion;
    header_.queue_entries = kEntries;
    header_.data_offset = 2 * kSegmentPage;
    header_.data_bytes = kDataBytes;
  }
  ~RingTest() override {
    ring_.reset();
    EXPECT_EQ(budget_.used(), 0u);
    if (base_ != nullptr) munmap(base_, kBytes);
  }

  // A worker's ring file, its header as header_ says, still mapped by the worker.
  contract::UniqueFd MakeFile(uint64_t bytes = kBytes, int seals = kSeals) {
    contract::UniqueFd fd(memfd_create("ring_test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
    if (bytes >= kBytes) {
      EXPECT_EQ(pwrite(fd.get(), &header_, offsetof(contract::RingHeader, head), 0),
                static_cast<ssize_t>(offsetof(contract::RingHeader, head)));
      if (base_ != nullptr) munmap(base_, kBytes);
      void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
      EXPECT_NE(at, MAP_FAILED);
      base_ = static_cast<std::byte*>(at);
    }
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
    return fd;
  }

  void ExpectRefused(contract::UniqueFd fd, const std::string& text) {
    const auto ring = Ring::Map(std::move(fd), kBytes, &budget_);
    ASSERT_TRUE(absl::IsInvalidArgument(ring.status())) << ring.status();
    EXPECT_NE(std::string(ring.status().message()).find(text), std::string::npos) << ring.status();
    EXPECT_EQ(budget_.used(), 0u);
  }

  void Map() {
    auto ring = Ring::Map(MakeFile(), kBytes, &budget_);
    ASSERT_TRUE(ring.ok()) << ring.status();
    ring_ = *std::move(ring);
  }

  std::atomic<uint64_t>& head() { return reinterpret_cast<contract::RingHeader*>(base_)->head; }
  // Writes a descriptor whose step tells it from others.
  void Publish(uint64_t step) {
    contract::Descriptor descriptor{};
    descriptor.step = step;
    const uint64_t at = head().load();
    std::memcpy(base_ + kSegmentPage + (at % kEntries) * sizeof(descriptor), &descriptor,
                sizeof(descriptor));
    head().store(at + 1, std::memory_order_release);
  }
  void ExpectNext(uint64_t step) {
    contract::Descriptor descriptor{};
    const absl::StatusOr<bool> next = ring_->Next(&descriptor);
    ASSERT_TRUE(next.ok()) << next.status();
    ASSERT_TRUE(*next);
    EXPECT_EQ(descriptor.step, step);
  }
  void ExpectNone() {
    contract::Descriptor descriptor{};
    const absl::StatusOr<bool> next = ring_->Next(&descriptor);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_FALSE(*next);
    EXPECT_FALSE(ring_->HasNext());
  }
  void ExpectOverrun() {
    contract::Descriptor descriptor{};
    const absl::StatusOr<bool> next = ring_->Next(&descriptor);
    EXPECT_TRUE(absl::IsOutOfRange(next.status())) << next.status();
  }

  contract::RingHeader header_{};
  env::Budget budget_{kBytes};
  std::unique_ptr<Ring> ring_;
  std::byte* base_ = nullptr;  // the worker's mapping
};

TEST_F(RingTest, WhatIsNotASealedMemfdIsRefused) {
  char path[] = "/tmp/shardd-ring-test-XXXXXX";
  contract::UniqueFd file(mkstemp(path));
  unlink(path);
  ASSERT_EQ(ftruncate(file.get(), kBytes), 0);
  ExpectRefused(std::move(file), "sealed");
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const contract::UniqueFd write_end(pipe_fds[1]);
  ExpectRefused(contract::UniqueFd(pipe_fds[0]), "sealed");
  ExpectRefused(contract::UniqueFd(), "sealed");
  for (int missing : {kSeals, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL}) {
    ExpectRefused(MakeFile(kBytes, kSeals & ~missing), "sealed");
  }
}

TEST_F(RingTest, SizesAreBounded) {
  ExpectRefused(MakeFile(2 * kSegmentPage), "has 8192 bytes");
  ExpectRefused(MakeFile(kBytes + 1), "memory.ring_bytes_max");
}

TEST_F(RingTest, AHeaderThatDoesNotDescribeTheFileIsRefused) {
  const contract::RingHeader& good = header_;
  const struct {
    std::function<void(contract::RingHeader*)> damage;
    const char* text;
  } cases[] = {
      {[](auto* h) { h->magic ^= 1; }, "magic or version"},
      {[](auto* h) { ++h->version; }, "magic or version"},
      {[](auto* h) { h->queue_entries = 0; }, "its own size"},
      {[](auto* h) { h->queue_entries = 32; }, "its own size"},
      {[](auto* h) { h->queue_entries = 65; }, "its own size"},
      {[](auto* h) { h->queue_entries = 128; }, "its own size"},  // more than fit before the data
      {[](auto* h) { h->queue_entries = 1u << 31; }, "its own size"},
      {[](auto* h) { h->data_offset += 64; }, "its own size"},
      {[](auto* h) { h->data_offset = 0; }, "its own size"},
      {[](auto* h) { h->data_offset = kBytes + kSegmentPage; }, "its own size"},
      {[](auto* h) { h->data_offset = -kSegmentPage; }, "its own size"},
      {[](auto* h) { h->data_bytes += 1; }, "its own size"},
      {[](auto* h) { h->data_bytes -= kSegmentPage; }, "its own size"},
      {[](auto* h) { h->data_bytes = std::numeric_limits<uint64_t>::max(); }, "its own size"},
  };
  const contract::UniqueFd kept = MakeFile();
  auto* written = reinterpret_cast<contract::RingHeader*>(base_);
  for (const auto& c : cases) {
    c.damage(written);
    ExpectRefused(contract::UniqueFd(dup(kept.get())), c.text);
    std::memcpy(static_cast<void*>(written), &good, offsetof(contract::RingHeader, head));
  }
  EXPECT_TRUE(Ring::Map(contract::UniqueFd(dup(kept.get())), kBytes, &budget_).ok());
}

TEST_F(RingTest, TakesItsBytesFromTheBudgetWhileItLives) {
  Map();
  EXPECT_EQ(ring_->bytes(), kBytes);
  EXPECT_EQ(ring_->data_bytes(), kDataBytes);
  EXPECT_EQ(budget_.used(), kBytes);
  const auto second = Ring::Map(MakeFile(), kBytes, &budget_);
  EXPECT_TRUE(absl::IsResourceExhausted(second.status())) << second.status();
  ring_.reset();
  EXPECT_EQ(budget_.used(), 0u);
}

TEST_F(RingTest, DataAndItsBounds) {
  Map();
  base_[header_.data_offset + 100] = std::byte{42};
  EXPECT_EQ(*ring_->data(100), std::byte{42});
  EXPECT_TRUE(ring_->Contains(ring_->data(0)));
  EXPECT_TRUE(ring_->Contains(ring_->data(kDataBytes - 1)));
  EXPECT_FALSE(ring_->Contains(ring_->data(kDataBytes)));
  EXPECT_FALSE(ring_->Contains(nullptr));
}

TEST_F(RingTest, DescriptorsInOrderOverSeveralRounds) {
  Map();
  ExpectNone();
  for (uint64_t step = 0; step < 5 * kEntries; step += 2) {
    Publish(step);
    Publish(step + 1);
    EXPECT_TRUE(ring_->HasNext());
    ExpectNext(step);
    EXPECT_EQ(ring_->last_index(), step);
    ExpectNext(step + 1);
    EXPECT_EQ(ring_->last_index(), step + 1);
    ExpectNone();
    EXPECT_EQ(ring_->Release(step), step + 1);
    EXPECT_EQ(ring_->Release(step + 1), step + 2);
  }
}

TEST_F(RingTest, ReleasesUpToTheFirstThatIsNotDone) {
  Map();
  for (uint64_t step = 0; step < 4; ++step) {
    Publish(step);
    ExpectNext(step);
  }
  EXPECT_EQ(ring_->Release(2), 0u);
  EXPECT_EQ(ring_->Release(0), 1u);
  EXPECT_EQ(ring_->Release(0), 1u);  // again: nothing changes
  EXPECT_EQ(ring_->Release(4), 1u);  // was not consumed
  EXPECT_EQ(ring_->Release(1), 3u);
  EXPECT_EQ(ring_->ReleaseAll(), 4u);
  EXPECT_EQ(ring_->Release(3), 4u);
}

TEST_F(RingTest, AFullQueueIsReadAndOneMoreIsAnOverrun) {
  Map();
  for (uint64_t step = 0; step < kEntries; ++step) Publish(step);
  for (uint64_t step = 0; step < kEntries; ++step) ExpectNext(step);
  Publish(kEntries);
  ExpectOverrun();
  EXPECT_EQ(ring_->Release(0), 1u);
  ExpectNext(kEntries);
}

// Without this a worker could have the same descriptors read for ever, and the
// list of what is not released grow without bound.
TEST_F(RingTest, AHeadThatGoesBackIsAnOverrun) {
  Map();
  for (uint64_t step = 0; step < 5; ++step) {
    Publish(step);
    ExpectNext(step);
  }
  for (uint64_t back : {0, 3, 4}) {
    head() = back;
    ExpectOverrun();
  }
  EXPECT_EQ(ring_->Release(0), 1u);
  EXPECT_EQ(ring_->Release(1), 2u);
  for (uint64_t back : {uint64_t{0}, uint64_t{3}, std::numeric_limits<uint64_t>::max()}) {
    head() = back;
    ExpectOverrun();
  }
  head() = 5;
  ExpectNone();
}

}  // namespace
}  // namespace shardd::step

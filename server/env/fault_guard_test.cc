#include "server/env/fault_guard.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

namespace shardd::env {
namespace {

constexpr size_t kPage = 4096;

// Two mapped pages of a file whose owner can take away the second one.
class SharedFile {
 public:
  SharedFile() {
    fd_ = memfd_create("fault_guard_test", MFD_CLOEXEC);
    EXPECT_GE(fd_, 0);
    EXPECT_EQ(ftruncate(fd_, 2 * kPage), 0);
    void* at = mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    EXPECT_NE(at, MAP_FAILED);
    data_ = static_cast<std::byte*>(at);
    std::memset(data_, 7, 2 * kPage);
  }
  ~SharedFile() {
    munmap(data_, 2 * kPage);
    close(fd_);
  }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  const std::byte* data() const { return data_; }
  void TakeSecondPage() const { ASSERT_EQ(ftruncate(fd_, kPage), 0); }
  void GiveSecondPage() const { ASSERT_EQ(ftruncate(fd_, 2 * kPage), 0); }

 private:
  int fd_ = -1;
  std::byte* data_ = nullptr;
};

std::byte Read(const std::byte* at) { return *static_cast<const volatile std::byte*>(at); }

class FaultGuardTest : public testing::Test {
 protected:
  FaultGuardTest() { InstallFaultHandler(); }
};

TEST_F(FaultGuardTest, NullWhenAllCouldBeRead) {
  const SharedFile file;
  std::byte value{};
  EXPECT_EQ(RunGuarded([&] { value = Read(file.data() + kPage); }), nullptr);
  EXPECT_EQ(value, std::byte{7});
}

TEST_F(FaultGuardTest, AbandonsAtTheAddressThatCannotBeRead) {
  const SharedFile file;
  file.TakeSecondPage();
  const std::byte* gone = file.data() + kPage + 123;
  volatile bool before = false;
  volatile bool after = false;
  const void* fault = RunGuarded([&] {
    before = true;
    Read(gone);
    after = true;
  });
  EXPECT_EQ(fault, gone);
  EXPECT_TRUE(before);
  EXPECT_FALSE(after);
}

TEST_F(FaultGuardTest, TheFirstPageIsCopiedAndTheFaultIsInTheSecond) {
  const SharedFile file;
  file.TakeSecondPage();
  std::vector<std::byte> copy(2 * kPage);
  const auto* fault = static_cast<const std::byte*>(
      RunGuarded([&] { std::memcpy(copy.data(), file.data(), copy.size()); }));
  EXPECT_GE(fault, file.data() + kPage);
  EXPECT_LT(fault, file.data() + 2 * kPage);
}

TEST_F(FaultGuardTest, AgainAndAgain) {
  const SharedFile file;
  const std::byte* at = file.data() + kPage;
  for (int i = 0; i < 1000; ++i) {
    file.TakeSecondPage();
    ASSERT_EQ(RunGuarded([&] { Read(at); }), at);
    file.GiveSecondPage();
    ASSERT_EQ(RunGuarded([&] { Read(at); }), nullptr);
  }
}

TEST_F(FaultGuardTest, BlockedSignalsAreAsBefore) {
  const SharedFile file;
  file.TakeSecondPage();
  sigset_t before, after;
  ASSERT_EQ(pthread_sigmask(SIG_SETMASK, nullptr, &before), 0);
  ASSERT_NE(RunGuarded([&] { Read(file.data() + kPage); }), nullptr);
  ASSERT_EQ(pthread_sigmask(SIG_SETMASK, nullptr, &after), 0);
  for (int signal = 1; signal < NSIG; ++signal) {
    EXPECT_EQ(sigismember(&after, signal), sigismember(&before, signal)) << "signal " << signal;
  }
}

// Frames that hold what AddressSanitizer surrounds with red zones.
std::byte ReadDeepDown(const std::byte* at, int depth) {
  volatile std::byte local[97];
  local[depth % 97] = std::byte{1};
  if (depth > 0) return local[depth % 97] | ReadDeepDown(at, depth - 1);
  return Read(at) | local[0];
}

[[gnu::noinline]] int FillStack() {
  volatile unsigned char buffer[64 * 1024];
  std::memset(const_cast<unsigned char*>(buffer), 1, sizeof(buffer));
  return buffer[sizeof(buffer) - 1];
}

TEST_F(FaultGuardTest, TheStackOfWhatWasAbandonedCanBeUsed) {
  const SharedFile file;
  file.TakeSecondPage();
  const std::byte* at = file.data() + kPage;
  EXPECT_EQ(RunGuarded([&] { ReadDeepDown(at, 100); }), at);
  EXPECT_EQ(FillStack(), 1);
}

TEST_F(FaultGuardTest, EachThreadGetsItsOwnFault) {
  constexpr int kThreads = 8;
  std::vector<SharedFile> files(kThreads);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const SharedFile& file = files[static_cast<size_t>(t)];
      // Every other thread reads what is there.
      const bool faults = t % 2 == 0;
      if (faults) file.TakeSecondPage();
      const std::byte* at = file.data() + kPage + t;
      for (int i = 0; i < 1000; ++i) {
        if (RunGuarded([&] { Read(at); }) != (faults ? at : nullptr)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

using FaultGuardDeathTest = FaultGuardTest;

TEST_F(FaultGuardDeathTest, OutsideOfAGuardItIsFatal) {
  const SharedFile file;
  file.TakeSecondPage();
  EXPECT_EXIT(Read(file.data() + kPage), testing::KilledBySignal(SIGBUS), "");
}

TEST_F(FaultGuardDeathTest, AGuardThatHasEndedGuardsNoMore) {
  const SharedFile file;
  file.TakeSecondPage();
  const std::byte* at = file.data() + kPage;
  EXPECT_EQ(RunGuarded([&] { Read(at); }), at);
  EXPECT_EXIT(Read(at), testing::KilledBySignal(SIGBUS), "");
  EXPECT_EQ(RunGuarded([&] { Read(file.data()); }), nullptr);
  EXPECT_EXIT(Read(at), testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace shardd::env

#include "server/env/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <vector>

namespace shardd::env {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (size_t threads : {1u, 2u, 5u}) {
    ThreadPool pool(threads, nullptr);
    EXPECT_EQ(pool.threads(), threads);
    for (size_t count : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<std::atomic<int>> seen(count);
      pool.ParallelFor(count, [&](size_t i) { ++seen[i]; });
      for (const auto& times : seen) EXPECT_EQ(times, 1);
    }
  }
}

TEST(ThreadPool, CallersSideBySide) {
  std::atomic<int> started{0};
  ThreadPool pool(3, [&] { ++started; });
  std::vector<std::thread> callers;
  std::atomic<uint64_t> sum{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        uint64_t mine = 0;
        std::mutex mutex;
        pool.ParallelFor(17, [&](size_t i) {
          std::lock_guard lock(mutex);
          mine += i;
        });
        sum += mine;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4u * 200 * 136);
}

}  // namespace
}  // namespace shardd::env

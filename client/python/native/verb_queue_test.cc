#include "client/python/native/verb_queue.h"

#include <gtest/gtest.h>

#include <future>
#include <vector>

namespace shardd::python {
namespace {

TEST(VerbQueue, DoesVerbsInTheirOrderAndCountsThem) {
  std::vector<int> seen;
  VerbQueue queue;
  EXPECT_EQ(queue.done(), 0u);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(queue.Add([&seen, i] { seen.push_back(i); }), static_cast<uint64_t>(i + 1));
  }
  ASSERT_TRUE(queue.WaitDone(100, absl::Seconds(60)));
  ASSERT_EQ(seen.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(seen[i], i);
  EXPECT_EQ(queue.done(), 100u);
}

TEST(VerbQueue, AWaitEndsWithoutTheVerb) {
  std::promise<void> go;
  VerbQueue queue;
  const uint64_t verb = queue.Add([&go] { go.get_future().wait(); });
  EXPECT_FALSE(queue.WaitDone(verb, absl::Milliseconds(1)));
  EXPECT_EQ(queue.done(), 0u);
  go.set_value();
  EXPECT_TRUE(queue.WaitDone(verb, absl::Seconds(60)));
}

TEST(VerbQueue, EndsWhenAllVerbsAreOver) {
  int done = 0;
  {
    VerbQueue queue;
    for (int i = 0; i < 10; ++i) queue.Add([&done] { ++done; });
  }
  EXPECT_EQ(done, 10);
}

}  // namespace
}  // namespace shardd::python

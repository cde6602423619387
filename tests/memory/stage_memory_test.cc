// What a rank holds in each stage, in resident bytes of its named memory: two ranks
// as processes, a daemon, 61.7 million parameters in bf16. Prints the table of
// docs/memory.md.
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "proto/contract/layout.h"
#include "tests/memory/layered_model.h"
#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"

namespace shardd::test {
namespace {

constexpr uint32_t kRanks = 2;
constexpr int kSteps = 2;
constexpr uint64_t kElementBytes = 2;
// Pages at the two ends of each parameter, layer and bucket.
constexpr uint64_t kSlack = 256 * 1024;

struct Held {
  uint64_t weights = 0, staging = 0, partial = 0, ring = 0;
  uint64_t gradients() const { return staging + partial + ring; }
};

// Of one rank, in the last step.
struct Sampled {
  Held end;                     // of backward
  uint64_t peak_weights = 0;    // while two layers are held, forward and backward
  uint64_t peak_gradients = 0;  // in backward
};

struct Configuration {
  int stage = 0;
  const char* weights = "private";
  uint32_t slots = kRanks;
};

Sampled ReadSamples(RankProcess* rank) {
  Sampled sampled;
  int ends = 0;
  for (std::string line; !(line = rank->AwaitLine("")).empty();) {
    char phase[16];
    Held held;
    if (std::sscanf(line.c_str(), "sample %15s weights=%lu staging=%lu partial=%lu ring=%lu", phase,
                    &held.weights, &held.staging, &held.partial, &held.ring) != 5) {
      EXPECT_EQ(line, "done");
      continue;
    }
    sampled.peak_weights = std::max(sampled.peak_weights, held.weights);
    sampled.peak_gradients = std::max(sampled.peak_gradients, held.gradients());
    if (phase != std::string("end")) continue;
    sampled.end = held;
    ++ends;
  }
  EXPECT_EQ(ends, 1);
  return sampled;
}

std::vector<Sampled> Train(const Configuration& configuration) {
  DaemonProcess daemon;
  std::vector<std::unique_ptr<RankProcess>> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<RankProcess>(
        daemon.socket(), rank, kRanks,
        std::vector<std::string>{"--job=memory", "--stage=" + std::to_string(configuration.stage),
                                 "--weights=" + std::string(configuration.weights),
                                 "--slots=" + std::to_string(configuration.slots),
                                 "--steps=" + std::to_string(kSteps)},
        "tests/memory/memory_rank"));
  }
  std::vector<Sampled> sampled;
  for (const auto& rank : ranks) sampled.push_back(ReadSamples(rank.get()));
  for (const auto& rank : ranks) {
    const int status = rank->Wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  return sampled;
}

double MiB(uint64_t bytes) { return static_cast<double>(bytes) / (1024 * 1024); }

void PrintHeader() {
  std::printf(
      "| stage | weights | slots | rank | weights | staging | partial sums | ring | gradients | "
      "peak weights | peak gradients |\n"
      "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
}

void PrintRows(const Configuration& configuration, const std::vector<Sampled>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const Held& end = ranks[rank].end;
    std::printf("| %d | %s | %u | %zu | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |\n",
                configuration.stage, configuration.weights, configuration.slots, rank,
                MiB(end.weights), MiB(end.staging), MiB(end.partial), MiB(end.ring),
                MiB(end.gradients()), MiB(ranks[rank].peak_weights),
                MiB(ranks[rank].peak_gradients));
  }
  std::fflush(stdout);
}

class StageMemory : public testing::Test {
 protected:
  StageMemory() {
    std::vector<contract::ParameterSpec> specs;
    for (const ParameterSpec& spec : model_.parameters) specs.push_back({spec.name, spec.shape, 0});
    layout_ = std::make_unique<contract::Layout>(*contract::Layout::Create(specs, {}));
    all_ = layout_->flat_elements() * kElementBytes;
    bucket_ = layout_->max_bucket_elements() * kElementBytes;
    for (const auto& layer : model_.layers) {
      uint64_t bytes = 0;
      for (size_t p : layer) {
        const uint64_t size = layout_->parameter_elements(p) * kElementBytes;
        bytes += size;
        largest_parameter_ = std::max(largest_parameter_, size);
      }
      largest_layer_ = std::max(largest_layer_, bytes);
    }
  }
  uint64_t ShardBytes(uint32_t rank) const {
    return layout_->shard_range(rank, kRanks).size() * kElementBytes;
  }

  // What is not built in the ring whatever the timing: parameters that lie in two buckets.
  uint64_t SpanningBytes() const {
    uint64_t bytes = 0;
    for (size_t p = 0; p < layout_->num_parameters(); ++p) {
      const contract::Range range = layout_->parameter_range(p);
      if (layout_->bucket_of(range.begin) == layout_->bucket_of(range.end - 1)) continue;
      bytes += range.size() * kElementBytes;
    }
    return bytes;
  }

  const LayeredModel model_ = MakeLayeredModel();
  std::unique_ptr<contract::Layout> layout_;
  uint64_t all_ = 0;  // bytes of all elements in bf16
  uint64_t bucket_ = 0, largest_parameter_ = 0, largest_layer_ = 0;
};

TEST_F(StageMemory, GradientsShrinkFromStage1To2AndWeightsAtStage3) {
  ASSERT_GE(layout_->trainable_elements(), 50'000'000u);
  std::printf(
      "%lu parameters, %.1f MiB in bf16; bucket %.1f, largest layer %.1f, shard %.1f, in two "
      "buckets %.1f MiB\n",
      layout_->trainable_elements(), MiB(all_), MiB(bucket_), MiB(largest_layer_),
      MiB(ShardBytes(0)), MiB(SpanningBytes()));
  PrintHeader();
  std::vector<std::vector<Sampled>> stages;
  for (int stage = 0; stage <= 3; ++stage) {
    stages.push_back(Train({.stage = stage}));
    PrintRows({.stage = stage}, stages.back());
  }
  // The ring holds two buckets; its other pages are a header and descriptors.
  const uint64_t ring = 2 * bucket_ + kSlack;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    for (int stage = 0; stage <= 2; ++stage) {
      EXPECT_NEAR(static_cast<double>(stages[stage][rank].end.weights), static_cast<double>(all_),
                  kSlack)
          << "stage " << stage;
    }
    for (int stage = 2; stage <= 3; ++stage) {
      const Sampled& sampled = stages[stage][rank];
      EXPECT_LE(sampled.end.gradients(), ring) << "stage " << stage;
      EXPECT_LE(sampled.peak_gradients, ring + bucket_ + largest_parameter_) << "stage " << stage;
      EXPECT_GT(sampled.end.ring, 0u);
    }
    for (int stage = 0; stage <= 1; ++stage) {
      const Held& end = stages[stage][rank].end;
      EXPECT_GE(end.staging, SpanningBytes() - kSlack) << "stage " << stage;
      EXPECT_GE(end.gradients(), 2 * stages[2][rank].end.gradients()) << "stage " << stage;
    }

    const Sampled& last = stages[3][rank];
    const uint64_t shard = ShardBytes(rank);
    EXPECT_GE(last.end.weights, shard - kSlack);
    EXPECT_LE(last.peak_weights, shard + 2 * largest_layer_ + kSlack);
    EXPECT_LT(last.peak_weights, stages[2][rank].end.weights);
  }
}

TEST_F(StageMemory, SharedWeightsAreNobodysOwn) {
  const Configuration configuration = {.stage = 3, .weights = "shared"};
  const std::vector<Sampled> ranks = Train(configuration);
  PrintHeader();
  PrintRows(configuration, ranks);
  for (const Sampled& rank : ranks) EXPECT_EQ(rank.peak_weights, 0u);
}

TEST_F(StageMemory, AccumulatedGradientsAreReleasedAtStage2) {
  PrintHeader();
  std::vector<std::vector<Sampled>> stages;
  for (int stage : {1, 2}) {
    const Configuration configuration = {.stage = stage, .slots = 4 * kRanks};
    stages.push_back(Train(configuration));
    PrintRows(configuration, stages.back());
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    const Held& kept = stages[0][rank].end;
    const Held& released = stages[1][rank].end;
    // Of a rank's four slots: the sum of the first two in fp32, the others as they are.
    EXPECT_GE(kept.staging + kept.partial, 4 * all_ - kSlack);
    EXPECT_LE(released.staging + released.partial, kSlack);
  }
}

}  // namespace
}  // namespace shardd::test

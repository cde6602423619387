#include "proto/contract/layout.h"
#include "absl/strings/escaping.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"

namespace shardd::contract {
namespace {

std::vector<ParameterSpec> Specs(const std::vector<std::vector<int64_t>>& shapes,
                                 uint32_t groups = 1) {
  std::vector<ParameterSpec> specs;
  for (size_t i = 0; i < shapes.size(); ++i) {
    specs.push_back({absl::StrCat("p", i), shapes[i], static_cast<uint32_t>(i % groups)});
  }
  return specs;
}

uint64_t Elements(const std::vector<int64_t>& shape) {
  uint64_t count = 1;
  for (int64_t extent : shape) count *= static_cast<uint64_t>(extent);
  return count;
}

// Appends the runs of `range` and checks that each lies in it and in its parameter.
void AppendRuns(const Layout& layout, Range range, std::vector<Run>* all) {
  for (const Run& run : layout.runs(range)) {
    ASSERT_LT(run.parameter, layout.num_parameters());
    const Range parameter = layout.parameter_range(run.parameter);
    ASSERT_FALSE(run.range.empty());
    ASSERT_GE(run.range.begin, range.begin);
    ASSERT_LE(run.range.end, range.end);
    ASSERT_EQ(run.range.begin, parameter.begin + run.offset);
    ASSERT_LE(run.range.end, parameter.end);
    all->push_back(run);
  }
}

// Ascending runs that are every element of every parameter exactly once.
void ExpectEveryElementOnce(const Layout& layout, const std::vector<Run>& runs) {
  size_t next = 0;
  for (size_t p = 0; p < layout.num_parameters(); ++p) {
    uint64_t offset = 0;
    for (; next < runs.size() && runs[next].parameter == p; ++next) {
      ASSERT_EQ(runs[next].offset, offset) << "parameter " << p;
      offset += runs[next].range.size();
    }
    ASSERT_EQ(offset, layout.parameter_elements(p)) << "parameter " << p;
  }
  ASSERT_EQ(next, runs.size());
}

void ExpectParametersPlaced(const Layout& layout, const std::vector<ParameterSpec>& specs) {
  uint64_t end = 0;
  uint64_t trainable = 0;
  for (size_t p = 0; p < specs.size(); ++p) {
    const Range range = layout.parameter_range(p);
    ASSERT_EQ(range.size(), Elements(specs[p].shape));
    ASSERT_EQ(range.begin % kParameterAlignment, 0u);
    ASSERT_GE(range.begin, end);
    ASSERT_LT(range.begin - end, kParameterAlignment);
    end = range.end;
    trainable += range.size();
  }
  EXPECT_EQ(layout.trainable_elements(), trainable);
  EXPECT_GE(layout.flat_elements(), end);
  EXPECT_LT(layout.flat_elements() - end, kParameterAlignment);
  EXPECT_EQ(layout.flat_elements() % kParameterAlignment, 0u);
}

// Bucket 0 is the end of the flat space; descending numbers tile it upwards.
void ExpectBucketsTile(const Layout& layout) {
  ASSERT_EQ(layout.bucket_elements() % layout.chunk_elements(), 0u);
  std::vector<Run> runs;
  uint64_t next = 0;
  uint64_t largest = 0;
  for (uint64_t b = layout.num_buckets(); b-- > 0;) {
    const Range range = layout.bucket_range(b);
    ASSERT_EQ(range.begin, next);
    ASSERT_FALSE(range.empty());
    ASSERT_EQ(range.begin % layout.chunk_elements(), 0u);
    ASSERT_EQ(layout.bucket_of(range.begin), b);
    ASSERT_EQ(layout.bucket_of(range.end - 1), b);
    largest = std::max(largest, range.size());
    next = range.end;
    AppendRuns(layout, range, &runs);
  }
  EXPECT_EQ(next, layout.flat_elements());
  EXPECT_EQ(largest, layout.max_bucket_elements());
  ExpectEveryElementOnce(layout, runs);
}

void ExpectShardsTile(const Layout& layout, uint32_t world_size) {
  std::vector<Run> runs;
  uint64_t next_chunk = 0;
  uint64_t next = 0;
  uint64_t fewest = UINT64_MAX;
  uint64_t most = 0;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    const Range chunks = layout.shard_chunks(rank, world_size);
    const Range shard = layout.shard_range(rank, world_size);
    ASSERT_EQ(chunks.begin, next_chunk);
    ASSERT_EQ(shard.begin, next);
    next_chunk = chunks.end;
    next = shard.end;
    fewest = std::min(fewest, chunks.size());
    most = std::max(most, chunks.size());
    if (chunks.empty()) {
      ASSERT_TRUE(shard.empty());
      continue;
    }
    ASSERT_EQ(shard.begin, layout.chunk_range(chunks.begin).begin);
    ASSERT_EQ(shard.end, layout.chunk_range(chunks.end - 1).end);
    AppendRuns(layout, shard, &runs);
  }
  EXPECT_EQ(next_chunk, layout.num_chunks());
  EXPECT_EQ(next, layout.flat_elements());
  EXPECT_LE(most - fewest, 1u) << "shards differ by more than a chunk";
  ExpectEveryElementOnce(layout, runs);
}

void ExpectChunksTile(const Layout& layout) {
  uint64_t next = 0;
  for (uint64_t c = 0; c < layout.num_chunks(); ++c) {
    const Range range = layout.chunk_range(c);
    ASSERT_EQ(range.begin, next);
    ASSERT_FALSE(range.empty());
    ASSERT_LE(range.size(), layout.chunk_elements());
    next = range.end;
  }
  EXPECT_EQ(next, layout.flat_elements());
  EXPECT_EQ(layout.num_blocks(), (layout.flat_elements() + kBlockElements - 1) / kBlockElements);
}

void ExpectSound(const std::vector<ParameterSpec>& specs, const Layout::Options& options,
                 const std::vector<uint32_t>& world_sizes) {
  const absl::StatusOr<Layout> layout = Layout::Create(specs, options);
  ASSERT_TRUE(layout.ok()) << layout.status();
  ExpectParametersPlaced(*layout, specs);
  ExpectChunksTile(*layout);
  ExpectBucketsTile(*layout);
  for (uint32_t world_size : world_sizes) ExpectShardsTile(*layout, world_size);
}

TEST(Layout, NamedShapes) {
  const std::vector<std::vector<std::vector<int64_t>>> cases = {
      {{1}, {2}, {4}},
      {{3}},
      {{8}, {0}, {24}},
      {{4, 4}, {0, 8}},
      {{}},
      {{0}},
      {{0}, {0, 5}, {7, 0}},
      {{0}, {}, {0}, {1}, {0}},
      {{4096}, {1}},
      {{4095}, {0}, {4097}},
      {{65536}, {65536}},
  };
  for (const auto& shapes : cases) {
    for (uint32_t chunk : {0u, 4096u, 1048576u}) {
      Layout::Options options;
      options.chunk_elements = chunk;
      ExpectSound(Specs(shapes), options, {1, 2, 3, 4, 8, 4096});
    }
  }
}

TEST(Layout, LargerThan31Bits) {
  const int64_t large = (int64_t{1} << 31) + 3;
  ExpectSound(Specs({{5}, {large}, {}, {large}}), {}, {1, 2, 7, 64});
  Layout::Options options;
  options.bucket_elements = uint64_t{1} << 33;  // one bucket, beyond 32 bits
  ExpectSound(Specs({{large}, {3}, {large}}), options, {1, 5});
}

TEST(Layout, HundredThousandParameters) {
  std::vector<std::vector<int64_t>> shapes;
  std::mt19937_64 random(7);
  for (int i = 0; i < 100'000; ++i) shapes.push_back({static_cast<int64_t>(random() % 200)});
  Layout::Options options;
  options.groups = 3;
  ExpectSound(Specs(shapes, 3), options, {1, 8, 1000});
}

TEST(Layout, HundredThousandWithoutElements) {
  std::vector<std::vector<int64_t>> shapes(100'000, {0});
  shapes.back() = {2'000'000};
  Layout::Options options;
  options.chunk_elements = 4096;
  options.bucket_elements = 4096;
  ExpectSound(Specs(shapes), options, {1, 400});
}

TEST(Layout, RandomShapesBucketsGroupsAndWorlds) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::vector<int64_t>> shapes(1 + random() % 20);
    for (auto& shape : shapes) {
      shape.resize(random() % 4);
      for (int64_t& extent : shape) {
        extent = random() % 8 == 0 ? 0 : static_cast<int64_t>(1 + random() % 60);
      }
    }
    Layout::Options options;
    options.chunk_elements = 4096u << (random() % 3);
    options.bucket_elements = random() % 2 == 0 ? 0 : options.chunk_elements * (1 + random() % 5);
    options.groups = 1 + random() % 4;
    ExpectSound(Specs(shapes, options.groups), options,
                {1, static_cast<uint32_t>(1 + random() % 9), 4096});
  }
}

TEST(Layout, RunsOfAnyRange) {
  const absl::StatusOr<Layout> layout =
      Layout::Create(Specs({{0}, {5}, {0}, {40}, {}, {0}, {100}}), {});
  ASSERT_TRUE(layout.ok());
  for (uint64_t begin = 0; begin <= layout->flat_elements(); ++begin) {
    for (uint64_t end = begin; end <= layout->flat_elements(); ++end) {
      std::vector<contract::Run> runs;
      AppendRuns(*layout, {begin, end}, &runs);
      uint64_t expected = 0;
      for (size_t p = 0; p < layout->num_parameters(); ++p) {
        const Range range = layout->parameter_range(p);
        const uint64_t lo = std::max(begin, range.begin);
        const uint64_t hi = std::min(end, range.end);
        expected += lo < hi ? hi - lo : 0;
      }
      uint64_t got = 0;
      for (const contract::Run& run : runs) got += run.range.size();
      ASSERT_EQ(got, expected) << begin << ".." << end;
    }
  }
}

TEST(Layout, HashSeesWhatBothSidesMustAgreeOn) {
  Layout::Options options;
  options.groups = 2;
  const std::vector<ParameterSpec> base = {{"a", {2, 3}, 0}, {"b", {4}, 0}};
  const auto hash = [&](std::vector<ParameterSpec> specs) {
    return Layout::Create(std::move(specs), options)->hash();
  };
  const uint64_t reference = hash(base);
  EXPECT_EQ(hash(base), reference);
  std::vector<std::vector<ParameterSpec>> others = {
      {{"a", {3, 2}, 0}, {"b", {4}, 0}}, {{"a", {6}, 0}, {"b", {4}, 0}},
      {{"a", {2, 3}, 1}, {"b", {4}, 0}}, {{"ab", {2, 3}, 0}, {"", {4}, 0}},
      {{"b", {4}, 0}, {"a", {2, 3}, 0}}, {{"a", {2, 3}, 0}},
  };
  others[3][1].name = "bb";
  for (const auto& other : others) EXPECT_NE(hash(other), reference);
  options.chunk_elements = 4096;
  EXPECT_NE(hash(base), reference);
}

TEST(Layout, RefusesByName) {
  const auto error = [](std::vector<ParameterSpec> specs, Layout::Options options = {}) {
    return std::string(Layout::Create(std::move(specs), options).status().message());
  };
  EXPECT_NE(error({{"w", {-1}, 0}}).find("'w'"), std::string::npos);
  EXPECT_NE(error({{"w", {1}, 0}, {"w", {2}, 0}}).find("'w' is registered twice"),
            std::string::npos);
  EXPECT_NE(error({{"w", {1}, 3}}).find("group 3"), std::string::npos);
  EXPECT_NE(error({{"w", {INT64_MAX, INT64_MAX}, 0}}).find("'w'"), std::string::npos);
  EXPECT_NE(error({{"w", {INT64_MAX}, 0}}).find("'w'"), std::string::npos);
  EXPECT_NE(error({{"", {1}, 0}}).find("0 bytes"), std::string::npos);
  EXPECT_FALSE(error({}).empty());
  Layout::Options options;
  options.chunk_elements = 5000;
  EXPECT_NE(error({{"w", {1}, 0}}, options).find("5000"), std::string::npos);
  options.chunk_elements = 4096;
  options.bucket_elements = 4097;
  EXPECT_NE(error({{"w", {1}, 0}}, options).find("4097"), std::string::npos);
}

TEST(Layout, AZeroExtentWinsOverAnyOther) {
  const absl::StatusOr<Layout> layout = Layout::Create(Specs({{INT64_MAX, 0, INT64_MAX}}), {});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->parameter_elements(0), 0u);
}

TEST(Layout, NamesArePrintableUtf8) {
  for (const char* good : {"h.0.attn.c_attn.weight", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", " "}) {
    EXPECT_TRUE(CheckParameterName(0, good).ok()) << good;
  }
  const std::string bad[] = {"",
                             std::string(513, 'n'),
                             std::string("a\0b", 3),
                             "a\nb",
                             "\x7f",
                             "\xc2\x85",
                             "\xff",
                             "\x80",
                             "\xc3",
                             "\xc0\xaf",
                             "\xe0\x80\xaf",
                             "\xed\xa0\x80",
                             "\xf4\x90\x80\x80",
                             "\xf8\x88\x80\x80\x80"};
  for (const std::string& name : bad) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckParameterName(7, name))) << absl::CHexEscape(name);
  }
  EXPECT_EQ(CheckParameterName(7, "a\xff").message(),
            "parameter 7 has the name 'a\\xff'; names are UTF-8 without control characters");
}

}  // namespace
}  // namespace shardd::contract

#include "server/checkpoint/save_plan.h"

#include <gtest/gtest.h>

#include <cstring>

namespace shardd::checkpoint {
namespace {

// 10000, 10 and 0 elements: chunks 0 and 1 are a's, chunk 2 has both.
step::StateSnapshot Snapshot(contract::Range chunks) {
  auto layout = contract::Layout::Create({{"a", {100, 100}, 0}, {"b", {10}, 0}, {"none", {0}, 0}},
                                         {.chunk_elements = 4096, .groups = 1});
  step::StateSnapshot snapshot(*std::move(layout));
  snapshot.chunks = chunks;
  snapshot.moments = 2;
  snapshot.config.set_optimizer("adamw");
  snapshot.config.set_name("x");
  snapshot.config.add_groups();
  snapshot.config.set_chunk_elements(4096);
  snapshot.config.set_bucket_elements(snapshot.layout.bucket_elements());
  for (size_t p = 0; p < snapshot.layout.num_parameters(); ++p) {
    v1::Parameter* parameter = snapshot.parameters.add_parameters();
    parameter->set_name(snapshot.layout.parameter(p).name);
    for (int64_t extent : snapshot.layout.parameter(p).shape) parameter->add_shape(extent);
  }
  v1::FrozenParameter* frozen = snapshot.parameters.add_frozen();
  frozen->set_name("f");
  frozen->add_shape(7);
  frozen->set_dtype(v1::bf16);
  return snapshot;
}

// What a manifest of these files says of itself.
absl::Status Check(const step::StateSnapshot& snapshot, const SavePlan& plan, uint32_t member,
                   uint32_t members) {
  Manifest m;
  m.config = snapshot.config;
  m.parameters = snapshot.parameters;
  m.chunks = snapshot.chunks;
  m.member = member;
  m.members = members;
  m.states = {"exp_avg", "exp_avg_sq"};
  m.files = plan.files();
  return CheckPieces(m, "p");
}

TEST(SavePlan, OneFileForEachKind) {
  const step::StateSnapshot snapshot = Snapshot({0, 3});
  const auto plan = SavePlan::Create(snapshot, 1, uint64_t{1} << 30);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->files().size(), 4u);
  EXPECT_EQ(plan->files()[0].name, "model-00001-of-00001.safetensors");
  EXPECT_EQ(plan->files()[2].name, "exp_avg_sq-00001-of-00001.safetensors");
  EXPECT_EQ(plan->files()[2].tensors[1].name, "b.exp_avg_sq");
  EXPECT_EQ(plan->files()[0].tensors.size(), 3u);
  EXPECT_EQ(plan->files()[3].tensors[0].end - plan->files()[3].tensors[0].begin, 14u);
  EXPECT_TRUE(Check(snapshot, *plan, 1, 1).ok()) << Check(snapshot, *plan, 1, 1);
  uint64_t bytes = 0;
  for (const FileEntry& file : plan->files()) {
    EXPECT_EQ(file.header_bytes % 64, 0u);
    bytes += file.bytes;
  }
  EXPECT_EQ(plan->bytes(), bytes);
  const SavePlan::Place place = plan->place(1, 1);
  EXPECT_EQ(plan->files()[place.file].tensors[place.tensor].name, "b.exp_avg");
}

TEST(SavePlan, FilesAreBounded) {
  const step::StateSnapshot snapshot = Snapshot({0, 3});
  const auto plan = SavePlan::Create(snapshot, 1, 40'010);
  ASSERT_TRUE(plan.ok()) << plan.status();
  // a alone, then b and the one without elements.
  ASSERT_EQ(plan->files().size(), 7u);
  EXPECT_EQ(plan->files()[0].name, "model-00001-of-00002.safetensors");
  EXPECT_EQ(plan->files()[0].tensors.size(), 1u);
  EXPECT_EQ(plan->files()[1].tensors.size(), 2u);
  EXPECT_TRUE(Check(snapshot, *plan, 1, 1).ok()) << Check(snapshot, *plan, 1, 1);
}

TEST(SavePlan, MembersHoldPieces) {
  const step::StateSnapshot low = Snapshot({0, 1}), high = Snapshot({1, 3});
  const auto first = SavePlan::Create(low, 1, uint64_t{1} << 30);
  const auto second = SavePlan::Create(high, 2, uint64_t{1} << 30);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->files()[0].tensors[0].name, "a[0:4096]");
  EXPECT_EQ(second->files()[0].tensors[0].name, "a[4096:10000]");
  EXPECT_EQ(second->files()[1].tensors[0].name, "a[4096:10000].exp_avg");
  EXPECT_EQ(second->files()[0].tensors[1].name, "b");
  EXPECT_EQ(first->files().size(), 4u);   // with the frozen ones
  EXPECT_EQ(second->files().size(), 3u);  // which the first member has
  EXPECT_TRUE(Check(low, *first, 1, 2).ok()) << Check(low, *first, 1, 2);
  EXPECT_TRUE(Check(high, *second, 2, 2).ok()) << Check(high, *second, 2, 2);
  EXPECT_FALSE(Check(high, *first, 2, 2).ok());
}

}  // namespace
}  // namespace shardd::checkpoint

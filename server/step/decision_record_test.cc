#include "server/step/decision_record.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace shardd::step {
namespace {

constexpr uint64_t kParameters = 200;

std::vector<contract::ParameterEntry> Table() {
  std::vector<contract::ParameterEntry> table(kParameters);
  for (uint64_t p = 0; p < kParameters; ++p) {
    std::memset(static_cast<void*>(&table[p]), 0, sizeof(table[p]));
    // Two groups, and one parameter that lags behind.
    table[p].applied = p == 70 ? 3 : 5;
    table[p].beta1_product = p < 100 ? 0.5 : 0.25;
    table[p].scalars[2] = 1.5f;
  }
  return table;
}

store::Decision MakeDecision() {
  store::Decision decision;
  decision.header.sequence = 9;
  decision.header.step = 8;
  decision.header.applied = 5;
  decision.header.loss_scale = 1024;
  decision.presence.assign((kParameters + 63) / 64, 0xf0f0);
  decision.groups.resize(2);
  decision.groups[1].lr = 0.125;
  decision.blob = "where the data stands";
  return decision;
}

std::span<const std::byte> Bytes(const EncodedRecord& record) {
  return record.buffer.span().subspan(0, record.bytes);
}

TEST(DecisionRecord, ComesBackAsItWas) {
  contract::StepRecordEntry entry{};
  entry.step = 8;
  entry.loss = 2.5;
  const auto table = Table();
  const EncodedRecord encoded = EncodeDecision(MakeDecision(), entry, table);
  const absl::StatusOr<DecisionRecord> decoded = DecodeDecision(Bytes(encoded), kParameters, 2);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->decision.header.sequence, 9u);
  EXPECT_EQ(decoded->decision.header.loss_scale, 1024);
  EXPECT_EQ(decoded->decision.presence, MakeDecision().presence);
  EXPECT_EQ(decoded->decision.groups[1].lr, 0.125);
  EXPECT_EQ(decoded->decision.blob, "where the data stands");
  EXPECT_EQ(decoded->record.loss, 2.5);
  ASSERT_EQ(decoded->table.size(), kParameters);
  EXPECT_EQ(std::memcmp(decoded->table.data(), table.data(), kParameters * sizeof(table[0])), 0);
}

TEST(DecisionRecord, ATableOfFewGroupsIsSmall) {
  contract::StepRecordEntry entry{};
  entry.step = 8;
  const EncodedRecord encoded = EncodeDecision(MakeDecision(), entry, Table());
  EXPECT_LT(encoded.bytes, 1500u) << "four runs, not " << kParameters << " entries";
}

TEST(DecisionRecord, WhatDoesNotFitIsRefused) {
  contract::StepRecordEntry entry{};
  entry.step = 8;
  const EncodedRecord encoded = EncodeDecision(MakeDecision(), entry, Table());
  const auto bytes = Bytes(encoded);
  EXPECT_FALSE(DecodeDecision(bytes, kParameters + 64, 2).ok());
  EXPECT_FALSE(DecodeDecision(bytes, kParameters, 3).ok());
  for (size_t size = 0; size < bytes.size(); size += 13) {
    EXPECT_TRUE(absl::IsDataLoss(DecodeDecision(bytes.subspan(0, size), kParameters, 2).status()))
        << size;
  }
  entry.step = 7;
  const EncodedRecord other = EncodeDecision(MakeDecision(), entry, Table());
  EXPECT_FALSE(DecodeDecision(Bytes(other), kParameters, 2).ok());
}

TEST(StateRecord, ComesBackAsItWas) {
  auto then = std::make_unique<contract::JobHeader>();
  then->generation = 7;
  then->recomputed_steps = 2;
  then->regroups = 3;
  then->failed = 1;
  std::strcpy(then->failure, "overflow at the floor");
  const EncodedRecord encoded = EncodeState(*then);
  auto now = std::make_unique<contract::JobHeader>();
  ASSERT_TRUE(ReplayState(Bytes(encoded), now.get()).ok());
  EXPECT_EQ(now->generation.load(), 7u);
  EXPECT_EQ(now->recomputed_steps.load(), 2u);
  EXPECT_EQ(now->regroups.load(), 3u);
  EXPECT_EQ(now->failed.load(), 1u);
  EXPECT_STREQ(now->failure, "overflow at the floor");
  EXPECT_FALSE(ReplayState(Bytes(encoded).subspan(1), now.get()).ok());
}

}  // namespace
}  // namespace shardd::step

#include "proto/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "proto/contract/crc32c.h"

namespace shardd::checkpoint {
namespace {

using ::testing::HasSubstr;

// Two parameters of 4096 and 100 elements in two chunks, and a frozen one.
Manifest Example() {
  Manifest m;
  m.writer = "1.2.3";
  m.job_id = std::string(32, 'a');
  m.uid = 1000;
  m.step = 100;
  m.applied = 99;
  m.generation = 7;
  m.timeline = 0xfedcba9876543210u;
  m.states = {"exp_avg", "exp_avg_sq"};
  m.config.set_name("gpt");
  m.config.set_optimizer("adamw");
  m.config.add_groups()->mutable_hyper()->set_lr(0.1);
  m.config.set_slots(4);
  m.config.set_chunk_elements(4096);
  m.config.set_bucket_elements(4096);
  v1::Parameter* w = m.parameters.add_parameters();
  w->set_name("w");
  w->add_shape(64);
  w->add_shape(64);
  w->add_aliases("head.w");
  v1::Parameter* b = m.parameters.add_parameters();
  b->set_name("b");
  b->add_shape(100);
  v1::FrozenParameter* f = m.parameters.add_frozen();
  f->set_name("f");
  f->add_shape(3);
  f->set_dtype(v1::bf16);
  m.chunks = {0, 2};
  m.decision.sequence = 100;
  m.decision.clip_factor_bits = 0x3f7fffff;
  m.decision.loss_scale = 65536;
  m.decision.skipped_steps = 1;
  m.groups = {{0.1 + 0.2, 1.0 / 3, 0.999, 1e-8, std::nextafter(0.01, 1)}};
  m.presence = {3};
  m.blob = std::string("\0\xff{blob}", 8);
  m.record.emplace();
  m.record->step = 100;
  m.record->grad_norm = std::numeric_limits<double>::infinity();
  m.parameter_states = {{99, std::pow(0.9, 99), std::pow(0.999, 99)}, {42, 0.1, 0.7}};
  for (const char* kind : {"model", "exp_avg", "exp_avg_sq"}) {
    const std::string suffix = std::string(kind) == "model" ? "" : std::string(".") + kind;
    FileEntry file{
        std::string(kind) + "-00001-of-00001.safetensors", kind, 64 + 4196 * 4, 64, 0xdeadbeef, {}};
    file.tensors.push_back({"w" + suffix, 0, 0, 4096, 64, 64 + 16384, 1});
    file.tensors.push_back({"b" + suffix, 1, 0, 100, 64 + 16384, 64 + 16784, 0xffffffff});
    m.files.push_back(file);
  }
  m.files.push_back({"frozen-00001-of-00001.safetensors", "frozen", 64 + 6, 64, 0, {}});
  m.files.back().tensors.push_back({"f", 0, 0, 3, 64, 70, 2});
  return m;
}

TEST(Manifest, ThereAndBackToTheBit) {
  const Manifest m = Example();
  const std::string text = SerializeManifest(m);
  const auto back = ParseManifest(text, "p");
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializeManifest(*back), text);
  EXPECT_EQ(back->groups[0].lr, 0.1 + 0.2);
  EXPECT_EQ(back->groups[0].weight_decay, std::nextafter(0.01, 1));
  EXPECT_EQ(back->parameter_states[0].beta2_product, std::pow(0.999, 99));
  EXPECT_EQ(back->blob, m.blob);
  EXPECT_EQ(back->timeline, m.timeline);
  EXPECT_EQ(back->parameters.SerializeAsString(), m.parameters.SerializeAsString());
  EXPECT_EQ(back->config.SerializeAsString(), m.config.SerializeAsString());
  EXPECT_EQ(back->record->grad_norm, std::numeric_limits<double>::infinity());
  EXPECT_EQ(back->decision.clip_factor_bits, 0x3f7fffffu);
  EXPECT_TRUE(CheckPieces(*back, "p").ok()) << CheckPieces(*back, "p");
  EXPECT_EQ(back->bytes(), 3 * (64 + 4196 * 4) + 70u);
}

TEST(Manifest, EveryFlippedBitIsFound) {
  const std::string text = SerializeManifest(Example());
  for (size_t i = 0; i < text.size(); ++i) {
    std::string flipped = text;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    const auto back = ParseManifest(flipped, "dir/manifest.json");
    ASSERT_TRUE(absl::IsDataLoss(back.status())) << i << " " << back.status();
    EXPECT_THAT(back.status().message(), HasSubstr("dir/manifest.json"));
  }
  EXPECT_FALSE(ParseManifest(text.substr(0, text.size() / 2), "p").ok());
  EXPECT_FALSE(ParseManifest("", "p").ok());
}

// A manifest that was changed by hand, with a checksum that fits.
absl::Status CheckChanged(const std::function<void(Manifest*)>& change) {
  Manifest m = Example();
  change(&m);
  const auto back = ParseManifest(SerializeManifest(m), "p");
  return back.ok() ? CheckPieces(*back, "p") : back.status();
}

TEST(Manifest, ExpAvgWithoutExpAvgSqIsRefusedByName) {
  const absl::Status status = CheckChanged([](Manifest* m) {
    FileEntry& file = m->files[2];
    file.tensors.pop_back();
    file.bytes = file.tensors.back().end;
  });
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(status.message(), HasSubstr("parameter 'b' has no exp_avg_sq"));
}

TEST(Manifest, WhatDoesNotFitIsNamed) {
  const std::vector<std::pair<std::function<void(Manifest*)>, std::string>> changes = {
      {[](Manifest* m) { m->files[0].tensors[1].end += 4; }, "does not end with its last tensor"},
      {[](Manifest* m) { m->files[0].tensors[1].begin -= 4; }, "'b' does not lie"},
      {[](Manifest* m) { m->files[0].tensors[1].parameter = 9; }, "'b' that belongs nowhere"},
      {[](Manifest* m) { m->files[0].tensors[1].elements = 50; }, "'b' that belongs nowhere"},
      {[](Manifest* m) { m->files[0].name = "../../etc/passwd"; }, "names a file"},
      {[](Manifest* m) { m->files[1].kind = "momentum"; }, "unknown kind 'momentum'"},
      {[](Manifest* m) { m->files.pop_back(); }, "'f' has no frozen"},
      {[](Manifest* m) { m->files.erase(m->files.begin()); }, "'w' has no model weights"},
      {[](Manifest* m) { m->chunks.end = 3; }, "chunks that the layout does not have"},
      {[](Manifest* m) { m->presence.push_back(0); }, "decision is not of its parameters"},
      {[](Manifest* m) { m->groups.clear(); }, "decision is not of its parameters"},
      {[](Manifest* m) { m->member = 2; }, "no such member"},
      {[](Manifest* m) { m->applied = 101; }, "counters cannot be"},
      {[](Manifest* m) { m->generation = ~uint64_t{0}; }, "counters cannot be"},
      {[](Manifest* m) { m->parameters.mutable_parameters(1)->set_name("w"); }, "'w'"},
      {[](Manifest* m) { m->blob.assign((1 << 20) + 1, 'x'); }, "blob is too large"},
  };
  for (const auto& [change, message] : changes) {
    const absl::Status status = CheckChanged(change);
    EXPECT_TRUE(absl::IsDataLoss(status)) << message << ": " << status;
    EXPECT_THAT(status.message(), HasSubstr(message));
  }
}

TEST(Manifest, PiecesOfAMemberThatHoldsHalfTheChunks) {
  // The second chunk holds only b; w lies in the first.
  Manifest m = Example();
  m.member = 2;
  m.members = 2;
  m.chunks = {1, 2};
  m.files.pop_back();  // frozen ones are the first member's
  for (FileEntry& file : m.files) {
    file.tensors.erase(file.tensors.begin());
    file.tensors[0].begin = 64;
    file.bytes = file.tensors[0].end = 464;
  }
  EXPECT_TRUE(CheckPieces(m, "p").ok()) << CheckPieces(m, "p");
  m.chunks = {0, 2};
  EXPECT_THAT(CheckPieces(m, "p").message(), HasSubstr("'w' has no"));
}

TEST(Manifest, OfAnotherVersion) {
  std::string text = SerializeManifest(Example());
  // The version is checked only once the checksum fits, so this is what damage looks like.
  const size_t at = text.find("\"version\":1,");
  ASSERT_NE(at, std::string::npos);
  text[at + 10] = '2';
  EXPECT_TRUE(absl::IsDataLoss(ParseManifest(text, "p").status()));
}

// Its user may write to it: the checksum fits whatever it says.
TEST(Manifest, NestedWithoutEndIsRefused) {
  for (const int depth : {20, 2'000'000}) {
    const std::string rest = "\",\"format\":\"shardd checkpoint\",\"version\":1,\"config\":" +
                             std::string(static_cast<size_t>(depth), '[') +
                             std::string(static_cast<size_t>(depth), ']') + "}\n";
    char sum[9];
    std::snprintf(sum, sizeof(sum), "%08x", contract::Crc32c(rest.data(), rest.size()));
    const absl::Status refused =
        ParseManifest("{\"crc32c\":\"" + std::string(sum) + rest, "p").status();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << depth << refused;
    EXPECT_THAT(refused.message(), HasSubstr("nested too deeply"));
  }
}

TEST(PieceName, WholeAndPart) {
  EXPECT_EQ(PieceName("w", 100, 0, 100), "w");
  EXPECT_EQ(PieceName("w", 100, 0, 64), "w[0:64]");
  EXPECT_EQ(PieceName("w", 100, 64, 36), "w[64:100]");
  EXPECT_EQ(PieceName("w", 0, 0, 0), "w");
}

}  // namespace
}  // namespace shardd::checkpoint

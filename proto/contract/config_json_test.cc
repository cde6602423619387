#include "proto/contract/config_json.h"

#include <gtest/gtest.h>

#include "proto/contract/config_path.h"
#include "proto/daemon_config.pb.h"
#include "proto/job_config.pb.h"

namespace shardd::contract {
namespace {

std::string Error(const std::string& text) {
  v1::JobConfig config;
  return std::string(ParseJson(text, "job.json", &config).message());
}

TEST(ParseJson, ReadsEveryKindOfField) {
  v1::JobConfig config;
  config.set_optimizer("adamw");
  const absl::Status status = ParseJson(
      R"({"name": "gpt", "slots": 4, "grad_dtype": "bf16", "weights": "private",
          "max_norm": 1, "loss_scale": {"dynamic": true, "initial": 65536.0},
          "bucket_elements": 9007199254740993,
          "groups": [{"name": "decay", "hyper": {"lr": 1e-3}}, {"hyper": {"lr": 2e-3}}]})",
      "job.json", &config);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.name(), "gpt");
  EXPECT_EQ(config.optimizer(), "adamw");
  EXPECT_EQ(config.slots(), 4u);
  EXPECT_EQ(config.grad_dtype(), v1::bf16);
  EXPECT_EQ(config.weights(), v1::private_);
  EXPECT_EQ(config.max_norm(), 1.0);
  EXPECT_TRUE(config.loss_scale().dynamic());
  EXPECT_EQ(config.bucket_elements(), 9007199254740993u);
  ASSERT_EQ(config.groups_size(), 2);
  EXPECT_EQ(config.groups(0).name(), "decay");
  EXPECT_EQ(config.groups(1).hyper().lr(), 2e-3);
}

TEST(ParseJson, NamedRepeatedFieldReplacesTheOldOne) {
  v1::JobConfig config;
  config.add_groups()->set_name("old");
  ASSERT_TRUE(ParseJson(R"({"groups": [{"name": "new"}]})", "x", &config).ok());
  ASSERT_EQ(config.groups_size(), 1);
  EXPECT_EQ(config.groups(0).name(), "new");
}

TEST(ParseJson, NewElementsBeginAsTheFirstOldOne) {
  v1::JobConfig config;
  config.add_groups()->mutable_hyper()->set_beta1(0.9);
  ASSERT_TRUE(
      ParseJson(R"({"groups": [{"hyper": {"lr": 1}}, {"hyper": {"beta1": 0.5}}]})", "x", &config)
          .ok());
  ASSERT_EQ(config.groups_size(), 2);
  EXPECT_EQ(config.groups(0).hyper().beta1(), 0.9);
  EXPECT_EQ(config.groups(0).hyper().lr(), 1.0);
  EXPECT_EQ(config.groups(1).hyper().beta1(), 0.5);
  EXPECT_EQ(config.groups(1).hyper().lr(), 0.0);
}

TEST(ParseJson, UnknownKeyGivesDottedPathAndNearest) {
  EXPECT_EQ(Error(R"({"groups": [{}, {"hyper": {"weigth_decay": 0.1}}]})"),
            "job.json: unknown key 'groups[1].hyper.weigth_decay'; did you mean "
            "'groups[1].hyper.weight_decay'?");
  EXPECT_EQ(Error(R"({"slot": 3})"), "job.json: unknown key 'slot'; did you mean 'slots'?");
}

TEST(ParseJson, UnknownSectionIsNamedByItsKey) {
  EXPECT_EQ(Error(R"({"adam": {"weigth_decay": 0.1}})"),
            "job.json: unknown key 'adam.weigth_decay'; did you mean "
            "'groups[0].hyper.weight_decay'?");
}

TEST(ParseJson, NothingNearListsTheKeys) {
  const std::string error = Error(R"({"loss_scale": {"zzzzzzzzzz": 1}})");
  EXPECT_EQ(error,
            "job.json: unknown key 'loss_scale.zzzzzzzzzz'; the keys there are dynamic, initial, "
            "growth_interval, hysteresis, floor");
}

TEST(ParseJson, TypeErrorsNamePathExpectedAndFound) {
  EXPECT_EQ(Error(R"({"slots": -1})"),
            "job.json: 'slots' must be an integer from 0 to 4294967295, not the number -1");
  EXPECT_EQ(Error(R"({"slots": 4294967296})"),
            "job.json: 'slots' must be an integer from 0 to 4294967295, not the number 4294967296");
  EXPECT_EQ(Error(R"({"slots": 1.5})"),
            "job.json: 'slots' must be an integer from 0 to 4294967295, not the number 1.5");
  EXPECT_EQ(Error(R"({"loss_scale": {"dynamic": "yes"}})"),
            "job.json: 'loss_scale.dynamic' must be true or false, not the string \"yes\"");
  EXPECT_EQ(Error(R"({"grad_dtype": "fp8"})"),
            "job.json: 'grad_dtype' must be one of 'fp32', 'bf16', 'fp16', not the string \"fp8\"");
  EXPECT_EQ(Error(R"({"grad_dtype": "DTYPE_UNSPECIFIED"})"),
            "job.json: 'grad_dtype' must be one of 'fp32', 'bf16', 'fp16', not the string "
            "\"DTYPE_UNSPECIFIED\"");
  EXPECT_EQ(Error(R"({"groups": {}})"), "job.json: 'groups' must be an array, not the object {}");
  EXPECT_EQ(Error(R"({"groups": [3]})"),
            "job.json: 'groups[0]' must be an object, not the number 3");
  EXPECT_EQ(Error("[]"), "job.json: expected an object, not the array []");
}

TEST(ParseJson, DuplicateKeyIsRefusedByPath) {
  EXPECT_EQ(Error(R"({"slots": 1, "slots": 2})"),
            "job.json: 'slots' is given twice; keep one of them");
  EXPECT_EQ(Error(R"({"groups": [{"hyper": {}}, {"hyper": {"lr": 1, "eps": 1, "lr": 2}}]})"),
            "job.json: 'groups[1].hyper.lr' is given twice; keep one of them");
  // The same key in two objects is no duplicate.
  EXPECT_EQ(Error(R"({"groups": [{"name": "a"}, {"name": "b"}], "name": "c"})"), "");
}

TEST(ParseJson, BrokenTextSaysWhere) {
  const std::string error = Error("{\n  \"slots\": ,\n}");
  EXPECT_NE(error.find("job.json: not valid JSON"), std::string::npos) << error;
  EXPECT_NE(error.find("line 2"), std::string::npos) << error;
  EXPECT_NE(Error(std::string("{\"name\": \"\xff\"}")).find("not valid JSON"), std::string::npos);
}

TEST(ParseJson, AnErrorLeavesTheMessageAlone) {
  v1::JobConfig config;
  config.set_slots(7);
  config.add_groups()->set_name("kept");
  const std::string before = config.SerializeAsString();
  EXPECT_FALSE(ParseJson(R"({"slots": 1, "groups": [], "zz": 1})", "x", &config).ok());
  EXPECT_EQ(config.SerializeAsString(), before);
}

TEST(SetField, SetsNestedAndRepeatedFields) {
  v1::DaemonConfig daemon;
  ASSERT_TRUE(SetField(&daemon, "memory.budget_bytes", "4096").ok());
  ASSERT_TRUE(SetField(&daemon, "failpoints", "true").ok());
  ASSERT_TRUE(SetField(&daemon, "listen.socket", "/run/a b.sock").ok());
  EXPECT_EQ(daemon.memory().budget_bytes(), 4096u);
  EXPECT_TRUE(daemon.failpoints());
  EXPECT_EQ(daemon.listen().socket(), "/run/a b.sock");

  v1::JobConfig job;
  ASSERT_TRUE(SetField(&job, "groups[0].hyper.lr", "0.25").ok());
  ASSERT_TRUE(SetField(&job, "groups[0].name", "one").ok());
  ASSERT_TRUE(SetField(&job, "groups[1].hyper.lr", "0.5").ok());
  ASSERT_EQ(job.groups_size(), 2);
  EXPECT_EQ(job.groups(0).hyper().lr(), 0.25);
  EXPECT_EQ(job.groups(0).name(), "one");
  EXPECT_EQ(job.groups(1).hyper().lr(), 0.5);
}

TEST(SetField, ErrorsNameThePath) {
  v1::DaemonConfig daemon;
  EXPECT_EQ(SetField(&daemon, "memory.budget", "1").message(),
            "unknown key 'memory.budget'; the keys there are budget_bytes, ring_bytes_max");
  EXPECT_EQ(SetField(&daemon, "memory.budget_byte", "1").message(),
            "unknown key 'memory.budget_byte'; did you mean 'memory.budget_bytes'?");
  EXPECT_EQ(SetField(&daemon, "memory.budget_bytes", "4k").message(),
            "'memory.budget_bytes' must be an integer of 64 bits, 0 or more, not '4k'");
  EXPECT_EQ(SetField(&daemon, "step.spin_microseconds", "nan").message(),
            "'step.spin_microseconds' must be a finite number, not 'nan'");
  EXPECT_EQ(SetField(&daemon, "memory", "1").message(),
            "'memory' holds several settings; name one, as in 'memory.budget_bytes'");
  EXPECT_EQ(SetField(&daemon, "memory[0].budget_bytes", "1").message(),
            "'memory[0].budget_bytes': 'memory' takes no index: memory");
  EXPECT_FALSE(SetField(&daemon, "", "1").ok());
  EXPECT_FALSE(SetField(&daemon, "memory..budget_bytes", "1").ok());
  EXPECT_FALSE(SetField(&daemon, "failpoints.x", "1").ok());
  v1::JobConfig job;
  EXPECT_EQ(SetField(&job, "groups[1].name", "x").message(),
            "'groups[1].name': 'groups' has 0 elements; the next index is 0");
  EXPECT_EQ(SetField(&job, "groups.name", "x").message(),
            "'groups.name': 'groups' takes an index, as in groups[0]");
  EXPECT_EQ(job.groups_size(), 0);
}

TEST(GetField, ReadsWhatSetFieldReads) {
  v1::JobConfig job;
  for (const std::string& path : FieldPaths(v1::JobConfig::descriptor())) {
    const bool is_text = path == "name" || path == "optimizer" || path == "groups[0].name";
    const bool is_enum =
        path.find("dtype") != std::string::npos || path == "weights" || path == "durability";
    const bool is_bool = path == "loss_scale.dynamic" || path == "groups[0].hyper.nesterov" ||
                         path == "split_master" || path.find("stochastic") == 0;
    const std::string value = is_text                   ? "x"
                              : is_bool                 ? "true"
                              : path == "weights"       ? "shared"
                              : path == "durability"    ? "process"
                              : path == "schedule.kind" ? "cosine"
                              : path == "moments"       ? "bf16"
                              : is_enum                 ? "fp16"
                                                        : "3";
    ASSERT_TRUE(SetField(&job, path, value).ok()) << path;
    const absl::StatusOr<std::string> read = GetField(job, path);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(*read == value || *read == "3.0") << path << " " << *read;
  }
  EXPECT_FALSE(GetField(job, "nothing").ok());
}

TEST(EditDistance, CountsEdits) {
  EXPECT_EQ(EditDistance("", "abc"), 3u);
  EXPECT_EQ(EditDistance("abc", "abc"), 0u);
  EXPECT_EQ(EditDistance("weigth", "weight"), 1u);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
}

}  // namespace
}  // namespace shardd::contract

#include "client/job_options.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "client/regrouped.h"
#include "proto/contract/layout.h"

namespace shardd {
namespace {

TEST(JobOptions, SurviveTheWayThroughProto) {
  JobOptions options = JobOptions::ForDType(DType::kFloat16);
  options.name = "j";
  options.groups = {{"a", 1, 0.1, 0.2, 0.3, 0.4},
                    {"b", 2, 0.5, 0.6, 0.7, 0.8, 0.9, 0.25, true, 0.125, 0.5, 7}};
  options.schedule = {ScheduleKind::kWsd, 10, 100, 20, 0.5, 0.25};
  options.slots = 12;
  options.weight_dtype = DType::kFloat32;
  options.moments = MomentFormat::kBFloat16;
  options.split_master = true;
  options.stochastic_moments = true;
  options.stochastic_weights = true;
  options.seed = 11;
  options.stage = 3;
  options.weights = WeightsMode::kPrivate;
  options.max_norm = 1.5;
  options.loss_scale = {true, 1024, 7, 3, 2};
  options.max_consecutive_skips = 5;
  options.reference_tokens = 99;
  options.chunk_elements = 4096;
  options.bucket_elements = 8192;
  options.join_timeout = absl::Seconds(3);
  options.step_timeout = absl::Milliseconds(1500);
  options.heartbeat = absl::Milliseconds(250);
  options.durability = Durability::kNode;
  const v1::JobConfig config = ToProto(options);
  const JobOptions back = FromProto(config);
  EXPECT_EQ(ToProto(back).SerializeAsString(), config.SerializeAsString());
  EXPECT_EQ(back.groups, options.groups);
  EXPECT_EQ(back.schedule, options.schedule);
  EXPECT_EQ(back.weights, WeightsMode::kPrivate);
  EXPECT_EQ(back.step_timeout, absl::Milliseconds(1500));
  // Every field of the message has a value: none was forgotten.
  std::vector<const google::protobuf::FieldDescriptor*> set;
  config.GetReflection()->ListFields(config, &set);
  EXPECT_EQ(set.size(), static_cast<size_t>(v1::JobConfig::descriptor()->field_count()));
}

TEST(JobOptions, JsonFillsInDefaults) {
  const auto options = JobOptions::FromJson(
      R"({"name": "x", "groups": [{"hyper": {"lr": 0.5}}, {"name": "no_decay",
          "hyper": {"weight_decay": 0}}]})",
      "f.json");
  ASSERT_TRUE(options.ok()) << options.status();
  ASSERT_EQ(options->groups.size(), 2u);
  EXPECT_EQ(options->groups[0].lr, 0.5);
  EXPECT_EQ(options->groups[0].beta2, 0.999);
  EXPECT_EQ(options->groups[1].lr, ParameterGroup{}.lr);
  EXPECT_EQ(options->groups[1].weight_decay, 0.0);
  EXPECT_EQ(options->grad_dtype, DType::kBFloat16);
  EXPECT_FALSE(options->loss_scale.dynamic);
  EXPECT_EQ(options->heartbeat, JobOptions().heartbeat);
}

TEST(JobOptions, Fp16ScalesDynamicallyUnlessTold) {
  auto options = JobOptions::FromJson(R"({"grad_dtype": "fp16"})", "f");
  ASSERT_TRUE(options.ok());
  EXPECT_TRUE(options->loss_scale.dynamic);
  EXPECT_EQ(options->loss_scale.initial, 65536);
  options = JobOptions::FromJson(R"({"grad_dtype": "fp16", "loss_scale": {"initial": 128}})", "f");
  EXPECT_FALSE(options->loss_scale.dynamic);
  EXPECT_EQ(options->loss_scale.initial, 128);
  options = JobOptions::FromJson(R"({"loss_scale": {"dynamic": true, "hysteresis": 1}})", "f");
  EXPECT_EQ(options->loss_scale.initial, 65536);
  EXPECT_EQ(options->loss_scale.hysteresis, 1u);
  EXPECT_EQ(options->loss_scale.growth_interval, 1000u);
}

TEST(JobOptions, JsonErrorsNameTheFileAndThePath) {
  EXPECT_EQ(JobOptions::FromJson(R"({"adam": {"weigth_decay": 1}})", "job.json").status().message(),
            "job.json: unknown key 'adam.weigth_decay'; did you mean "
            "'groups[0].hyper.weight_decay'?");
  EXPECT_EQ(JobOptions::FromJson(R"({"stage": 4})", "job.json").status().message(),
            "job.json: 'stage' must be from 0 to 3, not 4");
  EXPECT_EQ(JobOptions::FromJsonFile("/nowhere/job.json").status().code(),
            absl::StatusCode::kNotFound);
  char path[] = "/tmp/job_options_XXXXXX";
  const int fd = mkstemp(path);
  ASSERT_GE(fd, 0);
  std::ofstream(path) << R"({"name": "from-file"})";
  EXPECT_EQ(JobOptions::FromJsonFile(path)->name, "from-file");
  close(fd);
  unlink(path);
}

TEST(CheckOpen, StridesAreContiguousOrRefusedByName) {
  JobOptions job;
  job.name = "j";
  const auto check = [&](std::vector<int64_t> shape, std::vector<int64_t> strides) {
    return CheckOpen({}, job, {{"w", std::move(shape), 0, std::move(strides), {}}});
  };
  EXPECT_TRUE(check({2, 3}, {}).ok());
  EXPECT_TRUE(check({2, 3}, {3, 1}).ok());
  EXPECT_TRUE(check({2, 1, 3}, {3, 77, 1}).ok()) << "strides of extent 1 mean nothing";
  EXPECT_TRUE(check({0, 8}, {5, 5}).ok());
  EXPECT_TRUE(check({}, {}).ok());
  const absl::Status transposed = check({2, 3}, {1, 2});
  EXPECT_EQ(transposed.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(transposed.message(),
            "parameter 'w' of shape (2,3) has strides (1,2); only contiguous parameters can be "
            "registered: make a contiguous copy of it");
  EXPECT_FALSE(check({2, 3}, {1}).ok());
}

TEST(CheckOpen, RanksSlotsStagesAndAliases) {
  JobOptions job;
  job.name = "j";
  job.slots = 2;
  SessionOptions options;
  options.world_size = 3;
  EXPECT_NE(std::string(CheckOpen(options, job, {}).message()).find("2 slots and 3 ranks"),
            std::string::npos);
  options.world_size = 2;
  options.rank = 2;
  EXPECT_FALSE(CheckOpen(options, job, {}).ok());
  options.rank = 1;
  EXPECT_TRUE(CheckOpen(options, job, {}).ok());
  const ParameterSpec head{"head", {1}, 0, {}, {"embedding"}};
  EXPECT_TRUE(CheckOpen(options, job, {head}).ok());
  EXPECT_FALSE(CheckOpen(options, job, {head, {"embedding", {1}, 0, {}, {}}}).ok());
  job.stage = 4;
  EXPECT_FALSE(CheckOpen(options, job, {}).ok());
  job.stage = 0;
  job.heartbeat = absl::ZeroDuration();
  EXPECT_FALSE(CheckOpen(options, job, {}).ok());
}

TEST(HyperHash, IsTheDocumentedFunction) {
  const std::vector<ParameterGroup> groups = {{"a", 1, 2, 3, 4, 5}, {"b", 6, 7, 8, 9, 10}};
  contract::Hasher hasher;
  for (double x : {1., 2., 3., 4., 5., 6., 7., 8., 9., 10.}) hasher.Add(x);
  EXPECT_EQ(HyperHash(groups), hasher.value());
  EXPECT_EQ(HyperHash({{"other name", 1, 2, 3, 4, 5}, groups[1]}), hasher.value());
  EXPECT_NE(HyperHash({groups[1], groups[0]}), hasher.value());
}

TEST(SessionOptions, FromEnvironment) {
  const auto set = [](const char* rank, const char* world) {
    setenv("RANK", rank, 1);
    setenv("WORLD_SIZE", world, 1);
  };
  set("1", "4");
  setenv("SHARDD_ADDRESS", "unix:/x", 1);
  const auto options = SessionOptions::FromEnvironment();
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->rank, 1u);
  EXPECT_EQ(options->world_size, 4u);
  EXPECT_EQ(options->address, "unix:/x");
  EXPECT_EQ(options->reconnect_timeout, absl::Seconds(60));
  for (const char* wrong : {"soon", "-1", "nan"}) {
    setenv("SHARDD_RECONNECT_SECONDS", wrong, 1);
    EXPECT_NE(std::string(SessionOptions::FromEnvironment().status().message())
                  .find(std::string("SHARDD_RECONNECT_SECONDS is '") + wrong),
              std::string::npos);
  }
  setenv("SHARDD_RECONNECT_SECONDS", "0.5", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->reconnect_timeout, absl::Milliseconds(500));
  unsetenv("SHARDD_RECONNECT_SECONDS");
  set("one", "4");
  EXPECT_NE(std::string(SessionOptions::FromEnvironment().status().message()).find("RANK is 'one'"),
            std::string::npos);
  set("4", "4");
  EXPECT_FALSE(SessionOptions::FromEnvironment().ok());
  set("0", "-1");
  EXPECT_FALSE(SessionOptions::FromEnvironment().ok());
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_EQ(SessionOptions::FromEnvironment()->world_size, 1u);
}

TEST(Regrouped, TravelsInAStatus) {
  const std::string blob("\0blob\xff", 6);
  const absl::Status status = RegroupedStatus({0x0123456789abcdef, blob});
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  const std::optional<Regrouped> got = GetRegrouped(status);
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->next_step, 0x0123456789abcdefu);
  EXPECT_EQ(got->blob, blob);
  EXPECT_FALSE(GetRegrouped(absl::OkStatus()).has_value());
  EXPECT_FALSE(GetRegrouped(absl::AbortedError("another")).has_value());
}

}  // namespace
}  // namespace shardd

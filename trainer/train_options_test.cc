#include "trainer/train_options.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd::trainer {
namespace {

using ::testing::HasSubstr;

TrainOptions Parse(std::vector<std::string> arguments, uint32_t world_size = 1) {
  auto options = ParseTrainOptions(arguments, world_size);
  EXPECT_TRUE(options.ok()) << options.status();
  return options.ok() ? *options : TrainOptions();
}

std::string Refusal(std::vector<std::string> arguments, uint32_t world_size = 1) {
  return std::string(ParseTrainOptions(arguments, world_size).status().message());
}

TEST(TrainOptions, Defaults) {
  const TrainOptions options = Parse({"--data=x"}, 3);
  EXPECT_EQ(options.job.slots, 3u);
  EXPECT_EQ(options.job.stage, 2);
  EXPECT_EQ(options.job.weight_dtype, DType::kBFloat16);
  EXPECT_FALSE(options.job.loss_scale.dynamic);
  EXPECT_EQ(options.job.groups[0].weight_decay, 0.01);
  EXPECT_EQ(options.job.optimizer, "adamw");
  EXPECT_EQ(options.job.groups[0].momentum, 0.0);
  EXPECT_EQ(options.job.groups[1].weight_decay, 0.0);
  EXPECT_NEAR(options.model.init_std, 0.02 * std::sqrt(6.0), 1e-12);
  EXPECT_EQ(options.tokens_per_step(), 3u * 8 * 128);
}

TEST(TrainOptions, Everything) {
  const TrainOptions options =
      Parse({"--data=x",           "--data=y",          "--heldout=z",     "--layers=2",
             "--d-model=96",       "--heads=3",         "--context=64",    "--steps=30",
             "--stage=3",          "--slots=4",         "--dtype=fp16",    "--weights=private",
             "--seed=9",           "--lr=1e-3",         "--warmup=5",      "--schedule=linear",
             "--weight-decay=0.2", "--clip=0.5",        "--batch=2",       "--threads=2",
             "--metrics=m",        "--export-master=e", "--init-std=0.02", "--job=j",
             "--resume=must",      "--no-progress",     "--lr-final=0",    "--optimizer=sgd",
             "--momentum=0.5"});
  EXPECT_EQ(options.data.size(), 2u);
  EXPECT_EQ(options.model.layers, 2);
  EXPECT_EQ(options.model.width, 96);
  EXPECT_EQ(options.model.init_std, 0.02);
  EXPECT_EQ(options.job.grad_dtype, DType::kFloat16);
  EXPECT_TRUE(options.job.loss_scale.dynamic);
  EXPECT_EQ(options.job.loss_scale.initial, 65536.0);
  EXPECT_EQ(options.job.weights, WeightsMode::kPrivate);
  EXPECT_EQ(options.job.max_norm, 0.5);
  EXPECT_EQ(options.job.optimizer, "sgd");
  EXPECT_EQ(options.job.groups[0].momentum, 0.5);
  EXPECT_EQ(options.job.groups[1].momentum, 0.5);
  EXPECT_EQ(options.resume, Resume::kMust);
  EXPECT_EQ(options.schedule.steps, 30u);
  EXPECT_EQ(options.schedule.At(30), 0.0);
  EXPECT_FALSE(options.progress);
}

TEST(TrainOptions, Refusals) {
  EXPECT_THAT(Refusal({}), HasSubstr("--data is missing"));
  EXPECT_THAT(Refusal({"--data=x", "--stage=4"}), HasSubstr("0, 1, 2 or 3"));
  EXPECT_THAT(Refusal({"--data=x", "--slots=2"}, 3), HasSubstr("at least that"));
  EXPECT_THAT(Refusal({"--data=x", "--heads=3"}), HasSubstr("128 is no multiple of 3 heads"));
  EXPECT_THAT(Refusal({"--data=x", "--weigth-decay=1"}), HasSubstr("--weight-decay"));
  EXPECT_THAT(Refusal({"--data=x", "--dmodel=1"}), HasSubstr("--d-model"));
}

TEST(TrainOptions, HelpNeedsNothingElse) {
  EXPECT_TRUE(Parse({"--help"}).help);
  for (const char* flag : {"--data=PATH", "--stage=N", "--metrics=FILE", "shardctl run"}) {
    EXPECT_THAT(TrainHelp(), HasSubstr(flag));
  }
}

}  // namespace
}  // namespace shardd::trainer

#include "trainer/training_loop.h"

#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "proto/safetensors/reader.h"
#include "trainer/data/byte_text.h"
#include "trainer/export_master.h"
#include "trainer/fake_session.h"
#include "trainer/models/gpt2.h"
#include "trainer/tensor/cpu_device.h"

namespace shardd::trainer {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSteps = 4;

class TrainingLoopTest : public ::testing::Test {
 protected:
  TrainingLoopTest() : text_(Text()), device_({.threads = 1}) {
    options_.model = {.context = 8, .width = 8, .layers = 1, .heads = 2};
    options_.job.name = "test";
    options_.job.slots = 2;
    options_.job.grad_dtype = options_.job.weight_dtype = DType::kFloat32;
    options_.job.groups = {{.name = "decay"}, {.name = "no_decay"}};
    options_.sequences = 2;
    options_.steps = kSteps;
    options_.schedule = {.kind = ScheduleKind::kLinear, .peak = 0.5, .warmup = 1, .steps = kSteps};
    model_ = *models::Gpt2::Create(options_.model);
    heldout_ = data::EvaluationBatches(text_, 8, 4);
  }
  void SetUp() override {
    char name[] = "/tmp/training_loop_test.XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  static data::ByteText Text() {
    std::vector<uint8_t> bytes(500);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>("shardd "[i % 7]);
    return data::ByteText::FromBytes(bytes);
  }

  FakeJob NewJob() const { return FakeJob(options_.job, ParameterSpecs(*model_)); }

  // Runs the loop over `session`; the metrics go to metrics_path().
  absl::Status Run(FakeSession* session, TrainSummary* summary = nullptr) {
    auto batches = data::TrainingBatches::Create(&text_, {.seed = options_.seed,
                                                          .context = 8,
                                                          .sequences = options_.sequences,
                                                          .slots = options_.job.slots});
    auto metrics = MetricsFile::Open(metrics_path());
    if (!batches.ok() || !metrics.ok()) return metrics.status();
    const auto now = [this] { return absl::FromUnixSeconds(++seconds_); };
    TrainingLoop loop(options_, {.session = session,
                                 .model = model_.get(),
                                 .device = &device_,
                                 .batches = &*batches,
                                 .heldout = &heldout_,
                                 .metrics = metrics->get(),
                                 .now = now});
    if (absl::Status s = loop.Train(); !s.ok()) return s;
    const auto result = loop.Summarise();
    if (result.ok() && summary != nullptr) *summary = *result;
    return result.status();
  }

  std::string metrics_path() const { return root_ + "/metrics.jsonl"; }
  // Step, loss and norm of every line.
  std::vector<std::string> Curve() const {
    std::vector<std::string> curve;
    std::ifstream in(metrics_path());
    for (std::string line; std::getline(in, line);) {
      const auto json = nlohmann::json::parse(line);
      curve.push_back(json["step"].dump() + json["loss_hex"].dump() + json["grad_norm_hex"].dump());
    }
    return curve;
  }

  TrainOptions options_;
  const data::ByteText text_;
  tensor::CpuDevice device_;
  std::unique_ptr<models::Gpt2> model_;
  std::vector<models::Batch> heldout_;
  std::string root_;
  int64_t seconds_ = 0;
};

TEST_F(TrainingLoopTest, Learns) {
  options_.steps = options_.schedule.steps = 60;
  FakeJob job = NewJob();
  FakeSession session(&job, std::nullopt);
  TrainSummary summary;
  ASSERT_TRUE(Run(&session, &summary).ok());
  EXPECT_EQ(summary.committed_step, 60u);
  EXPECT_GT(summary.loss_first, 5.0);
  EXPECT_LT(summary.loss_last, 3.0);
  EXPECT_LT(summary.loss_heldout, 2.5);
  // The clock ticks a second at each step.
  EXPECT_NEAR(summary.tokens_per_second, 2.0 * 2 * 8, 1e-9);
  EXPECT_EQ(Curve().size(), 60u);
}

// A regroup at each verb in turn: the same masters, the same curve, every step once,
// and at most one step computed again.
TEST_F(TrainingLoopTest, ARegroupAnywhereChangesNothing) {
  FakeJob reference = NewJob();
  FakeSession undisturbed(&reference, std::nullopt);
  TrainSummary want;
  ASSERT_TRUE(Run(&undisturbed, &want).ok());
  const std::vector<std::string> curve = Curve();
  ASSERT_EQ(curve.size(), kSteps);
  for (uint64_t at = 0; at < undisturbed.verbs(); ++at) {
    std::filesystem::remove(metrics_path());
    FakeJob job = NewJob();
    FakeSession session(&job, at);
    TrainSummary summary;
    const absl::Status status = Run(&session, &summary);
    ASSERT_TRUE(status.ok()) << at << ": " << status;
    ASSERT_EQ(job.masters, reference.masters) << at;
    ASSERT_EQ(Curve(), curve) << at;
    ASSERT_LE(job.computed_steps, kSteps + 1) << at;
    ASSERT_EQ(job.blob, reference.blob) << at;
    ASSERT_EQ(summary.loss_first, want.loss_first) << at;
    ASSERT_EQ(summary.loss_last, want.loss_last) << at;
    ASSERT_EQ(summary.loss_heldout, want.loss_heldout) << at;
  }
}

// A process that ends and another that goes on: as if it had been one.
TEST_F(TrainingLoopTest, ANewProcessGoesOn) {
  FakeJob reference = NewJob();
  FakeSession whole(&reference, std::nullopt);
  ASSERT_TRUE(Run(&whole).ok());
  const std::vector<std::string> curve = Curve();
  std::filesystem::remove(metrics_path());

  FakeJob job = NewJob();
  FakeSession first(&job, std::nullopt);
  options_.steps = 2;
  ASSERT_TRUE(Run(&first).ok());
  EXPECT_EQ(Curve().size(), 2u);
  // What its writer did not get to write is taken from the records.
  std::filesystem::resize_file(metrics_path(), std::filesystem::file_size(metrics_path()) - 5);
  options_.steps = kSteps;
  FakeSession second(&job, std::nullopt);
  TrainSummary summary;
  ASSERT_TRUE(Run(&second, &summary).ok());
  EXPECT_EQ(job.masters, reference.masters);
  EXPECT_EQ(Curve(), curve);
  EXPECT_EQ(summary.loss_first, reference.records[0].loss);
}

TEST_F(TrainingLoopTest, MetricsOfAnotherRunAreReplaced) {
  FakeJob old = NewJob();
  FakeSession old_session(&old, std::nullopt);
  ASSERT_TRUE(Run(&old_session).ok());
  options_.seed = 2;
  FakeJob job = NewJob();
  FakeSession session(&job, std::nullopt);
  ASSERT_TRUE(Run(&session).ok());
  EXPECT_EQ(Curve().size(), kSteps);
  EXPECT_NE(job.records[0].loss, old.records[0].loss);
}

TEST_F(TrainingLoopTest, ForeignJobsAreRefused) {
  FakeJob job = NewJob();
  job.initialised = true;
  job.committed_step = 3;
  for (const char* blob : {"{", "{\"version\":9}", "{\"version\":1}", "[]", "7"}) {
    job.blob = blob;
    FakeSession session(&job, std::nullopt);
    const absl::Status status = Run(&session);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << blob;
    EXPECT_THAT(std::string(status.message()), HasSubstr("choose another --job"));
  }
}

TEST_F(TrainingLoopTest, ExportsMasters) {
  FakeJob job = NewJob();
  FakeSession session(&job, std::nullopt);
  ASSERT_TRUE(Run(&session).ok());
  const std::string path = root_ + "/masters.safetensors";
  ASSERT_TRUE(ExportMaster(&session, *model_, {{"step", "4"}}, path).ok());
  const auto reader = safetensors::Reader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ((*reader)->tensors().size(), job.masters.size());
  for (size_t i = 0; i < job.masters.size(); ++i) {
    EXPECT_EQ((*reader)->tensors()[i].shape, job.parameters[i].shape);
    const auto values = (*reader)->Values<float>(job.parameters[i].name, safetensors::DType::kF32);
    ASSERT_TRUE(values.ok());
    EXPECT_EQ(*values, job.masters[i]);
  }
}

}  // namespace
}  // namespace shardd::trainer

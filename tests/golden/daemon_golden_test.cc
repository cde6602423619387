// The golden files, and variants of them with other sizes and hyper-parameters,
// trained through a real daemon; and that the check can fail.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/golden/check_file.h"
#include "tests/support/daemon_process.h"

namespace shardd::golden {
namespace {

FileReport CheckWithDaemon(const std::string& path) {
  test::DaemonProcess daemon;
  std::vector<std::string> jobs;
  FileReport report = CheckFile(daemon.socket(), path, "golden-", &jobs);
  std::fputs(report.Text(path).c_str(), stdout);
  return report;
}

// A copy of a golden file in which `to`, of the same length, stands for `from`.
std::string Altered(const std::string& path, const std::string& from, const std::string& to) {
  std::ifstream in("tests/golden/" + path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const size_t at = bytes.find(from);
  EXPECT_NE(at, std::string::npos) << path << " has no " << from;
  if (at != std::string::npos) bytes.replace(at, from.size(), to);
  const std::string altered = testing::TempDir() + "/altered.safetensors";
  std::ofstream(altered, std::ios::binary) << bytes;
  return altered;
}

class GoldenFiles : public testing::TestWithParam<const char*> {};

TEST_P(GoldenFiles, PassThroughADaemon) {
  const FileReport report = CheckWithDaemon(std::string("tests/golden/") + GetParam());
  EXPECT_TRUE(report.status.ok()) << report.status;
  EXPECT_LE(report.worst, 1.0);
  EXPECT_GT(report.worst, 0.0);  // float32 cannot be float64
}

INSTANTIATE_TEST_SUITE_P(
    All, GoldenFiles,
    testing::Values("optimizer_adagrad.safetensors", "optimizer_adam.safetensors",
                    "optimizer_adam_amsgrad.safetensors", "optimizer_adamw.safetensors",
                    "optimizer_adamw_amsgrad.safetensors", "optimizer_lamb.safetensors",
                    "optimizer_lion.safetensors", "optimizer_rmsprop.safetensors",
                    "optimizer_sgd.safetensors", "variant_adagrad.safetensors",
                    "variant_lamb.safetensors", "variant_optimizer.safetensors",
                    "variant_sgd.safetensors", "model_gpt2.safetensors",
                    "variant_model.safetensors"),
    [](const auto& info) {
      const std::string name = info.param;
      return name.substr(0, name.find('.'));
    });

TEST(GoldenCheck, AnotherHyperparameterFails) {
  const FileReport optimizer = CheckWithDaemon(
      Altered("optimizer_adamw.safetensors", "\"eps\":\"1e-08\"", "\"eps\":\"1e-05\""));
  EXPECT_EQ(optimizer.status.code(), absl::StatusCode::kOutOfRange) << optimizer.status;
  const FileReport model = CheckWithDaemon(
      Altered("variant_model.safetensors", "\"opt.lr\":\"0.002\"", "\"opt.lr\":\"0.003\""));
  EXPECT_EQ(model.status.code(), absl::StatusCode::kOutOfRange) << model.status;
}

TEST(GoldenCheck, WhatIsNotSupportedIsNamedWithWhatIs) {
  const FileReport optimizer =
      CheckWithDaemon(Altered("optimizer_adamw.safetensors", "\"adamw\"", "\"adamz\""));
  EXPECT_EQ(optimizer.status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(absl::StrContains(optimizer.status.message(), "'adamz' is not supported"));
  EXPECT_TRUE(absl::StrContains(optimizer.status.message(), "adamw")) << optimizer.status;
  const FileReport model = CheckWithDaemon(
      Altered("model_gpt2.safetensors", "\"model\":\"gpt2\"", "\"model\":\"gpt9\""));
  EXPECT_EQ(model.status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(absl::StrContains(model.status.message(), "'gpt9' is not supported"));
  EXPECT_TRUE(absl::StrContains(model.status.message(), "gpt2")) << model.status;
}

TEST(GoldenCheck, AFileOfNeitherFormOrWithoutAHyperparameterIsRefused) {
  const FileReport neither = CheckWithDaemon("tests/golden/check_file.h");
  EXPECT_EQ(neither.status.code(), absl::StatusCode::kDataLoss) << neither.status;
  const FileReport without =
      CheckWithDaemon(Altered("optimizer_adamw.safetensors", "\"eps\":", "\"epz\":"));
  EXPECT_EQ(without.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(without.status.message(), "lacks eps")) << without.status;
}

}  // namespace
}  // namespace shardd::golden

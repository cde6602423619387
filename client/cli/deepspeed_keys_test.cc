#include "client/cli/deepspeed_keys.h"

#include <gtest/gtest.h>

#include <map>

namespace shardd::cli {
namespace {

std::map<std::string, ExplainedKey> Explained(const std::string& text) {
  absl::StatusOr<std::vector<ExplainedKey>> keys = ExplainDeepSpeed(text, "ds_config.json");
  EXPECT_TRUE(keys.ok()) << keys.status();
  std::map<std::string, ExplainedKey> out;
  if (keys.ok()) {
    for (const ExplainedKey& key : *keys) out[key.key] = key;
  }
  return out;
}

TEST(ExplainDeepSpeed, EveryFate) {
  auto keys = Explained(R"({
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": true,
                          "offload_optimizer": {"device": "nvme"}},
    "amp": {"enabled": false, "opt_level": "O1"},
    "tensorboard": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "gradient_acumulation_steps": 4})");
  EXPECT_EQ(keys["gradient_clipping"].fate, "honoured");
  EXPECT_EQ(keys["zero_optimization.stage"].fate, "honoured");
  EXPECT_EQ(keys["zero_optimization.overlap_comm"].fate, "always");
  EXPECT_EQ(keys["zero_optimization.offload_optimizer.device"].fate, "refused");
  EXPECT_EQ(keys["amp.opt_level"].fate, "off");
  EXPECT_EQ(keys["tensorboard.enabled"].fate, "refused");
  EXPECT_NE(keys["tensorboard.enabled"].text.find("step_records"), std::string::npos);
  EXPECT_NE(keys["optimizer.params.lr"].text.find("auto: learning_rate"), std::string::npos);
  EXPECT_EQ(keys["gradient_acumulation_steps"].fate, "unknown");
  EXPECT_NE(keys["gradient_acumulation_steps"].text.find("gradient_accumulation_steps"),
            std::string::npos);
}

TEST(ExplainDeepSpeed, ValuesAreComparedWithTheirKind) {
  EXPECT_EQ(Explained(R"({"zero_optimization": {"stage": 4}})")["zero_optimization.stage"].text,
            "it must be 0, 1, 2, 3");
  EXPECT_EQ(Explained(R"({"zero_optimization": {"stage": true}})")["zero_optimization.stage"].fate,
            "refused");
  EXPECT_EQ(Explained(R"({"gradient_predivide_factor": 1})")["gradient_predivide_factor"].fate,
            "off");
}

TEST(ExplainDeepSpeed, WhatIsNoObjectIsRefused) {
  EXPECT_EQ(ExplainDeepSpeed("[1]", "x").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ExplainDeepSpeed("{", "x").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace shardd::cli

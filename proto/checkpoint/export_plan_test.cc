#include "proto/checkpoint/export_plan.h"

#include <gtest/gtest.h>

#include <cstring>

namespace shardd::checkpoint {
namespace {

v1::OpenRequest Model() {
  v1::OpenRequest model;
  v1::Parameter* wte = model.add_parameters();
  wte->set_name("wte.weight");
  wte->add_shape(3);
  wte->add_shape(2);
  wte->add_aliases("lm_head.weight");
  v1::Parameter* empty = model.add_parameters();
  empty->set_name("empty");
  empty->add_shape(0);
  empty->add_shape(8);
  v1::FrozenParameter* frozen = model.add_frozen();
  frozen->set_name("rotary");
  frozen->add_shape(5);
  frozen->set_dtype(v1::bf16);
  return model;
}

TEST(PlanExport, TiedFrozenAndEmptyTensorsHaveTheirPlaces) {
  const auto plan = PlanExport(Model(), v1::fp32, "", {{"format", "pt"}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const uint64_t data = plan->header.size();
  EXPECT_EQ(data % 64, 0u);
  EXPECT_EQ(plan->parameters[0], (std::vector<uint64_t>{data, data + 24}));
  EXPECT_EQ(plan->parameters[1], (std::vector<uint64_t>{data + 48}));
  EXPECT_EQ(plan->frozen[0], (std::vector<uint64_t>{data + 48}));
  EXPECT_EQ(plan->bytes, data + 48 + 20);
  EXPECT_NE(plan->header.find("\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[3,2]"),
            std::string::npos)
      << plan->header;
  uint64_t length = 0;
  std::memcpy(&length, plan->header.data(), sizeof(length));
  EXPECT_EQ(length + 8, data);
}

TEST(PlanExport, Bf16TakesTwoBytesAnElement) {
  const auto plan = PlanExport(Model(), v1::bf16, "", {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->bytes, plan->header.size() + 2 * (6 + 6 + 5));
}

TEST(PlanExport, PrefixBeforeOwnNamesOnly) {
  const auto plan = PlanExport(Model(), v1::fp32, "transformer.", {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_NE(plan->header.find("\"transformer.wte.weight\""), std::string::npos);
  EXPECT_NE(plan->header.find("\"lm_head.weight\""), std::string::npos);
  EXPECT_NE(plan->header.find("\"transformer.rotary\""), std::string::npos);
}

TEST(PlanExport, NoTensors) {
  const auto plan = PlanExport({}, v1::fp32, "", {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->bytes, plan->header.size());
}

TEST(PlanExport, ANameThatIsThereTwiceIsRefusedByName) {
  v1::OpenRequest model = Model();
  model.mutable_frozen(0)->set_name("lm_head.weight");
  const auto plan = PlanExport(model, v1::fp32, "", {});
  EXPECT_TRUE(absl::IsInvalidArgument(plan.status()));
  EXPECT_NE(plan.status().message().find("lm_head.weight"), absl::string_view::npos);
}

TEST(PlanExport, OtherDTypesAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(PlanExport(Model(), v1::fp16, "", {}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ParseExportDType("fp64").status()));
  EXPECT_EQ(*ParseExportDType("bf16"), v1::bf16);
}

}  // namespace
}  // namespace shardd::checkpoint

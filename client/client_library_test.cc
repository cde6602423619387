// The shared library as a trainer uses it: through client.h, linked with nothing of
// ours, and exporting nothing else.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <typeinfo>

#include "client/client.h"

namespace shardd {
namespace {

TEST(ClientLibrary, EveryFunctionOfTheHeaderIsThere) {
  EXPECT_EQ(DTypeBytes(DType::kBFloat16), 2u);
  EXPECT_FALSE(GetRegrouped(absl::OkStatus()).has_value());
  EXPECT_TRUE(JobOptions::ForDType(DType::kFloat16).loss_scale.dynamic);
  EXPECT_TRUE(JobOptions::FromJson("{}", "x").ok());
  EXPECT_FALSE(JobOptions::FromJsonFile("/nowhere").ok());
  EXPECT_TRUE(SessionOptions::FromEnvironment().ok());
  SessionOptions options;
  options.address = "unix:/nowhere/shardd.sock";
  options.connect_timeout = absl::ZeroDuration();
  JobOptions job;
  job.name = "x";
  EXPECT_EQ(Session::Open(options, job, {{"w", {1}, 0, {}, {}}}).status().code(),
            absl::StatusCode::kUnavailable);
  // A user may derive from Session, as tests of trainers do.
  EXPECT_NE(&typeid(Session), nullptr);
}

TEST(ClientLibrary, ExportsNothingElse) {
  FILE* nm = popen("nm --dynamic --defined-only --demangle client/libshardd_client.so", "r");
  ASSERT_NE(nm, nullptr);
  char line[4096];
  int ours = 0;
  while (std::fgets(line, sizeof(line), nm) != nullptr) {
    const std::string text(line);
    const bool expected = text.find(" shardd::Session::") != std::string::npos ||
                          text.find(" shardd::SessionOptions::") != std::string::npos ||
                          text.find(" shardd::JobOptions::") != std::string::npos ||
                          text.find(" shardd::GetRegrouped") != std::string::npos ||
                          text.find(" shardd::DTypeBytes") != std::string::npos ||
                          text.find(" for shardd::Session@@") != std::string::npos ||
                          text.find(" A SHARDD_0") != std::string::npos;
    EXPECT_TRUE(expected) << text;
    ours += expected ? 1 : 0;
  }
  EXPECT_EQ(pclose(nm), 0);
  EXPECT_GE(ours, 7);
}

}  // namespace
}  // namespace shardd

#include "client/cli/output.h"

#include <gtest/gtest.h>

#include <limits>

#include "proto/control.pb.h"

namespace shardd::cli {
namespace {

TEST(TableTest, ColumnsLineUpAndNumbersStandRight) {
  Table table({"JOB", "STEP", "STATE"});
  table.AddRow({"gpt", "7", "running"});
  table.AddRow({"a-long-name", "12345", "idle"});
  EXPECT_EQ(table.Text(),
            "JOB           STEP  STATE\n"
            "gpt              7  running\n"
            "a-long-name  12345  idle\n");
}

TEST(TableTest, HeaderAlone) { EXPECT_EQ(Table({"A", "B"}).Text(), "A  B\n"); }

TEST(NamedValuesTest, OneWidth) {
  EXPECT_EQ(NamedValues({{"a", "1"}, {"long", "two words"}}), "a     1\nlong  two words\n");
}

TEST(ToJsonTest, NamesDefaultsAndNumbers) {
  v1::ListJobsReply reply;
  v1::JobStatus* job = reply.add_jobs();
  job->set_name("gpt \"quoted\"");
  job->set_committed_step(18446744073709551615u);
  job->mutable_config()->set_grad_dtype(v1::bf16);
  job->mutable_last()->set_grad_norm(std::numeric_limits<double>::infinity());
  job->mutable_last()->set_loss(std::numeric_limits<double>::quiet_NaN());
  Json json = Json::parse(ToJson(reply).dump());
  const Json& out = json["jobs"][0];
  EXPECT_EQ(out["name"], "gpt \"quoted\"");
  EXPECT_EQ(out["committed_step"].get<uint64_t>(), 18446744073709551615u);
  EXPECT_EQ(out["config"]["grad_dtype"], "bf16");
  EXPECT_EQ(out["last"]["grad_norm"], "inf");
  EXPECT_EQ(out["last"]["loss"], "nan");
  EXPECT_EQ(out["world_size"], 0);
  EXPECT_TRUE(out["sessions"].is_array());
}

TEST(ToJsonTest, BytesAreHex) {
  v1::JoinReply reply;
  reply.set_blob(std::string("\x00\xff", 2));
  EXPECT_EQ(ToJson(reply)["blob"], "00ff");
}

TEST(FormatTest, BytesAndSeconds) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(uint64_t{3} << 30), "3.0 GiB");
  EXPECT_EQ(FormatBytes(std::numeric_limits<uint64_t>::max()), "16.0 EiB");
  EXPECT_EQ(FormatSeconds(0.25), "0.2s");
  EXPECT_EQ(FormatSeconds(90), "1m30s");
  EXPECT_EQ(FormatSeconds(7260), "2h01m");
  EXPECT_EQ(FormatSeconds(90000), "1d01h");
  EXPECT_EQ(FormatNumber(1.23456789, 4), "1.235");
}

}  // namespace
}  // namespace shardd::cli

#include "server/config/config.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <map>

namespace shardd::config {
namespace {

absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& flags,
                                  const std::map<std::string, std::string>& environment = {}) {
  return ParseCommandLine(flags, [&](const std::string& name) -> std::optional<std::string> {
    const auto it = environment.find(name);
    if (it == environment.end()) return std::nullopt;
    return it->second;
  });
}

std::string WriteFile(const std::string& text) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/shardd.json";
  std::ofstream(path) << text;
  return path;
}

TEST(Config, FlagBeatsEnvironmentBeatsFile) {
  const std::string file = WriteFile(
      R"({"memory": {"budget_bytes": 1}, "step": {"threads": 1}, "limits": {"jobs": 7}})");
  const auto line = Parse({"--config=" + file, "--memory.budget_bytes=3"},
                          {{"SHARDD_MEMORY_BUDGET_BYTES", "2"}, {"SHARDD_STEP_THREADS", "5"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.memory().budget_bytes(), 3u);
  EXPECT_EQ(line->config.step().threads(), 5u);
  EXPECT_EQ(line->config.limits().jobs(), 7u);
  EXPECT_EQ(line->config.listen().socket_mode(), "0660");
}

TEST(Config, UnknownKeysNameTheNearest) {
  const auto in_file = Parse({"--config=" + WriteFile(R"({"memory": {"budget_byte": 1}})")});
  EXPECT_TRUE(absl::IsInvalidArgument(in_file.status()));
  EXPECT_NE(in_file.status().message().find("memory.budget_byte"), absl::string_view::npos);
  EXPECT_NE(in_file.status().message().find("memory.budget_bytes"), absl::string_view::npos)
      << in_file.status();
  const auto flag = Parse({"--step.thread=3"});
  EXPECT_NE(flag.status().message().find("step.threads"), absl::string_view::npos) << flag.status();
}

TEST(Config, ValuesAreChecked) {
  const auto refused = [](const std::string& flag) {
    return std::string(Parse({flag}).status().message());
  };
  EXPECT_NE(refused("--listen.socket_mode=rw").find("octal"), std::string::npos);
  EXPECT_NE(refused("--listen.socket=relative").find("absolute"), std::string::npos);
  EXPECT_NE(refused("--listen.socket=/" + std::string(120, 'x')).find("bytes"), std::string::npos);
  EXPECT_NE(refused("--step.isa=sse9").find("avx512"), std::string::npos);
  EXPECT_NE(refused("--step.threads=-1").find("step.threads"), std::string::npos);
  EXPECT_NE(refused("--config=/does/not/exist").find("/does/not/exist"), std::string::npos);
  EXPECT_NE(refused("positional").find("positional"), std::string::npos);
  const auto environment = Parse({}, {{"SHARDD_STEP_THREADS", "many"}});
  EXPECT_NE(environment.status().message().find("SHARDD_STEP_THREADS"), absl::string_view::npos);
}

TEST(Config, JournalAndFaultsAreChecked) {
  const auto parse = [](std::vector<std::string> arguments) {
    arguments.push_back("--store.directory=/dev/shm/x");
    return ParseCommandLine(arguments, [](const std::string&) { return std::nullopt; });
  };
  const auto line = parse({"--journal.directory=/var/lib/shardd"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.journal().on_failure(), "stop");
  EXPECT_EQ(line->config.journal().snapshots_kept(), 1u);
  for (const char* wrong : {"--journal.directory=relative", "--journal.directory=/dev/shm/x",
                            "--journal.on_failure=explode", "--journal.segment_bytes=4096",
                            "--journal.snapshots_kept=100", "--journal.mirror=nobody",
                            "--journal.mirror_seconds=-1", "--file_faults=*:sync:1:eio"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(parse({wrong}).status())) << wrong;
  }
  EXPECT_TRUE(parse({"--failpoints=true", "--file_faults=*:sync:1:eio"}).ok());
}

TEST(Config, HelpNamesEveryKey) {
  const std::string help = HelpText();
  for (const char* key : {"--listen.socket=", "--memory.budget_bytes=", "--store.directory=",
                          "--step.threads=", "--limits.jobs=", "--check-config"}) {
    EXPECT_NE(help.find(key), std::string::npos) << key;
  }
  EXPECT_TRUE(Parse({"--help"})->help);
  EXPECT_TRUE(Parse({"--version"})->version);
}

}  // namespace
}  // namespace shardd::config

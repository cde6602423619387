// Command lines against a fake daemon: what is sent, what is printed, exit codes.
#include "client/cli/command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "client/cli/commands.h"
#include "client/cli/fake_daemon.h"

namespace shardd::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class CommandTest : public ::testing::Test {
 protected:
  CommandTest() {
    environment_.variables["PATH"] = "/usr/bin:/bin";
    environment_.system_socket = "/nowhere/shardd.sock";
    environment_.executable_directory = "/nowhere";
  }

  int Run(std::vector<std::string> arguments, const std::string& input = "") {
    std::istringstream in(input);
    std::ostringstream out, err;
    int code = RunCommandLine(AllCommands(), environment_, arguments, in, out, err);
    out_ = out.str();
    err_ = err.str();
    return code;
  }
  // Adds the fake daemon's address and JSON output.
  Json RunJson(std::vector<std::string> arguments) {
    arguments.push_back("--output=json");
    arguments.push_back("--address=" + daemon_.socket());
    EXPECT_EQ(Run(arguments), 0) << err_;
    return Json::parse(out_);
  }
  int RunAt(std::vector<std::string> arguments, const std::string& input = "") {
    arguments.push_back("--address=unix:" + daemon_.socket());
    return Run(arguments, input);
  }

  void ServeOneJob() {
    daemon_.list_jobs = [](const v1::ListJobsRequest& request, v1::ListJobsReply* reply) {
      if (!request.name().empty() && request.name() != "gpt") return grpc::Status::OK;
      v1::JobStatus* job = reply->add_jobs();
      job->set_name("gpt");
      job->set_state("idle");
      job->set_committed_step(41);
      job->set_world_size(2);
      job->set_state_bytes(3 << 20);
      job->set_weights_bytes(1 << 20);
      job->set_idle_seconds(7200);
      job->mutable_config()->set_stage(2);
      job->mutable_last()->set_step(41);
      job->mutable_last()->set_loss(2.5);
      job->set_crash_cost("trainer: 1 step");
      job->set_durable_step(40);
      job->set_journal_state("degraded");
      job->set_journal_failure("no space");
      return grpc::Status::OK;
    };
    daemon_.server_info = [](const v1::ServerInfoRequest&, v1::ServerInfoReply* reply) {
      reply->set_version("0.1.0");
      reply->set_pid(17);
      reply->set_state_directory("/run/shardd/state");
      return grpc::Status::OK;
    };
  }

  Environment environment_;
  FakeDaemon daemon_;
  std::string out_, err_;
};

TEST_F(CommandTest, HelpTeaches) {
  EXPECT_EQ(Run({"--help"}), 0);
  for (const auto& command : AllCommands()) {
    const CommandSpec& spec = command->spec();
    EXPECT_THAT(out_, HasSubstr(spec.name + " "));
  }
  for (const auto& command : AllCommands()) {
    const CommandSpec& spec = command->spec();
    std::vector<std::string> words;
    std::istringstream name(spec.name);
    for (std::string word; name >> word;) words.push_back(word);
    words.push_back("--help");
    EXPECT_EQ(Run(words), 0);
    EXPECT_THAT(out_, StartsWith("usage: shardctl " + spec.name + " [flags]"));
    EXPECT_THAT(out_, HasSubstr("  shardctl " + spec.name)) << "has no example";
    EXPECT_THAT(out_, HasSubstr("--output"));
  }
  EXPECT_EQ(Run({"help", "job", "delete"}), 0);
  EXPECT_THAT(out_, StartsWith("usage: shardctl job delete [flags] JOB"));
  EXPECT_EQ(Run({}), 2);
  EXPECT_THAT(err_, HasSubstr("usage: shardctl COMMAND"));
}

TEST_F(CommandTest, WhatIsMistypedNamesTheNearest) {
  EXPECT_EQ(Run({"staus"}), 2);
  EXPECT_EQ(err_, "shardctl: unknown command 'staus': did you mean 'status'?\n");
  EXPECT_EQ(Run({"job", "delte", "x"}), 2);
  EXPECT_THAT(err_, HasSubstr("did you mean 'job delete'?"));
  EXPECT_EQ(Run({"failpoint"}), 2);
  EXPECT_THAT(err_, HasSubstr("did you mean 'failpoint arm'?"));
  EXPECT_EQ(Run({"jobs", "--ouput=json"}), 2);
  EXPECT_THAT(err_, HasSubstr("did you mean --output?"));
  EXPECT_EQ(Run({"jobs", "--output=xml"}), 2);
  EXPECT_THAT(err_, HasSubstr("must be table or json, not 'xml'"));
  EXPECT_EQ(Run({"jobs", "gpt"}), 2);
  EXPECT_THAT(err_, HasSubstr("'jobs' does not take 'gpt'"));
  EXPECT_EQ(Run({"shards"}), 2);
  EXPECT_THAT(err_, HasSubstr("'shards' needs JOB"));
}

TEST_F(CommandTest, Jobs) {
  ServeOneJob();
  EXPECT_EQ(RunAt({"jobs"}), 0) << err_;
  EXPECT_EQ(out_,
            "JOB  STATE  STEP      DURABLE  RANKS  STAGE     HELD  ON DISK   IDLE  UID\n"
            "gpt  idle     41  40 degraded    0/2      2  4.0 MiB      0 B  2h00m    0\n");
  Json json = RunJson({"jobs"});
  EXPECT_EQ(json["jobs"][0]["committed_step"], 41);
}

TEST_F(CommandTest, Status) {
  ServeOneJob();
  EXPECT_EQ(RunAt({"status", "gpt"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("committed step  41"));
  EXPECT_THAT(out_, HasSubstr("a crash costs   trainer: 1 step"));
  EXPECT_THAT(out_, HasSubstr("loss 2.5"));
  EXPECT_THAT(out_, HasSubstr("degraded, durable up to step 40"));
  EXPECT_THAT(out_, HasSubstr("on disk: no space"));
  Json json = RunJson({"status"});
  EXPECT_EQ(json["daemon"]["state_directory"], "/run/shardd/state");
  EXPECT_EQ(json["jobs"][0]["name"], "gpt");
  EXPECT_EQ(RunAt({"status", "other"}), 1);
  EXPECT_THAT(err_, HasSubstr("no job other that you may see"));
}

TEST_F(CommandTest, Shards) {
  daemon_.list_shards = [](const v1::ListShardsRequest& request, v1::ListShardsReply* reply) {
    EXPECT_EQ(request.job(), "gpt");
    v1::Shard* shard = reply->add_shards();
    shard->set_chunks(3);
    shard->set_elements(1000);
    shard->set_max_applied(7);
    shard->set_min_applied(6);
    shard->set_first_parameter("wte");
    reply->add_shards()->set_rank(1);
    return grpc::Status::OK;
  };
  EXPECT_EQ(RunAt({"shards", "gpt"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("0..2"));
  EXPECT_THAT(out_, HasSubstr("6..7"));
  EXPECT_EQ(RunJson({"shards", "gpt"})["shards"][1]["rank"], 1);
}

TEST_F(CommandTest, DeletingIsMeant) {
  std::string deleted;
  bool forced = false;
  daemon_.delete_job = [&](const v1::DeleteJobRequest& request, v1::DeleteJobReply* reply) {
    deleted = request.job();
    forced = request.force();
    reply->set_freed_bytes(2048);
    return grpc::Status::OK;
  };
  EXPECT_EQ(RunAt({"job", "delete", "gpt"}), 1);
  EXPECT_THAT(err_, HasSubstr("add --yes if you mean it"));
  environment_.interactive = true;
  EXPECT_EQ(RunAt({"job", "delete", "gpt"}, "n\n"), 1);
  EXPECT_EQ(deleted, "");
  EXPECT_EQ(RunAt({"job", "delete", "gpt"}, "y\n"), 0);
  EXPECT_EQ(deleted, "gpt");
  EXPECT_FALSE(forced);
  EXPECT_EQ(out_, "deleted gpt, freed 2.0 KiB\n");
  environment_.interactive = false;
  EXPECT_EQ(RunJson({"job", "delete", "gpt", "--yes", "--force"})["freed_bytes"], 2048);
  EXPECT_TRUE(forced);
}

TEST_F(CommandTest, TheDaemonsErrorsArePassedOn) {
  daemon_.delete_job = [](const v1::DeleteJobRequest&, v1::DeleteJobReply*) {
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "job gpt has 2 ranks: use --force");
  };
  EXPECT_EQ(RunAt({"job", "delete", "gpt", "--yes"}), 1);
  EXPECT_EQ(err_, "shardctl: job gpt has 2 ranks: use --force\n");
  EXPECT_EQ(RunAt({"job", "delete", "gpt", "--yes", "--output=json"}), 1);
  Json json = Json::parse(err_);
  EXPECT_EQ(json["error"]["code"], "FAILED_PRECONDITION");
  EXPECT_EQ(json["error"]["message"], "job gpt has 2 ranks: use --force");
}

TEST_F(CommandTest, Failpoints) {
  v1::ArmFailpointRequest armed;
  daemon_.arm_failpoint = [&](const v1::ArmFailpointRequest& request) {
    armed = request;
    return grpc::Status::OK;
  };
  daemon_.wait_failpoint = [&](const v1::WaitFailpointRequest& request,
                               v1::WaitFailpointReply* reply) {
    EXPECT_EQ(request.deadline_seconds(), 2.5);
    reply->set_hits(3);
    return grpc::Status::OK;
  };
  EXPECT_EQ(RunAt({"failpoint", "arm", "step.decide", "--skip=4"}), 0) << err_;
  EXPECT_EQ(armed.name(), "step.decide");
  EXPECT_EQ(armed.action(), "wait");
  EXPECT_EQ(armed.skip(), 4);
  EXPECT_EQ(RunJson({"failpoint", "wait", "step.decide", "--deadline=2.5"})["hits"], 3);
}

TEST_F(CommandTest, NoDaemonSaysHowToNameOne) {
  EXPECT_EQ(Run({"jobs", "--address=/nowhere/x.sock"}), 1);
  EXPECT_THAT(err_, HasSubstr("no daemon answers at /nowhere/x.sock"));
  EXPECT_THAT(err_, HasSubstr("set SHARDD_ADDRESS"));
  EXPECT_EQ(Run({"version", "--address=/nowhere/x.sock"}), 0);
  EXPECT_THAT(out_, HasSubstr("no daemon answers"));
}

TEST_F(CommandTest, VersionOfBoth) {
  ServeOneJob();
  Json json = RunJson({"version"});
  EXPECT_EQ(json["daemon"]["version"], "0.1.0");
  EXPECT_GE(json["protocol_version"], 1);
}

TEST_F(CommandTest, DoctorNamesTheDaemonsStateDirectory) {
  ServeOneJob();
  RunAt({"doctor", "--output=json"});
  Json json = Json::parse(out_);
  ASSERT_EQ(json["findings"].size(), 8);
  EXPECT_THAT(out_, HasSubstr("/run/shardd/state"));
  EXPECT_EQ(json["findings"][7]["check"], "versions");
  EXPECT_EQ(json["findings"][7]["severity"], "ok");
}

TEST_F(CommandTest, RunUsesTheDaemonThatIsThere) {
  // One rank: another one's failure would end it before it has said anything.
  EXPECT_EQ(RunAt({"run", "--ranks=1", "--address=" + daemon_.socket(), "--", "sh", "-c",
                   "echo $SHARDD_ADDRESS; exit 1"}),
            1);
  EXPECT_THAT(out_, HasSubstr("[0] unix:" + daemon_.socket() + "\n"));
  EXPECT_EQ(Run({"run", "--output=json", "--address=" + daemon_.socket(), "echo", "hi"}), 0);
  EXPECT_THAT(out_, HasSubstr("{\"rank\":0,\"stream\":\"stdout\",\"line\":\"hi\"}\n"));
  EXPECT_THAT(out_, HasSubstr("{\"exit_code\":0,\"ranks\":[{\"rank\":0,\"restarts\":0,"));
}

TEST_F(CommandTest, RunStartsNoDaemonInPlaceOfANamedOne) {
  EXPECT_EQ(Run({"run", "--address=/nowhere/x.sock", "--", "true"}), 1);
  EXPECT_THAT(err_, HasSubstr("no daemon answers"));
}

TEST_F(CommandTest, RunStartsAndEndsADaemonOfItsOwn) {
  char name[] = "/tmp/shardctl-run-XXXXXX";
  std::string runtime = mkdtemp(name);
  environment_.variables["XDG_RUNTIME_DIR"] = runtime;
  environment_.variables["SHARDD_DAEMON_BINARY"] = "client/cli/fake_daemon_main";
  EXPECT_EQ(Run({"run", "--", "sh", "-c",
                 "cat $XDG_RUNTIME_DIR/shardd/shardd.sock.flags; echo $SHARDD_ADDRESS"}),
            0)
      << err_;
  EXPECT_THAT(out_, HasSubstr("[0] --exit_when_idle_seconds=86400\n"));
  EXPECT_THAT(out_, HasSubstr("[0] unix:" + runtime + "/shardd/shardd.sock\n"));
  EXPECT_THAT(err_, HasSubstr("started a daemon"));
  EXPECT_EQ(Run({"jobs"}), 1) << "it still answers";
  // One that dies is started again while the ranks run on.
  EXPECT_EQ(Run({"run", "--", "sh", "-c", R"sh(
                 pid() { sed -n 's/^pid //p' $XDG_RUNTIME_DIR/shardd/shardd.sock.flags; }
                 first=$(pid)
                 kill -9 $first
                 until [ -n "$(pid)" ] && [ "$(pid)" != "$first" ];
    do :; done)sh"}),
            0)
      << err_;
  EXPECT_THAT(err_, HasSubstr("the daemon has ended: starting another in its place"));
  EXPECT_NE(err_.find("started a daemon"), err_.rfind("started a daemon")) << err_;
  environment_.variables.erase("SHARDD_DAEMON_BINARY");
  EXPECT_EQ(Run({"run", "--", "true"}), 1);
  EXPECT_THAT(err_, HasSubstr("name its binary with SHARDD_DAEMON_BINARY"));
  [[maybe_unused]] int rc = std::system(("rm -rf " + runtime).c_str());
}

}  // namespace
}  // namespace shardd::cli

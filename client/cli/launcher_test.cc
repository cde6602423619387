#include "client/cli/launcher.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

#include "absl/time/clock.h"

namespace shardd::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

class LauncherTest : public ::testing::Test {
 protected:
  LauncherTest() {
    char name[] = "/tmp/shardctl-launcher-XXXXXX";
    directory_ = mkdtemp(name);
    options_.environment = {"PATH=/usr/bin:/bin", "KEPT=yes", "RANK=77"};
    options_.address = "unix:/nowhere";
    options_.grace = absl::Seconds(20);
    options_.on_line = [this](uint32_t rank, Stream stream, std::string_view line) {
      (stream == Stream::kOut ? out_ : err_)[rank].emplace_back(line);
      if (on_line_) on_line_(rank, std::string(line));
    };
    options_.on_note = [this](const std::string& text) {
      notes_ += text + "\n";
      if (on_note_) on_note_(text);
    };
  }
  ~LauncherTest() override {
    [[maybe_unused]] int rc = std::system(("rm -rf " + directory_).c_str());
  }

  // Runs `script` with sh as every rank; DIR in it is a directory of the test's own.
  LaunchResult Run(uint32_t ranks, const std::string& script) {
    options_.ranks = ranks;
    options_.command = {"sh", "-c", script};
    options_.environment.push_back("DIR=" + directory_);
    absl::StatusOr<LaunchResult> result = Launch(options_);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : LaunchResult{-1, {}};
  }

  LaunchOptions options_;
  std::string directory_;
  std::map<uint32_t, std::vector<std::string>> out_, err_;
  std::function<void(uint32_t, const std::string&)> on_line_;
  std::function<void(const std::string&)> on_note_;
  std::string notes_;
  std::vector<pid_t> daemons_;
};

TEST_F(LauncherTest, EachRankKnowsItsPlace) {
  LaunchResult result =
      Run(3, "echo $RANK $LOCAL_RANK $WORLD_SIZE $SHARDD_ADDRESS $SHARDD_RESTART_COUNT $KEPT");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(out_[0], ElementsAre("0 0 3 unix:/nowhere 0 yes"));
  EXPECT_THAT(out_[2], ElementsAre("2 2 3 unix:/nowhere 0 yes"));
  EXPECT_EQ(notes_, "");
}

TEST_F(LauncherTest, LinesOfBothStreamsAndOneWithoutEnd) {
  Run(1, "echo a; echo; printf 'b c'; echo oops >&2");
  EXPECT_THAT(out_[0], ElementsAre("a", "", "b c"));
  EXPECT_THAT(err_[0], ElementsAre("oops"));
}

TEST_F(LauncherTest, ALineWithoutEndDoesNotGrowForever) {
  Run(1, "head -c 200000 /dev/zero | tr '\\0' x");
  size_t total = 0;
  for (const std::string& piece : out_[0]) {
    EXPECT_LE(piece.size(), (64u << 10) + (16u << 10));
    total += piece.size();
  }
  EXPECT_EQ(total, 200000);
  EXPECT_GT(out_[0].size(), 2);
}

TEST_F(LauncherTest, RestartsWhatDiesUpToTheLimit) {
  options_.max_restarts = 2;
  // Rank 1 dies twice, once by a signal; rank 0 never.
  LaunchResult result = Run(2, R"(
      echo start $SHARDD_RESTART_COUNT
      if [ $RANK = 1 ] && [ $SHARDD_RESTART_COUNT = 0 ]; then kill -9 $$; fi
      if [ $RANK = 1 ] && [ $SHARDD_RESTART_COUNT = 1 ]; then exit 7; fi)");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.ranks[0].restarts, 0);
  EXPECT_EQ(result.ranks[1].restarts, 2);
  EXPECT_EQ(result.ranks[1].exit_code, 0);
  EXPECT_THAT(out_[1], ElementsAre("start 0", "start 1", "start 2"));
  EXPECT_THAT(notes_,
              HasSubstr("rank 1 was killed by signal 9 (Killed): starting it again (1 of 2)"));
  EXPECT_THAT(notes_, HasSubstr("rank 1 ended with exit code 7: starting it again (2 of 2)"));
}

TEST_F(LauncherTest, PausesBetweenRestartsGrow) {
  options_.max_restarts = 3;
  options_.backoff = {.first = absl::Milliseconds(20), .most = absl::Milliseconds(30)};
  const absl::Time began = absl::Now();
  EXPECT_EQ(Run(1, "[ $SHARDD_RESTART_COUNT = 3 ]").exit_code, 0);
  EXPECT_GE(absl::Now() - began, absl::Milliseconds(50));
  EXPECT_THAT(notes_, HasSubstr("(1 of 3)\n"));
  EXPECT_THAT(notes_, HasSubstr("(2 of 3) after 20ms\n"));
  EXPECT_THAT(notes_, HasSubstr("(3 of 3) after 30ms\n"));
  // Whoever lives long enough is started again at once.
  notes_.clear();
  options_.settled = absl::ZeroDuration();
  EXPECT_EQ(Run(1, "[ $SHARDD_RESTART_COUNT = 3 ]").exit_code, 0);
  EXPECT_THAT(notes_, Not(HasSubstr("after")));
}

TEST_F(LauncherTest, ASignalEndsAPause) {
  options_.max_restarts = 2;
  options_.backoff = {.first = absl::Hours(1), .most = absl::Hours(1)};
  on_note_ = [](const std::string& text) {
    if (text.find("after 1h") != std::string::npos) kill(getpid(), SIGTERM);
  };
  EXPECT_EQ(Run(1, "exit 4").exit_code, 4);
}

TEST_F(LauncherTest, ADaemonThatEndsIsStartedAgainAndTheRanksGoOn) {
  const auto start = [this](const char* script) {
    const pid_t pid = fork();
    if (pid == 0) {
      execl("/bin/sh", "sh", "-c", script, nullptr);
      _exit(127);
    }
    daemons_.push_back(pid);
    return contract::UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  };
  const contract::UniqueFd first = start("exit 1");
  options_.daemon_pidfd = first.get();
  options_.backoff = {.first = absl::Milliseconds(20), .most = absl::Milliseconds(20)};
  int attempts = 0;
  options_.restart_daemon = [&]() -> absl::StatusOr<contract::UniqueFd> {
    switch (++attempts) {
      case 1:
        return start("exit 1");
      case 2:
        return absl::UnavailableError("it does not start");
      default:
        std::ofstream(directory_ + "/up") << "yes\n";
        return start("exec tail -f /dev/null");
    }
  };
  LaunchResult result = Run(2, "while ! [ -s $DIR/up ]; do :; done");
  for (pid_t pid : daemons_) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.ranks[0].restarts + result.ranks[1].restarts, 0);
  EXPECT_EQ(attempts, 3);
  EXPECT_THAT(notes_, HasSubstr("the daemon has ended: starting another in its place"));
  EXPECT_THAT(notes_, HasSubstr("it does not start; trying again in 20ms"));
}

TEST_F(LauncherTest, AFailureForGoodEndsTheOthersAndIsTheExitCode) {
  options_.max_restarts = 1;
  LaunchResult result = Run(3, R"(
      if [ $RANK = 1 ]; then exit 5; fi
      trap 'echo told; exit 9' TERM
      while :; do tail -f /dev/null & wait; done)");
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_EQ(result.ranks[1].restarts, 1);
  EXPECT_EQ(result.ranks[0].restarts, 0);
  EXPECT_THAT(notes_, HasSubstr("rank 1 has failed: ending the others"));
}

TEST_F(LauncherTest, RanksThatDoNotEndAreKilledAfterTheGrace) {
  options_.grace = absl::Milliseconds(50);
  LaunchResult result = Run(2, R"(
      trap '' TERM
      if [ $RANK = 1 ]; then
        mkfifo $DIR/fifo; read line <$DIR/fifo; exit 3
      fi
      while ! [ -p $DIR/fifo ]; do :; done
      echo go >$DIR/fifo
      exec tail -f /dev/null)");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.ranks[0].exit_code, 128 + SIGKILL);
  EXPECT_THAT(notes_, HasSubstr("killing the ranks that did not end"));
}

TEST_F(LauncherTest, ASignalGoesToAllRanksAndNothingIsRestarted) {
  options_.max_restarts = 5;
  int ready = 0;
  on_line_ = [&ready](uint32_t, const std::string& line) {
    if (line == "ready" && ++ready == 2) kill(getpid(), SIGTERM);
  };
  LaunchResult result = Run(2, R"(
      trap 'echo told $RANK; exit $((40 + RANK))' TERM
      echo ready
      tail -f /dev/null & wait)");
  EXPECT_THAT(out_[0], ElementsAre("ready", "told 0"));
  EXPECT_THAT(out_[1], ElementsAre("ready", "told 1"));
  EXPECT_EQ(result.ranks[0].exit_code, 40);
  EXPECT_EQ(result.ranks[1].exit_code, 41);
  EXPECT_EQ(result.ranks[0].restarts + result.ranks[1].restarts, 0);
  EXPECT_THAT(result.exit_code, ::testing::AnyOf(40, 41));
}

TEST_F(LauncherTest, ASecondSignalKills) {
  on_line_ = [](uint32_t, const std::string& line) {
    if (line == "ready" || line == "told") kill(getpid(), SIGINT);
  };
  LaunchResult result = Run(1, R"(
      trap 'echo told' INT
      echo ready
      while :; do tail -f /dev/null & wait; done)");
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(notes_, HasSubstr("killing all ranks"));
}

// True once the process is no more (within a minute).
bool Ended(pid_t pid) {
  int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) return true;
  pollfd polled{pidfd, POLLIN, 0};
  bool ended = poll(&polled, 1, 60000) == 1;
  close(pidfd);
  return ended;
}

TEST_F(LauncherTest, WhatADeadRankLeavesBehindIsKilled) {
  // The grandchild holds the rank's pipes, as a data loader would its sockets.
  Run(1, "tail -f /dev/null & echo $!; exit 0");
  ASSERT_EQ(out_[0].size(), 1);
  EXPECT_TRUE(Ended(std::stoi(out_[0][0])));
}

TEST_F(LauncherTest, RanksDieWithTheLauncher) {
  int fds[2];
  ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
  pid_t launcher = fork();
  if (launcher == 0) {
    on_line_ = [&fds](uint32_t, const std::string& line) {
      [[maybe_unused]] ssize_t n = write(fds[1], line.data(), line.size());
    };
    Run(1, "echo $$; exec tail -f /dev/null");
    _exit(0);
  }
  close(fds[1]);
  char text[32] = {};
  ASSERT_GT(read(fds[0], text, sizeof(text) - 1), 0);
  close(fds[0]);
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  EXPECT_TRUE(Ended(std::stoi(text)));
}

TEST_F(LauncherTest, StdinIsEmpty) {
  Run(1, "cat; echo end");
  EXPECT_THAT(out_[0], ElementsAre("end"));
}

TEST_F(LauncherTest, WhatCannotBeRunIsSaid) {
  options_.command = {"no-such-program"};
  EXPECT_THAT(Launch(options_).status().ToString(),
              HasSubstr("no program 'no-such-program' in PATH (/usr/bin:/bin)"));
  options_.command = {"/etc/passwd"};
  EXPECT_THAT(Launch(options_).status().ToString(), HasSubstr("/etc/passwd"));
  options_.command = {};
  EXPECT_FALSE(Launch(options_).ok());
  options_.command = {"true"};
  options_.ranks = 0;
  EXPECT_THAT(Launch(options_).status().ToString(), HasSubstr("--ranks must be at least 1"));
  // Found, but no program: no shebang and no ELF header.
  std::string path = directory_ + "/text";
  std::ofstream(path) << "text";
  ASSERT_EQ(chmod(path.c_str(), 0755), 0);
  options_.command = {path};
  options_.ranks = 2;
  EXPECT_THAT(Launch(options_).status().ToString(), HasSubstr("cannot run " + path));
}

}  // namespace
}  // namespace shardd::cli

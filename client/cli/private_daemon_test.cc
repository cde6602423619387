#include "client/cli/private_daemon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/time/clock.h"
#include "client/attach_connection.h"

namespace shardd::cli {
namespace {

using ::testing::HasSubstr;

class PrivateDaemonTest : public ::testing::Test {
 protected:
  PrivateDaemonTest() {
    char name[] = "/tmp/shardctl-private-XXXXXX";
    parent_ = mkdtemp(name);
    options_.directory = parent_ + "/shardd";
    options_.binary = "client/cli/fake_daemon_main";
  }
  ~PrivateDaemonTest() override {
    [[maybe_unused]] int rc = std::system(("rm -rf " + parent_).c_str());
  }

  std::string Flags() {
    std::ifstream file(options_.directory + "/shardd.sock.flags");
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  std::string parent_;
  PrivateDaemonOptions options_;
};

TEST_F(PrivateDaemonTest, StartsOneAndFindsItAgain) {
  options_.flags = {"--exit_when_idle_seconds=600"};
  absl::StatusOr<PrivateDaemon> first = EnsurePrivateDaemon(options_);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_GT(first->started_pid, 0);
  EXPECT_EQ(first->socket, options_.directory + "/shardd.sock");
  // In a session of its own, so that a terminal's Ctrl-C does not reach it.
  EXPECT_EQ(getsid(first->started_pid), first->started_pid);
  EXPECT_THAT(Flags(), HasSubstr("--exit_when_idle_seconds=600"));

  absl::StatusOr<PrivateDaemon> second = EnsurePrivateDaemon(options_);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->started_pid, 0);
  EXPECT_TRUE(EndPrivateDaemon(*second, absl::Seconds(1)).ok());
  EXPECT_TRUE(AttachConnection::Connect(first->socket, absl::Now()).ok()) << "not ours to end";

  EXPECT_TRUE(EndPrivateDaemon(*first, absl::Seconds(60)).ok());
  EXPECT_THAT(Flags(), HasSubstr("ended"));
}

TEST_F(PrivateDaemonTest, TwoAtOnceEndWithOneDaemon) {
  absl::StatusOr<PrivateDaemon> a, b;
  std::thread other([&] { a = EnsurePrivateDaemon(options_); });
  b = EnsurePrivateDaemon(options_);
  other.join();
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_NE(a->started_pid == 0, b->started_pid == 0);
  EXPECT_TRUE(EndPrivateDaemon(*a, absl::Seconds(60)).ok());
  EXPECT_TRUE(EndPrivateDaemon(*b, absl::Seconds(60)).ok());
}

TEST_F(PrivateDaemonTest, OneThatDiesIsReportedWithItsLog) {
  options_.flags = {"--die"};
  absl::Status status = EnsurePrivateDaemon(options_).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no room to live"));
}

TEST_F(PrivateDaemonTest, OneThatNeverAnswersIsKilled) {
  options_.binary = "/usr/bin/tail";
  options_.flags = {"-f", "/dev/null"};
  options_.start_timeout = absl::Milliseconds(100);
  // tail does not know --listen.socket: a wrapper that drops it.
  std::string script = parent_ + "/silent";
  std::ofstream(script) << "#!/bin/sh\nexec tail -f /dev/null\n";
  ASSERT_EQ(chmod(script.c_str(), 0755), 0);
  options_.binary = script;
  absl::Status status = EnsurePrivateDaemon(options_).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("did not answer within 100ms"));
}

TEST_F(PrivateDaemonTest, ADirectoryThatOthersMayWriteIsRefused) {
  ASSERT_EQ(mkdir(options_.directory.c_str(), 0777), 0);
  ASSERT_EQ(chmod(options_.directory.c_str(), 0777), 0);
  absl::Status status = EnsurePrivateDaemon(options_).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  ASSERT_EQ(rmdir(options_.directory.c_str()), 0);
  ASSERT_EQ(symlink("/tmp", options_.directory.c_str()), 0);
  status = EnsurePrivateDaemon(options_).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
}

}  // namespace
}  // namespace shardd::cli

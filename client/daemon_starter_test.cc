#include "client/daemon_starter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/time/clock.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class DaemonStarterTest : public ::testing::Test {
 protected:
  DaemonStarterTest() {
    char name[] = "/tmp/shardd-starter-XXXXXX";
    parent_ = mkdtemp(name);
    start_.directory = parent_ + "/d";
    start_.binary = std::filesystem::current_path().string() + "/client/fake_private_daemon";
    EXPECT_TRUE(MakePrivateDirectory(start_.directory).ok());
  }
  ~DaemonStarterTest() override { std::filesystem::remove_all(parent_); }

  static absl::Status End(pid_t pid) {
    contract::UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    return EndDaemon(pidfd, pid, absl::Seconds(60));
  }
  // A program that does as `script` says.
  void UseScript(const std::string& script) {
    start_.binary = parent_ + "/script";
    std::ofstream(start_.binary) << "#!/bin/sh\n" << script << "\n";
    ASSERT_EQ(chmod(start_.binary.c_str(), 0755), 0);
  }

  std::string parent_;
  DaemonStart start_;
};

TEST_F(DaemonStarterTest, StartsOneAndFindsItAgain) {
  absl::StatusOr<DaemonInDirectory> first = AttachOrStartDaemon(start_);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_GT(first->started_pid, 0);
  EXPECT_EQ(first->socket_path, start_.directory + "/shardd.sock");
  EXPECT_NE(first->attach, nullptr);
  // In a session of its own, so that a terminal's Ctrl-C does not reach it.
  EXPECT_EQ(getsid(first->started_pid), first->started_pid);

  absl::StatusOr<DaemonInDirectory> second = AttachOrStartDaemon(start_);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->started_pid, 0);

  EXPECT_TRUE(End(first->started_pid).ok());
  EXPECT_FALSE(AttachConnection::Connect(first->socket_path, absl::Now()).ok());
}

TEST_F(DaemonStarterTest, TwoAtOnceEndWithOneDaemon) {
  absl::StatusOr<DaemonInDirectory> a, b;
  std::thread other([&] { a = AttachOrStartDaemon(start_); });
  b = AttachOrStartDaemon(start_);
  other.join();
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_NE(a->started_pid == 0, b->started_pid == 0);
  EXPECT_TRUE(End(a->started_pid + b->started_pid).ok());
}

TEST_F(DaemonStarterTest, OneThatEndsIsReportedWithItsLastWords) {
  UseScript("echo no room to live >&2; exit 3");
  absl::Status status = AttachOrStartDaemon(start_).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no room to live"));
}

TEST_F(DaemonStarterTest, OneThatNeverAnswersIsKilled) {
  UseScript("echo $$ >" + parent_ + "/pid; exec tail -f /dev/null");
  start_.timeout = absl::Milliseconds(300);
  absl::Status status = AttachOrStartDaemon(start_).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("did not answer in time"));
  pid_t pid = 0;
  if (std::ifstream(parent_ + "/pid") >> pid) {
    EXPECT_NE(kill(pid, 0), 0);
  }
}

TEST_F(DaemonStarterTest, ABinaryThatIsNotThere) {
  start_.binary = "no-such-shardd";
  EXPECT_THAT(AttachOrStartDaemon(start_).status().ToString(), HasSubstr("no-such-shardd"));
}

TEST_F(DaemonStarterTest, ADirectoryThatOthersMayWriteIsRefused) {
  ASSERT_EQ(chmod(start_.directory.c_str(), 0777), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(MakePrivateDirectory(start_.directory)));
  ASSERT_EQ(rmdir(start_.directory.c_str()), 0);
  ASSERT_EQ(symlink("/tmp", start_.directory.c_str()), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(MakePrivateDirectory(start_.directory)));
}

}  // namespace
}  // namespace shardd

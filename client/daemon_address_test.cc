#include "client/daemon_address.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/fake_daemon.h"
#include "client/private_daemon.h"
#include "proto/contract/version.h"

namespace shardd {
namespace {

class DaemonAddressTest : public testing::Test {
 protected:
  DaemonAddressTest() {
    char pattern[] = "/tmp/address_test_XXXXXX";
    directory_ = mkdtemp(pattern);
    places_.system_socket = directory_ + "/system";
    places_.private_sockets = directory_;
    places_.private_states = directory_ + "/state";
    std::filesystem::create_directory(places_.private_states);
    options_.connect_timeout = absl::Seconds(20);
    options_.daemon_binary =
        absl::StrCat(std::filesystem::current_path().string(), "/client/fake_private_daemon");
  }
  ~DaemonAddressTest() override {
    for (pid_t pid : started_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    std::filesystem::remove_all(directory_);
  }
  absl::StatusOr<FoundDaemon> Find(const std::string& job = "job") {
    absl::StatusOr<FoundDaemon> found = FindDaemon(options_, job, places_);
    if (found.ok() && !found->private_directory.empty()) {
      started_.insert(found->attach->daemon_pid());
    }
    return found;
  }
  static bool Alive(pid_t pid) { return kill(pid, 0) == 0 && waitpid(pid, nullptr, WNOHANG) == 0; }

  std::string directory_;
  DaemonPlaces places_;
  SessionOptions options_;
  std::set<pid_t> started_;
};

TEST_F(DaemonAddressTest, TheGivenAddressComesFirst) {
  FakeDaemon system(places_.system_socket, "system");
  FakeDaemon given(directory_ + "/given", "given");
  options_.address = "unix:" + directory_ + "/given";
  EXPECT_EQ(Find()->attach->version(), "given");
  options_.address = directory_ + "/given";
  EXPECT_EQ(Find()->attach->version(), "given");
  EXPECT_EQ(Find()->private_directory, "");
  options_.address = "";
  EXPECT_EQ(Find()->attach->version(), "system");
  options_.world_size = 2;
  EXPECT_EQ(Find()->attach->version(), "system");
}

TEST_F(DaemonAddressTest, AnAddressThatIsNoneIsNamed) {
  for (const char* address : {"localhost:80", "unix:", "tcp://x"}) {
    options_.address = address;
    const absl::Status status = Find().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(address), std::string::npos);
  }
}

TEST_F(DaemonAddressTest, ADeadSystemSocketIsAnErrorAndNoReasonToStartAnother) {
  std::ofstream(places_.system_socket) << "";
  std::ofstream(places_.system_socket + ".attach") << "";
  options_.connect_timeout = absl::Milliseconds(50);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DaemonAddressTest, SeveralRanksWithoutADaemonAreToldWhatToDo) {
  options_.world_size = 4;
  options_.rank = 2;
  const absl::Status status = Find().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(status.message()).find("rank 2 of 4"), std::string::npos);
  EXPECT_NE(std::string(status.message()).find("shardctl run"), std::string::npos);
  EXPECT_NE(std::string(status.message()).find("SHARDD_ADDRESS"), std::string::npos);
}

TEST_F(DaemonAddressTest, OneRankStartsAPrivateDaemonAndFindsItAgain) {
  auto first = Find();
  ASSERT_TRUE(first.ok()) << first.status();
  const pid_t pid = first->attach->daemon_pid();
  EXPECT_NE(pid, getpid());
  EXPECT_EQ(getsid(pid), pid) << "Ctrl-C in the trainer must not reach it";
  auto second = Find();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->attach->daemon_pid(), pid);
  auto other = Find("another-job");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_NE(other->attach->daemon_pid(), pid);
  struct stat info;
  ASSERT_EQ(stat(first->private_directory.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(DaemonAddressTest, OneThatDiedIsFoundWhereItWas) {
  auto system = std::make_unique<FakeDaemon>(places_.system_socket, "system");
  auto found = Find();
  ASSERT_TRUE(found.ok()) << found.status();
  const auto again = [&] {
    return FindDaemonAgain(*found, options_, "job", absl::Now() + absl::Seconds(20), places_);
  };
  EXPECT_EQ(again()->attach->version(), "system");
  system.reset();
  // A rank alone would start a daemon of its own now: with another state.
  EXPECT_EQ(again().status().code(), absl::StatusCode::kUnavailable);
  system = std::make_unique<FakeDaemon>(places_.system_socket, "next");
  EXPECT_EQ(again()->attach->version(), "next");
}

TEST_F(DaemonAddressTest, APrivateDaemonThatDiedIsStartedAgain) {
  auto found = Find();
  ASSERT_TRUE(found.ok()) << found.status();
  const pid_t pid = found->attach->daemon_pid();
  kill(pid, SIGKILL);
  // It is a child of this process; wait without reaping it.
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT), 0);
  auto next = FindDaemonAgain(*found, options_, "job", absl::Now() + absl::Seconds(20), places_);
  ASSERT_TRUE(next.ok()) << next.status();
  started_.insert(next->attach->daemon_pid());
  EXPECT_NE(next->attach->daemon_pid(), pid);
  EXPECT_EQ(next->socket_path, found->socket_path);
  EXPECT_EQ(next->private_directory, found->private_directory);
  EXPECT_EQ(waitpid(pid, nullptr, WNOHANG), -1) << "it was not reaped";
}

TEST_F(DaemonAddressTest, LongJobNamesFitIntoASocketPath) {
  EXPECT_TRUE(Find(std::string(64, 'x')).ok());
}

TEST_F(DaemonAddressTest, ADaemonThatDiesAtTheStartIsQuoted) {
  const absl::Status status = Find("broken").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(status.message()).find("no space"), std::string::npos) << status;
}

TEST_F(DaemonAddressTest, OfAnotherVersionIsRefused) {
  const absl::Status status = Find("old").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(status.message()).find("version 0.0.0"), std::string::npos) << status;
  std::string text(status.message());
  started_.insert(std::stoi(text.substr(text.find("pid ") + 4)));
}

TEST_F(DaemonAddressTest, ABinaryThatIsNotThereIsNamed) {
  options_.daemon_binary = "/nowhere/shardd";
  const absl::Status status = Find().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(status.message()).find("/nowhere/shardd"), std::string::npos);
  EXPECT_NE(std::string(status.message()).find("SHARDD_DAEMON_BINARY"), std::string::npos);
}

TEST_F(DaemonAddressTest, ADirectoryThatOthersCanWriteToIsNotUsed) {
  const std::string user = absl::StrCat(directory_, "/shardd-", geteuid(), "-private");
  std::filesystem::create_directory(user);
  chmod(user.c_str(), 0777);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kPermissionDenied);
  std::filesystem::remove_all(user);
  std::filesystem::create_directory_symlink(directory_ + "/state", user);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(DaemonAddressTest, CloseEndsItUnlessAnotherSessionHasCome) {
  auto found = Find();
  ASSERT_TRUE(found.ok()) << found.status();
  const pid_t pid = found->attach->daemon_pid();
  const auto answer = [](absl::StatusOr<bool> end) { return [end] { return end; }; };
  EXPECT_TRUE(EndPrivateDaemon(found->private_directory, pid, answer(false)).ok());
  EXPECT_TRUE(Alive(pid));
  EXPECT_EQ(
      EndPrivateDaemon(found->private_directory, pid, answer(absl::UnavailableError("x"))).code(),
      absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Alive(pid));
  EXPECT_TRUE(EndPrivateDaemon(found->private_directory, pid, answer(true)).ok());
  EXPECT_FALSE(Alive(pid));
  started_.erase(pid);
  // The next one is new.
  auto next = Find();
  ASSERT_TRUE(next.ok()) << next.status();
}

}  // namespace
}  // namespace shardd

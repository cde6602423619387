#include "client/cli/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "proto/contract/fd_passing.h"

namespace shardd::cli {
namespace {

using ::testing::HasSubstr;

class AddressTest : public ::testing::Test {
 protected:
  AddressTest() {
    environment_.uid = 1234;
    char name[] = "/tmp/shardctl-address-XXXXXX";
    directory_ = mkdtemp(name);
    environment_.system_socket = directory_ + "/system.sock";
  }
  ~AddressTest() override {
    unlink(environment_.system_socket.c_str());
    rmdir(directory_.c_str());
  }

  Environment environment_;
  std::string directory_;
};

TEST_F(AddressTest, FlagThenVariable) {
  environment_.variables["SHARDD_ADDRESS"] = "unix:/b.sock";
  auto address = ResolveAddress("/a.sock", environment_);
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->socket, "/a.sock");
  EXPECT_TRUE(address->explicit_choice);
  address = ResolveAddress("", environment_);
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->socket, "/b.sock");
  EXPECT_TRUE(address->explicit_choice);
  EXPECT_EQ(ResolveAddress("unix:///c.sock", environment_)->socket, "/c.sock");
}

TEST_F(AddressTest, TheSystemsSocketOnlyWhereThereIsOne) {
  EXPECT_EQ(ResolveAddress("", environment_)->socket, "/tmp/shardd-1234/shardd.sock");
  environment_.variables["XDG_RUNTIME_DIR"] = "/run/user/1234";
  EXPECT_EQ(ResolveAddress("", environment_)->socket, "/run/user/1234/shardd/shardd.sock");
  auto listener = contract::ListenUnix(environment_.system_socket, SOCK_STREAM, 1);
  ASSERT_TRUE(listener.ok()) << listener.status();
  auto address = ResolveAddress("", environment_);
  EXPECT_EQ(address->socket, environment_.system_socket);
  EXPECT_FALSE(address->explicit_choice);
}

TEST_F(AddressTest, RefusesWhatIsNoSocketPath) {
  EXPECT_THAT(std::string(ResolveAddress("localhost:50051", environment_).status().message()),
              HasSubstr("--address 'localhost:50051' is no Unix socket"));
  environment_.variables["SHARDD_ADDRESS"] = "unix:";
  EXPECT_THAT(std::string(ResolveAddress("", environment_).status().message()),
              HasSubstr("SHARDD_ADDRESS 'unix:' names no path"));
}

}  // namespace
}  // namespace shardd::cli

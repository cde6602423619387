#include "client/attach_connection.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "absl/time/clock.h"
#include "client/fake_daemon.h"
#include "proto/contract/attach.h"

namespace shardd {
namespace {

class AttachConnectionTest : public testing::Test {
 protected:
  AttachConnectionTest() {
    char pattern[] = "/tmp/attach_test_XXXXXX";
    directory_ = mkdtemp(pattern);
    socket_ = directory_ + "/s";
  }
  ~AttachConnectionTest() override {
    unlink((socket_ + ".attach").c_str());
    rmdir(directory_.c_str());
  }
  absl::StatusOr<std::unique_ptr<AttachConnection>> Connect(absl::Duration timeout) {
    return AttachConnection::Connect(socket_, absl::Now() + timeout);
  }
  std::string directory_, socket_;
};

TEST_F(AttachConnectionTest, SaysHello) {
  FakeDaemon daemon(socket_, "1.2.3");
  auto first = Connect(absl::Seconds(5));
  auto second = Connect(absl::Seconds(5));
  ASSERT_TRUE(first.ok() && second.ok()) << first.status();
  EXPECT_EQ((*first)->version(), "1.2.3");
  EXPECT_EQ((*first)->token().size(), contract::kTokenBytes);
  EXPECT_NE((*first)->token(), (*second)->token());
  EXPECT_NE((*first)->session(), (*second)->session());
  EXPECT_EQ((*first)->daemon_pid(), getpid());
  EXPECT_FALSE((*first)->Gone());
}

TEST_F(AttachConnectionTest, WaitsForTheSocketToAppear) {
  const absl::Status nobody = Connect(absl::Milliseconds(50)).status();
  EXPECT_EQ(nobody.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(nobody.message()).find("no daemon answers at " + socket_),
            std::string::npos);
  std::unique_ptr<FakeDaemon> daemon;
  std::thread late([&] { daemon = std::make_unique<FakeDaemon>(socket_); });
  EXPECT_TRUE(Connect(absl::Seconds(20)).ok());
  late.join();
}

TEST_F(AttachConnectionTest, ARefusedHelloCarriesTheDaemonsWords) {
  FakeDaemon daemon(socket_);
  daemon.RefuseHello("the client speaks protocol 1, this daemon 2 to 3");
  const absl::Status status = Connect(absl::Seconds(5)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "the client speaks protocol 1, this daemon 2 to 3");
}

TEST_F(AttachConnectionTest, SomethingElseOnTheSocketIsNotTaken) {
  contract::UniqueFd listener =
      *contract::ListenUnix(socket_ + contract::kAttachSuffix, SOCK_SEQPACKET, 4);
  // Answers with the given message, whatever it is asked.
  const auto answer = [&](contract::AttachMessage message, size_t size,
                          absl::Duration timeout = absl::Seconds(5)) {
    std::thread server([&, message] {
      contract::UniqueFd fd;
      while (!fd) fd.Reset(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      char hello[256];
      EXPECT_EQ(recv(fd.get(), hello, sizeof(hello), 0), 256);
      if (size == 0) return;
      EXPECT_EQ(send(fd.get(), &message, size, 0), static_cast<ssize_t>(size));
    });
    const absl::Status status = Connect(timeout).status();
    server.join();
    return status.code();
  };
  contract::AttachMessage message;
  message.kind = static_cast<uint16_t>(contract::AttachKind::kHello);
  message.magic = 1;
  EXPECT_EQ(answer(message, sizeof(message)), absl::StatusCode::kFailedPrecondition);
  message.magic = contract::kAttachMagic;
  EXPECT_EQ(answer(message, 100), absl::StatusCode::kInvalidArgument);
  message.kind = static_cast<uint16_t>(contract::AttachKind::kSegments);
  EXPECT_EQ(answer(message, sizeof(message)), absl::StatusCode::kInternal);
  // One that hangs up may be ending: it is asked again until the time is over.
  EXPECT_EQ(answer(message, 0, absl::ZeroDuration()), absl::StatusCode::kUnavailable);
}

TEST_F(AttachConnectionTest, AHangUpIsSeenAndDoorbellsNeverBlock) {
  auto daemon = std::make_unique<FakeDaemon>(socket_);
  auto connection = *Connect(absl::Seconds(5));
  for (int i = 0; i < 10'000; ++i) connection->RingDoorbell();
  EXPECT_FALSE(connection->Gone());
  daemon.reset();
  EXPECT_TRUE(connection->Gone());
  connection->RingDoorbell();
}

}  // namespace
}  // namespace shardd

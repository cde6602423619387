#include "proto/contract/fd_passing.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>

namespace shardd::contract {
namespace {

using Message = std::array<std::byte, 64>;

struct Pair {
  UniqueFd a, b;
};

Pair SeqPackets() {
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

int CountOpen() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

TEST(FdPassing, CarriesMessageAndDescriptors) {
  Pair pair = SeqPackets();
  UniqueFd memory(memfd_create("passed", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(memory.get(), 4096), 0);
  Message sent;
  sent.fill(std::byte{7});
  const int fds[] = {memory.get(), pair.a.get()};
  ASSERT_TRUE(SendMessage(pair.a.get(), sent, fds).ok());

  Message got{};
  absl::StatusOr<std::vector<UniqueFd>> received = ReceiveMessage(pair.b.get(), got, 2);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(got, sent);
  ASSERT_EQ(received->size(), 2u);
  struct stat ours, theirs;
  ASSERT_EQ(fstat(memory.get(), &ours), 0);
  ASSERT_EQ(fstat((*received)[0].get(), &theirs), 0);
  EXPECT_EQ(ours.st_ino, theirs.st_ino);
  for (const UniqueFd& fd : *received) EXPECT_TRUE(fcntl(fd.get(), F_GETFD) & FD_CLOEXEC);
}

TEST(FdPassing, SurplusDescriptorsAreClosed) {
  Pair pair = SeqPackets();
  const int before = CountOpen();
  const Message message{};
  for (size_t count : {size_t{1}, size_t{3}, size_t{8}}) {
    const std::vector<int> fds(count, pair.a.get());
    ASSERT_TRUE(SendMessage(pair.a.get(), message, fds).ok());
    Message got;
    EXPECT_EQ(ReceiveMessage(pair.b.get(), got, 0).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(CountOpen(), before);
  }
}

TEST(FdPassing, AnotherSizeIsRefusedAndItsDescriptorsClosed) {
  Pair pair = SeqPackets();
  const int before = CountOpen();
  for (size_t size : {size_t{1}, size_t{63}, size_t{65}, size_t{4096}}) {
    const std::vector<std::byte> message(size);
    const int fds[] = {pair.a.get()};
    ASSERT_TRUE(SendMessage(pair.a.get(), message, fds).ok());
    Message got;
    EXPECT_EQ(ReceiveMessage(pair.b.get(), got, 1).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(CountOpen(), before);
  }
}

TEST(FdPassing, NothingThereAndHangUpAreToldApart) {
  Pair pair = SeqPackets();
  Message got;
  EXPECT_EQ(ReceiveMessage(pair.b.get(), got, 0, MSG_DONTWAIT).status().code(),
            absl::StatusCode::kUnavailable);
  pair.a.Reset();
  EXPECT_EQ(ReceiveMessage(pair.b.get(), got, 0).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(SendMessage(pair.b.get(), got, {}).code(), absl::StatusCode::kUnavailable);
}

TEST(FdPassing, AFullQueueDoesNotBlock) {
  Pair pair = SeqPackets();
  const Message message{};
  absl::Status status;
  for (int i = 0; i < 1'000'000 && status.ok(); ++i) {
    status = SendMessage(pair.a.get(), message, {}, MSG_DONTWAIT);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

TEST(FdPassing, ListensAndConnectsByPath) {
  char directory[] = "/tmp/fd_passing_XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  const std::string path = std::string(directory) + "/s";
  const absl::Status missing = ConnectUnix(path, SOCK_SEQPACKET).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(missing.message()).find(path), std::string::npos);

  absl::StatusOr<UniqueFd> listener = ListenUnix(path, SOCK_SEQPACKET, 4);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_FALSE(ListenUnix(path, SOCK_SEQPACKET, 4).ok()) << "bound twice";
  absl::StatusOr<UniqueFd> client = ConnectUnix(path, SOCK_SEQPACKET);
  ASSERT_TRUE(client.ok()) << client.status();
  UniqueFd server(accept(listener->get(), nullptr, nullptr));
  ASSERT_TRUE(server);
  Message sent{}, got;
  sent[0] = std::byte{9};
  ASSERT_TRUE(SendMessage(client->get(), sent, {}).ok());
  ASSERT_TRUE(ReceiveMessage(server.get(), got, 0).ok());
  EXPECT_EQ(got, sent);
  unlink(path.c_str());
  rmdir(directory);
}

TEST(FdPassing, PathsBeyondSunPathAreRefusedByName) {
  const std::string path = "/tmp/" + std::string(200, 'x');
  for (const absl::Status& status :
       {ConnectUnix(path, SOCK_SEQPACKET).status(), ListenUnix(path, SOCK_SEQPACKET, 1).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(path), std::string::npos);
  }
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  const int before = CountOpen();
  {
    UniqueFd a(memfd_create("a", MFD_CLOEXEC));
    UniqueFd b(memfd_create("b", MFD_CLOEXEC));
    b = std::move(a);
    EXPECT_FALSE(a);
    UniqueFd c(std::move(b));
    EXPECT_TRUE(c);
    EXPECT_EQ(CountOpen(), before + 1);
  }
  EXPECT_EQ(CountOpen(), before);
}

}  // namespace
}  // namespace shardd::contract

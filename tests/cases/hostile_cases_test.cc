// What a hostile or broken worker can do: only its own session suffers.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <linux/falloc.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <future>
#include <thread>

#include "absl/time/clock.h"
#include "proto/contract/attach.h"
#include "proto/contract/fd_passing.h"
#include "proto/contract/segments.h"
#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"
#include "tests/support/raw_session.h"

namespace shardd::test {
namespace {

// A job of another trainer that must not notice anything: it takes a step before and one
// after what the test does.
class Bystander {
 public:
  explicit Bystander(const DaemonProcess& daemon) {
    ParameterSpec w;
    w.name = "w";
    w.shape = {100};
    session_ = OpenRank(daemon.socket(), 0, 1, SmallJob("bystander", 1), {w});
    Step();
  }
  ~Bystander() {
    Step();
    EXPECT_TRUE(session_->Close().ok());
  }

 private:
  void Step() {
    const auto decision =
        TakeStep(session_.get(), DType::kFloat32, [](uint32_t, size_t, uint64_t) { return 1.0f; });
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_EQ(decision->result, StepResult::kApplied);
  }
  std::unique_ptr<Session> session_;
};

class HostileCases : public testing::Test {
 protected:
  // Publishes one descriptor and expects that the session is refused for `why`.
  void ExpectRefused(const std::function<void(contract::Descriptor*)>& change,
                     const std::string& why) {
    RawSession raw(daemon_.socket());
    raw.Start("hostile" + std::to_string(++jobs_), 100, 0, 1);
    contract::Descriptor d = raw.Gradient();
    change(&d);
    raw.Publish(d);
    ASSERT_TRUE(raw.AwaitRefused());
    EXPECT_NE(raw.Refusal().find(why), std::string::npos) << raw.Refusal();
  }

  DaemonProcess daemon_;
  Bystander bystander_{daemon_};
  int jobs_ = 0;
};

TEST_F(HostileCases, TwiceAsManyElementsAsRegistered) {
  ExpectRefused([](auto* d) { d->count *= 2; }, "256 elements at 0 as bucket 0, which has 128");
}

TEST_F(HostileCases, DescriptorsThatDoNotFit) {
  ExpectRefused([](auto* d) { d->job_tag ^= 1; }, "tag of another job");
  ExpectRefused([](auto* d) { d->generation += 1; }, "generation");
  ExpectRefused([](auto* d) { d->step += 1; }, "for step 2");
  ExpectRefused([](auto* d) { d->step = 0; }, "for step 0");
  ExpectRefused([](auto* d) { d->begin = 32; }, "at 32");
  ExpectRefused([](auto* d) { d->bucket = 1; }, "bucket 1 of 1");
  ExpectRefused([](auto* d) { d->bucket = 0xffffffff; }, "bucket");
  ExpectRefused([](auto* d) { d->slot_hi = 2; }, "no tree node");
  ExpectRefused([](auto* d) { d->slot_lo = 1, d->slot_hi = 1; }, "no tree node");
  ExpectRefused([](auto* d) { d->dtype = 2; }, "dtype 2");
  ExpectRefused([](auto* d) { d->dtype = 200; }, "dtype 200");
  ExpectRefused([](auto* d) { d->kind = 77; }, "kind 77");
  ExpectRefused([](auto* d) { d->data_offset = 3; }, "bytes at 3");
  ExpectRefused([](auto* d) { d->data_offset = ~uint64_t{63}; }, "of a ring of");
  ExpectRefused([](auto* d) { d->data_offset = uint64_t{1} << 40; }, "of a ring of");
  ExpectRefused([](auto* d) { d->kind = 2; }, "which has all of its weights");
}

TEST_F(HostileCases, DuplicateIsAcknowledgedAndIgnored) {
  RawSession raw(daemon_.socket());
  raw.Start("duplicate", 5000, 0, 1);
  contract::Descriptor d = raw.Gradient();  // bucket 0 of 2
  raw.Publish(d);
  ASSERT_TRUE(raw.AwaitReleased(2));  // the upload was the first
  raw.Publish(d);
  EXPECT_TRUE(raw.AwaitReleased(3));
  EXPECT_EQ(daemon_.Job("duplicate").state(), "running");
}

TEST_F(HostileCases, QueueOverrun) {
  RawSession raw(daemon_.socket());
  raw.Start("overrun", 100, 0, 1);
  raw.ring()->head.store(1'000'000);
  raw.Publish(raw.Gradient());
  ASSERT_TRUE(raw.AwaitRefused());
  EXPECT_NE(raw.Refusal().find("outstanding"), std::string::npos) << raw.Refusal();
}

TEST_F(HostileCases, RingWithoutSealsIsRefused) {
  RawSession raw(daemon_.socket());
  ASSERT_TRUE(raw.Open(raw.MakeOpen("seals", 100, 0, 1)).ok());
  EXPECT_FALSE(raw.AttachRing(65536, F_SEAL_SHRINK | F_SEAL_GROW));
  EXPECT_NE(raw.error().find("sealed"), std::string::npos) << raw.error();
}

TEST_F(HostileCases, TruncatingPunchingAndRemappingTheRing) {
  RawSession raw(daemon_.socket());
  raw.Start("ring", 5000, 0, 1);
  EXPECT_NE(ftruncate(raw.ring_fd(), 0), 0);  // the seal forbids it
  // A punched ring reads as zeros: an empty gradient of its own.
  ASSERT_EQ(fallocate(raw.ring_fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      static_cast<off_t>(raw.data_offset()),
                      static_cast<off_t>(raw.ring_bytes() - raw.data_offset())),
            0);
  raw.Publish(raw.Gradient());
  EXPECT_TRUE(raw.AwaitReleased(2));
  // Its own mapping is its own affair.
  ASSERT_NE(mmap(raw.ring_base() + raw.data_offset(), 4096, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
            MAP_FAILED);
  ASSERT_EQ(fallocate(raw.ring_fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                      static_cast<off_t>(raw.ring_bytes())),
            0);
  // The head is 0 now, behind what was read: that is an overrun of the queue.
  contract::AttachMessage bell;
  bell.kind = static_cast<uint16_t>(contract::AttachKind::kDoorbell);
  (void)send(raw.socket(), &bell, sizeof(bell), MSG_DONTWAIT);
  EXPECT_TRUE(raw.AwaitRefused());
}

TEST_F(HostileCases, ClearingNonblockOnWhatIsShared) {
  RawSession raw(daemon_.socket());
  raw.Start("nonblock", 5000, 0, 1);
  fcntl(raw.socket(), F_SETFL, fcntl(raw.socket(), F_GETFL) & ~O_NONBLOCK);
  fcntl(raw.weights_fd(), F_SETFL, 0);
  contract::AttachMessage bell;
  bell.kind = static_cast<uint16_t>(contract::AttachKind::kDoorbell);
  for (int i = 0; i < 100; ++i) (void)send(raw.socket(), &bell, sizeof(bell), MSG_DONTWAIT);
  raw.Publish(raw.Gradient());
  EXPECT_TRUE(raw.AwaitReleased(2));
}

TEST_F(HostileCases, WeightsCannotBeMappedForWriting) {
  RawSession raw(daemon_.socket());
  raw.Start("readonly", 100, 0, 1);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, raw.weights_fd(), 0),
            MAP_FAILED);
  EXPECT_NE(ftruncate(raw.weights_fd(), 0), 0);
}

// While one thread rewrites descriptors and data, the daemon reads them: it may refuse
// or take a step, but what it decides is finite-checked as it was added.
TEST_F(HostileCases, RewritingADescriptorWhileItIsRead) {
  for (int round = 0; round < 20; ++round) {
    RawSession raw(daemon_.socket());
    raw.Start("rewrite" + std::to_string(round), 100, 0, 1);
    const contract::Descriptor good = raw.Gradient();
    std::atomic<bool> stop{false};
    std::thread scribbler([&] {
      auto* slots = reinterpret_cast<uint64_t*>(raw.ring_base() + contract::kSegmentPage);
      auto* data = reinterpret_cast<uint32_t*>(raw.ring_base() + raw.data_offset());
      for (uint64_t i = 0; !stop; ++i) {
        slots[i % 512] = i * 0x9E3779B97F4A7C15u;
        data[i % 128] = static_cast<uint32_t>(i * 2654435761u);
      }
    });
    raw.Publish(good);
    raw.Publish(good);
    raw.AwaitReleased(3);
    stop = true;
    scribbler.join();
  }
}

TEST_F(HostileCases, AnotherUsersTokenAndNoToken) {
  RawSession raw(daemon_.socket());
  v1::OpenRequest request = raw.MakeOpen("token", 100, 0, 1);
  request.set_token("0123456789abcdef");
  EXPECT_EQ(raw.Open(request).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  request.set_token("");
  EXPECT_EQ(raw.Open(request).error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

// Whoever makes a job of a terabyte keeps nobody from attaching, creating or deleting.
TEST_F(HostileCases, CreationThatTakesLongStallsNobodyElse) {
  RawSession quick(daemon_.socket());
  quick.Start("there", 100, 0, 1);
  daemon_.ArmFailpoint("job.create.before_rename", "wait");
  RawSession slow(daemon_.socket());
  auto creating =
      std::async(std::launch::async, [&] { return slow.Open(slow.MakeOpen("slow", 100, 0, 2)); });
  daemon_.AwaitFailpoint("job.create.before_rename");
  // Another rank of the one that is being made waits for it; the rest goes on.
  RawSession second(daemon_.socket());
  auto waiting = std::async(std::launch::async,
                            [&] { return second.Open(second.MakeOpen("slow", 100, 1, 2)); });
  {
    RawSession other(daemon_.socket());
    EXPECT_EQ(other.Open(other.MakeOpen("there", 100, 0, 1)).error_code(),
              grpc::StatusCode::ALREADY_EXISTS);
  }
  EXPECT_TRUE(daemon_.DeleteJob("there", true).ok());
  EXPECT_FALSE(daemon_.HasJob("slow"));
  daemon_.ReleaseFailpoint("job.create.before_rename");
  EXPECT_TRUE(creating.get().ok());
  EXPECT_TRUE(waiting.get().ok());
  EXPECT_TRUE(slow.open_reply().created());
  EXPECT_FALSE(second.open_reply().created());
  EXPECT_EQ(slow.open_reply().job_tag(), second.open_reply().job_tag());
}

// More connections than there are descriptors: those too many are told, those that are there go
// on, and the daemon does not spin.
TEST(HostileConnections, MoreThanThereAreFileDescriptors) {
  DaemonProcess::Options options;
  options.before_exec = [] {
    const rlimit limit{64, 64};
    setrlimit(RLIMIT_NOFILE, &limit);
  };
  DaemonProcess daemon(options);
  const Bystander bystander(daemon);
  std::vector<contract::UniqueFd> connections;
  std::string refusal;
  for (int i = 0; i < 100 && refusal.empty(); ++i) {
    auto connected =
        contract::ConnectUnix(daemon.socket() + contract::kAttachSuffix, SOCK_SEQPACKET);
    ASSERT_TRUE(connected.ok()) << connected.status();
    // Nobody is told anything before it says hello, unless it is refused; and with 64
    // descriptors the 70th is.
    pollfd answer{connected->get(), POLLIN, 0};
    connections.push_back(*std::move(connected));
    const int ready = poll(&answer, 1, i < 70 ? 0 : 30000);
    ASSERT_TRUE(i < 70 || ready == 1);
    if (ready == 0) continue;
    contract::AttachMessage message;
    ASSERT_GT(recv(answer.fd, &message, sizeof(message), 0), 0);
    EXPECT_EQ(message.kind, static_cast<uint16_t>(contract::AttachKind::kError));
    refusal = message.text;
  }
  EXPECT_NE(refusal.find("RLIMIT_NOFILE"), std::string::npos) << refusal;
  // With room again, it serves again.
  connections.clear();
  bool served = false;
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!served && absl::Now() < deadline) {
    auto connected =
        contract::ConnectUnix(daemon.socket() + contract::kAttachSuffix, SOCK_SEQPACKET);
    ASSERT_TRUE(connected.ok()) << connected.status();
    contract::AttachMessage message;
    message.kind = static_cast<uint16_t>(contract::AttachKind::kHello);
    message.protocol_version = contract::kProtocolVersion;
    pollfd answer{connected->get(), POLLIN, 0};
    served = send(connected->get(), &message, sizeof(message), MSG_NOSIGNAL) > 0 &&
             poll(&answer, 1, 5000) == 1 &&
             recv(connected->get(), &message, sizeof(message), 0) > 0 &&
             message.kind == static_cast<uint16_t>(contract::AttachKind::kHello);
  }
  EXPECT_TRUE(served);
}

TEST_F(HostileCases, OneTokenOpensOneJobAndLeavesNoOther) {
  RawSession raw(daemon_.socket());
  ASSERT_TRUE(raw.Open(raw.MakeOpen("first", 100, 0, 1)).ok());
  const grpc::Status again = raw.Open(raw.MakeOpen("second", 100, 0, 1));
  EXPECT_NE(again.error_message().find("opened a job before"), std::string::npos)
      << again.error_message();
  EXPECT_FALSE(daemon_.HasJob("second"));
}

TEST_F(HostileCases, RequestsThatDoNotFit) {
  const auto refused = [&](const std::function<void(v1::OpenRequest*)>& change) {
    RawSession raw(daemon_.socket());
    v1::OpenRequest request = raw.MakeOpen("bad", 100, 0, 1);
    change(&request);
    const grpc::Status status = raw.Open(request);
    EXPECT_FALSE(status.ok());
    return status.error_message();
  };
  using R = v1::OpenRequest;
  EXPECT_NE(refused([](R* r) { r->mutable_config()->set_name("../etc"); }).find("name"),
            std::string::npos);
  EXPECT_NE(refused([](R* r) { r->mutable_config()->set_optimizer("adamv"); }).find("adamw"),
            std::string::npos);
  EXPECT_NE(refused([](R* r) { r->mutable_parameters(0)->set_shape(0, -1); }).find("'w'"),
            std::string::npos);
  EXPECT_NE(
      refused([](R* r) { r->mutable_parameters(0)->set_shape(0, int64_t{1} << 62); }).find("'w'"),
      std::string::npos);
  EXPECT_NE(refused([](R* r) { r->set_rank(5); }).find("rank 5"), std::string::npos);
  EXPECT_NE(refused([](R* r) { r->set_world_size(9); }).find("slots"), std::string::npos);
  EXPECT_NE(
      refused([](R* r) { r->mutable_config()->set_chunk_elements(5); }).find("chunk_elements"),
      std::string::npos);
  EXPECT_NE(refused([](R* r) {
              r->mutable_config()->set_bucket_elements(~uint64_t{0});
            }).find("bucket_elements"),
            std::string::npos);
  EXPECT_NE(refused([](R* r) {
              r->mutable_config()->mutable_groups(0)->mutable_hyper()->set_beta1(1);
            }).find("beta1"),
            std::string::npos);
  EXPECT_NE(refused([](R* r) {
              r->mutable_config()->mutable_groups(0)->mutable_hyper()->set_eps(1e-50);
            }).find("eps"),
            std::string::npos);  // 0 in fp32
  EXPECT_NE(
      refused([](R* r) { r->mutable_config()->set_heartbeat_seconds(1e-9); }).find("heartbeat"),
      std::string::npos);
  EXPECT_NE(refused([](R* r) {
              r->mutable_config()->mutable_loss_scale()->set_initial(1e-300);
            }).find("loss_scale.initial"),
            std::string::npos);
  EXPECT_NE(refused([](R* r) { r->mutable_parameters(0)->set_name("a\x1b[2J"); }).find("\\x1b"),
            std::string::npos);
  EXPECT_NE(refused([](R* r) { r->clear_parameters(); }).find("parameters"), std::string::npos);
  EXPECT_NE(refused([](R* r) { *r->add_parameters() = r->parameters(0); }).find("twice"),
            std::string::npos);
  EXPECT_NE(refused([](R* r) {
              r->mutable_parameters(0)->set_shape(0, int64_t{1} << 38);
            }).find("memory.budget_bytes"),
            std::string::npos);
  EXPECT_NE(refused([](R* r) { r->set_protocol_version(99); }).find("protocol 99"),
            std::string::npos);
}

// Says hello in protocol `version`; the daemon's error, or "" when it answered in kind.
std::string HelloError(const std::string& socket, uint32_t version) {
  absl::StatusOr<contract::UniqueFd> fd =
      contract::ConnectUnix(socket + contract::kAttachSuffix, SOCK_SEQPACKET);
  contract::AttachMessage message;
  message.kind = static_cast<uint16_t>(contract::AttachKind::kHello);
  message.protocol_version = version;
  const auto bytes = std::as_writable_bytes(std::span(&message, 1));
  if (!fd.ok() || !contract::SendMessage(fd->get(), bytes, {}).ok() ||
      !contract::ReceiveMessage(fd->get(), bytes, 0).ok()) {
    return "no answer";
  }
  const bool refused = message.kind == static_cast<uint16_t>(contract::AttachKind::kError);
  return refused ? message.text : "";
}

TEST_F(HostileCases, ClientsOneProtocolVersionOlderOrNewer) {
  for (uint32_t version = contract::kOldestProtocolVersion; version <= contract::kProtocolVersion;
       ++version) {
    EXPECT_EQ(HelloError(daemon_.socket(), version), "");
    RawSession raw(daemon_.socket());
    v1::OpenRequest request = raw.MakeOpen("spoken" + std::to_string(version), 100, 0, 1);
    request.set_protocol_version(version);
    EXPECT_TRUE(raw.Open(request).ok());
  }
  for (uint32_t version : {contract::kOldestProtocolVersion - 1, contract::kProtocolVersion + 1}) {
    const std::string words = "protocol " + std::to_string(version);
    const uint64_t before = daemon_.Info().refused_calls();
    const std::string error = HelloError(daemon_.socket(), version);
    EXPECT_NE(error.find(words), std::string::npos) << error;
    EXPECT_NE(error.find("install matching versions"), std::string::npos) << error;
    EXPECT_EQ(daemon_.Info().refused_calls(), before + 1);
    RawSession raw(daemon_.socket());
    v1::OpenRequest request = raw.MakeOpen("mute", 100, 0, 1);
    request.set_protocol_version(version);
    const grpc::Status status = raw.Open(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_NE(status.error_message().find(words), std::string::npos) << status.error_message();
    EXPECT_EQ(daemon_.Info().refused_calls(), before + 2);
    EXPECT_FALSE(daemon_.HasJob("mute"));
  }
}

}  // namespace
}  // namespace shardd::test

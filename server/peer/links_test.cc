#include "server/peer/links.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/peer/acceptor.h"
#include "server/peer/out_link.h"

namespace shardd::peer {
namespace {

// Certificates of one authority for a, b and c; of another one for a.
class Certificates {
 public:
  Certificates() {
    std::string path = (std::filesystem::temp_directory_path() / "links_XXXXXX").string();
    path_ = mkdtemp(path.data());
    Make(path_, "a b c");
    Make(path_ + "/other", "a");
  }
  ~Certificates() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::string Read(const std::string& file) const {
    std::ifstream in(path_ + "/" + file);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }

 private:
  static void Make(const std::string& directory, const std::string& names) {
    const std::string command =
        absl::StrCat(std::getenv("TEST_SRCDIR"), "/", std::getenv("TEST_WORKSPACE"),
                     "/deploy/certs ", directory, " ", names, " >/dev/null");
    ASSERT_EQ(std::system(command.c_str()), 0);
  }
  std::string path_;
};

// A port that nobody listens at now.
uint16_t FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

// One daemon's links, and what came by them.
class Node {
 public:
  Node(const Certificates& certificates, const std::string& name, uint16_t port,
       const std::map<std::string, uint16_t>& peers) {
    Links::Options options;
    options.config.set_name(name);
    options.config.set_listen(absl::StrCat("127.0.0.1:", port));
    for (const auto& [peer, at] : peers) {
      auto* daemon = options.config.add_peers();
      daemon->set_name(peer);
      daemon->set_address(absl::StrCat("127.0.0.1:", at));
    }
    options.config.set_ca(certificates.path() + "/ca.pem");
    options.config.set_certificate(absl::StrCat(certificates.path(), "/", name, ".pem"));
    options.config.set_key(absl::StrCat(certificates.path(), "/", name, ".key"));
    options.now = [] { return absl::Now(); };
    options.log = [this](const std::string& line) { Note(&log_, line); };
    options.on_message = [this](const std::string& peer, Message message) {
      Note(&messages_, absl::StrCat(peer, " ", message.header.step(), " ", message.bytes.size()));
    };
    options.on_new_process = [this](const std::string& peer) { Note(&processes_, peer); };
    auto links = Links::Listen(std::move(options));
    EXPECT_TRUE(links.ok()) << links.status();
    links_ = *std::move(links);
    links_->Start();
  }
  ~Node() { links_->Stop(); }
  Links* operator->() { return links_.get(); }
  void Send(const std::string& peer, uint64_t step, size_t bytes = 0) {
    Message message;
    message.header.set_step(step);
    message.bytes.assign(bytes, 'x');
    links_->Send(peer, std::move(message));
  }
  bool Await(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(30), condition);
  }
  bool AwaitMessages(size_t count) {
    return Await([&] { return messages_.size() >= count; });
  }
  bool AwaitProcesses(size_t count) {
    return Await([&] { return processes_.size() >= count; });
  }
  bool AwaitLog(const std::string& text) {
    return Await([&] {
      for (const std::string& line : log_) {
        if (line.find(text) != std::string::npos) return true;
      }
      return false;
    });
  }
  std::vector<std::string> messages() {
    std::lock_guard lock(mutex_);
    return messages_;
  }

 private:
  void Note(std::vector<std::string>* list, const std::string& what) {
    std::lock_guard lock(mutex_);
    list->push_back(what);
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> messages_, processes_, log_;
  std::unique_ptr<Links> links_;
};

class LinksTest : public testing::Test {
 protected:
  Certificates certificates_;
  const uint16_t a_port_ = FreePort(), b_port_ = FreePort();
};

TEST_F(LinksTest, EveryMessageOnceAndInOrderBothWays) {
  Node a(certificates_, "a", a_port_, {{"b", b_port_}});
  for (uint64_t i = 1; i <= 100; ++i) a.Send("b", i, i % 10 == 0 ? kMaxPieceBytes : 0);
  Node b(certificates_, "b", b_port_, {{"a", a_port_}});  // comes later
  for (uint64_t i = 1; i <= 100; ++i) b.Send("a", i);
  ASSERT_TRUE(b.AwaitMessages(100));
  ASSERT_TRUE(a.AwaitMessages(100));
  for (uint64_t i = 1; i <= 100; ++i) {
    EXPECT_EQ(b.messages()[i - 1], absl::StrCat("a ", i, " ", i % 10 == 0 ? kMaxPieceBytes : 0));
    EXPECT_EQ(a.messages()[i - 1], absl::StrCat("b ", i, " 0"));
  }
  EXPECT_TRUE(a->State("b").connected);
}

TEST_F(LinksTest, WhatWasSentToAProcessThatEndedIsNotGivenToTheNext) {
  Node a(certificates_, "a", a_port_, {{"b", b_port_}});
  {
    Node b(certificates_, "b", b_port_, {{"a", a_port_}});
    a.Send("b", 1);
    ASSERT_TRUE(b.AwaitMessages(1));
    ASSERT_TRUE(a.AwaitProcesses(1));
  }
  a.Send("b", 2);
  Node b(certificates_, "b", b_port_, {{"a", a_port_}});
  ASSERT_TRUE(a.AwaitProcesses(2));
  a.Send("b", 3);
  ASSERT_TRUE(b.AwaitMessages(1));
  EXPECT_EQ(b.messages()[0], "a 3 0");
}

TEST_F(LinksTest, PeerThatIsNotConfiguredIsRefusedAndCounted) {
  Node a(certificates_, "a", a_port_, {{"b", b_port_}});
  Node c(certificates_, "c", FreePort(), {{"a", a_port_}});
  ASSERT_TRUE(a.AwaitLog("'c' is not among peer.peers of a"));
  EXPECT_GE(a->counters()->peers, 1u);
}

// Opens a link as `name` with these PEM texts, and returns how it ended.
grpc::Status Connect(uint16_t port, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                     const v1::PeerHello& hello, const std::string& method = kLinkMethod) {
  grpc::ChannelArguments arguments;
  arguments.SetSslTargetNameOverride("a");
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto channel =
      grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port), credentials, arguments);
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto call = stub.PrepareCall(&context, method, &queue);
  const auto next = [&] {
    void* tag;
    bool ok = false;
    queue.Next(&tag, &ok);
    return ok;
  };
  call->StartCall(nullptr);
  if (next()) {
    v1::PeerFrame frame;
    *frame.mutable_hello() = hello;
    call->Write(EncodeFrame(frame, nullptr), nullptr);
    next();
    grpc::ByteBuffer answer;
    call->Read(&answer, nullptr);
    if (next()) context.TryCancel();  // welcomed
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  next();
  return status;
}

v1::PeerHello Hello(const std::string& name, uint32_t version = kPeerProtocolVersion) {
  v1::PeerHello hello;
  hello.set_name(name);
  hello.set_protocol_version(version);
  hello.set_incarnation(1);
  return hello;
}

TEST_F(LinksTest, ClientsWithoutARightCertificateAreRefusedAndCounted) {
  Node a(certificates_, "a", a_port_, {{"b", b_port_}});
  // gRPC may try again by itself: each attempt counts.
  const auto refused = [&](const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    const uint64_t before = a->counters()->connections;
    return !Connect(a_port_, credentials, Hello("b")).ok() &&
           a.Await([&] { return a->counters()->connections > before; });
  };
  // No TLS at all.
  EXPECT_TRUE(refused(grpc::InsecureChannelCredentials()));
  // TLS without a certificate of its own.
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs = certificates_.Read("ca.pem");
  EXPECT_TRUE(refused(grpc::SslCredentials(tls)));
  // One that another authority signed.
  tls.pem_cert_chain = certificates_.Read("other/a.pem");
  tls.pem_private_key = certificates_.Read("other/a.key");
  EXPECT_TRUE(refused(grpc::SslCredentials(tls)));
  EXPECT_EQ(a->counters()->peers, 0u);
  EXPECT_TRUE(a.messages().empty());
}

TEST_F(LinksTest, RightCertificateButAnotherNameOrVersionOrMethod) {
  Node a(certificates_, "a", a_port_, {{"b", b_port_}, {"c", FreePort()}});
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs = certificates_.Read("ca.pem");
  tls.pem_cert_chain = certificates_.Read("b.pem");
  tls.pem_private_key = certificates_.Read("b.key");
  const auto credentials = grpc::SslCredentials(tls);
  EXPECT_EQ(Connect(a_port_, credentials, Hello("b")).error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(a->counters()->peers, 0u);
  EXPECT_EQ(Connect(a_port_, credentials, Hello("c")).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(a->counters()->peers, 1u);
  EXPECT_EQ(Connect(a_port_, credentials, Hello("b", 2)).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(a->counters()->peers, 2u);
  EXPECT_EQ(Connect(a_port_, credentials, Hello("b"), "/shardd.v1.Control/Open").error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(a->counters()->peers, 3u);
  EXPECT_EQ(a->counters()->connections, 0u);
}

TEST_F(LinksTest, WithoutCertificatesNothingListens) {
  Links::Options options;
  options.config.set_name("a");
  options.config.set_listen("127.0.0.1:0");
  const absl::Status status = Links::Listen(std::move(options)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.message().find("peer.ca is not set"), std::string::npos) << status;
}

}  // namespace
}  // namespace shardd::peer

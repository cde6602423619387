#include "server/peer/links.h"

#include <grpcpp/grpcpp.h>
#include <sys/random.h>

#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "server/config/peer_config.h"
#include "server/peer/acceptor.h"
#include "server/peer/in_link.h"
#include "server/peer/out_link.h"

namespace shardd::peer {

namespace {

absl::StatusOr<std::string> ReadPem(const char* key, const std::string& path) {
  if (path.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("peer.", key,
                     " is not set: daemons speak to each other with certificates "
                     "alone; make them with deploy/certs"));
  }
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file || text.str().find("-----BEGIN") == std::string::npos) {
    return absl::FailedPreconditionError(
        absl::StrCat("peer.", key, " ", path, " cannot be read as PEM; make it with deploy/certs"));
  }
  return text.str();
}

struct Pem {
  std::string ca, certificate, key;
};

absl::StatusOr<Pem> ReadAllPem(const v1::DaemonConfig::Peer& config) {
  Pem pem;
  for (const auto& [name, path, out] : {std::tuple{"ca", &config.ca(), &pem.ca},
                                        {"certificate", &config.certificate(), &pem.certificate},
                                        {"key", &config.key(), &pem.key}}) {
    absl::StatusOr<std::string> text = ReadPem(name, *path);
    if (!text.ok()) return text.status();
    *out = *std::move(text);
  }
  return pem;
}

uint64_t RandomU64() {
  uint64_t value = 0;
  while (value == 0 && getrandom(&value, sizeof(value), 0) < 0) {
  }
  return value;
}

class LinksImpl final : public Links {
 public:
  explicit LinksImpl(Options options) : options_(std::move(options)) {}
  ~LinksImpl() override { Stop(); }

  absl::Status Listen() {
    absl::StatusOr<Pem> pem = ReadAllPem(options_.config);
    if (!pem.ok()) return pem.status();
    for (const auto& daemon : options_.config.peers()) {
      MakeOutLink(*pem, daemon.name(), daemon.address());
    }
    MakeInLinks();
    Acceptor::Options acceptor;
    acceptor.address = options_.config.listen();
    acceptor.on_connection = [this](contract::UniqueFd fd) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
      parameters.fd = fd.Release();
      connections_->HandleNewConnection(&parameters);
    };
    acceptor.on_refused = [this](const std::string& from) {
      counters_.connections += 1;
      options_.log(absl::StrCat("a connection from ", from,
                                " to peer.listen is refused: it showed no valid certificate"));
    };
    absl::StatusOr<std::unique_ptr<Acceptor>> listening = Acceptor::Listen(std::move(acceptor));
    if (!listening.ok()) return listening.status();
    acceptor_ = *std::move(listening);
    return StartServer(*pem);
  }

  void Start() override {
    acceptor_->Start();
    for (auto& [name, link] : out_) link->Start();
  }

  void Stop() override {
    if (stopped_.exchange(true)) return;
    if (in_ != nullptr) in_->Silence();
    for (auto& [name, link] : out_) link->Stop();
    if (acceptor_ != nullptr) acceptor_->Stop();
    if (server_ != nullptr) {
      server_->Shutdown(std::chrono::system_clock::now());
      server_->Wait();
    }
  }

  const std::string& self() const override { return options_.config.name(); }
  uint16_t port() const override { return acceptor_->port(); }
  bool Knows(const std::string& peer) const override { return out_.contains(peer); }
  std::vector<std::string> peers() const override {
    std::vector<std::string> names;
    for (const auto& [name, link] : out_) names.push_back(name);
    return names;
  }
  void Send(const std::string& peer, Message message) override {
    const auto it = out_.find(peer);
    if (it != out_.end()) it->second->Send(std::move(message));
  }
  LinkState State(const std::string& peer) const override {
    const auto it = out_.find(peer);
    if (it == out_.end()) return {};
    LinkState state = it->second->State();
    state.heard = std::max(state.heard, in_->Heard(peer));
    return state;
  }
  LinkCounters* counters() override { return &counters_; }

 private:
  void MakeOutLink(const Pem& pem, const std::string& name, const std::string& address) {
    grpc::ChannelArguments arguments;
    // Its certificate must carry the name that is configured, whatever its address.
    arguments.SetSslTargetNameOverride(name);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);  // also a connect's time limit
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 5000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetMaxReceiveMessageSize(kMaxFrameBytes);
    arguments.SetMaxSendMessageSize(kMaxFrameBytes);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    OutLink::Options options;
    options.self = self();
    options.peer = name;
    options.incarnation = incarnation_;
    options.channel = grpc::CreateCustomChannel(
        address, grpc::SslCredentials({pem.ca, pem.key, pem.certificate}), arguments);
    options.on_welcome = [this, name](uint64_t incarnation) { Learn(name, incarnation); };
    options.log = options_.log;
    options.now = options_.now;
    out_[name] = std::make_unique<OutLink>(std::move(options));
    known_[name] = 0;
  }

  void MakeInLinks() {
    InLinks::Options options;
    options.self = self();
    options.incarnation = incarnation_;
    options.knows = [this](const std::string& peer) { return Knows(peer); };
    options.on_authenticated = [this](const std::string& from) { acceptor_->Admit(from); };
    options.on_hello = [this](const std::string& peer, uint64_t incarnation) {
      Learn(peer, incarnation);
    };
    options.on_message = options_.on_message;
    options.log = options_.log;
    options.now = options_.now;
    options.counters = &counters_;
    in_ = std::make_unique<InLinks>(std::move(options));
  }

  absl::Status StartServer(const Pem& pem) {
    grpc::SslServerCredentialsOptions tls(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    tls.pem_root_certs = pem.ca;
    tls.pem_key_cert_pairs.push_back({pem.key, pem.certificate});
    grpc::ServerBuilder builder;
    connections_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::SslServerCredentials(tls));
    builder.RegisterCallbackGenericService(in_.get());
    builder.SetMaxReceiveMessageSize(kMaxFrameBytes);
    builder.SetMaxSendMessageSize(kMaxFrameBytes);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 5000);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::FailedPreconditionError(
          "peer.certificate and peer.key do not fit together; make them anew with deploy/certs");
    }
    return absl::OkStatus();
  }

  // The process behind a name, as either direction tells it.
  void Learn(const std::string& peer, uint64_t incarnation) {
    std::lock_guard lock(mutex_);
    uint64_t& known = known_[peer];
    if (known == incarnation) return;
    known = incarnation;
    out_[peer]->Reset(incarnation);
    if (!stopped_) options_.on_new_process(peer);
  }

  const Options options_;
  const uint64_t incarnation_ = RandomU64();
  LinkCounters counters_;
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::map<std::string, uint64_t> known_;                // under mutex_
  std::map<std::string, std::unique_ptr<OutLink>> out_;  // fixed after Listen
  std::unique_ptr<InLinks> in_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Acceptor> acceptor_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Links>> Links::Listen(Options options) {
  if (absl::Status status = config::CheckPeerConfig(options.config); !status.ok()) return status;
  auto links = std::make_unique<LinksImpl>(std::move(options));
  if (absl::Status status = links->Listen(); !status.ok()) return status;
  return links;
}

}  // namespace shardd::peer

#include "client/fake_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/contract/attach.h"

namespace shardd {

namespace {

using contract::AttachKind;
using contract::AttachMessage;

contract::UniqueFd ReadOnly(int fd) {
  return contract::UniqueFd(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
}

}  // namespace

FakeDaemon::FakeDaemon(const std::string& socket_path, const std::string& version)
    : version_(version), socket_path_(socket_path) {
  ComeBack();
}

FakeDaemon::~FakeDaemon() {
  if (server_ != nullptr) Die();
}

void FakeDaemon::ComeBack() {
  stop_ = false;
  if (layout_ != nullptr) {
    BeginGeneration();
    for (uint32_t line = 0; line < kSessionLines; ++line) session_line(line).session.store(0);
  }
  // Of one that was killed.
  unlink(socket_path_.c_str());
  unlink(absl::StrCat(socket_path_, contract::kAttachSuffix).c_str());
  listener_ = *contract::ListenUnix(absl::StrCat(socket_path_, contract::kAttachSuffix),
                                    SOCK_SEQPACKET, 16);
  stop_event_.Reset(eventfd(0, EFD_CLOEXEC));
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", socket_path_), grpc::InsecureServerCredentials());
  builder.RegisterService(static_cast<v1::Control::Service*>(this));
  builder.RegisterService(static_cast<v1::Admin::Service*>(this));
  server_ = builder.BuildAndStart();
  accept_thread_ = std::thread(&FakeDaemon::AcceptLoop, this);
}

void FakeDaemon::Die() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    for (const auto& peer : sessions_) shutdown(peer->socket.get(), SHUT_RDWR);
    changed_.notify_all();
  }
  const uint64_t one = 1;
  (void)!write(stop_event_.get(), &one, sizeof(one));
  accept_thread_.join();
  for (const auto& peer : sessions_) {
    peer->thread.join();
    if (peer->ring != nullptr) munmap(const_cast<std::byte*>(peer->ring), peer->ring_bytes);
  }
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
  unlink(socket_path_.c_str());
  unlink(absl::StrCat(socket_path_, contract::kAttachSuffix).c_str());
  listener_.Reset();
  nonces_ += sessions_.size();
  sessions_.clear();
  running_ = false;
}

void FakeDaemon::LoseJob() {
  ++timeline_;
  layout_.reset();
  running_ = false;
  generation_ = 1;
  committed_ = applied_ = 0;
  records_.clear();
  blob_.clear();
  parts_.clear();
  folded_.clear();
}

// --- observers and handles -----------------------------------------------

bool FakeDaemon::WaitUntil(const std::function<bool()>& predicate) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(30), predicate);
}

uint64_t FakeDaemon::consumed(uint32_t rank) {
  Peer* peer = AtRank(rank);
  return peer != nullptr ? peer->read : 0;
}

std::vector<float> FakeDaemon::Sum(uint64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  return sums_[step];
}

std::vector<v1::EndStepRequest> FakeDaemon::EndSteps() {
  std::lock_guard<std::mutex> lock(mutex_);
  return end_steps_;
}

void FakeDaemon::HoldRings(bool hold) {
  std::lock_guard<std::mutex> lock(mutex_);
  hold_rings_ = hold;
  ReadRings();
}

void FakeDaemon::HoldDecisions(bool hold) {
  std::lock_guard<std::mutex> lock(mutex_);
  hold_decisions_ = hold;
  TryDecide();
}

void FakeDaemon::NewGeneration() {
  std::lock_guard<std::mutex> lock(mutex_);
  BeginGeneration();
}

void FakeDaemon::FailJob(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::strncpy(board().failure, reason.c_str(), sizeof(board().failure) - 1);
  board().state.store(static_cast<uint32_t>(contract::BoardState::kFailed));
  Wake();
}

void FakeDaemon::Initialising(bool initialising) {
  std::lock_guard<std::mutex> lock(mutex_);
  board().state.store(static_cast<uint32_t>(initialising ? contract::BoardState::kInitialising
                                                         : contract::BoardState::kReady));
  Wake();
}

void FakeDaemon::Refuse(uint32_t rank, const absl::Status& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  Peer* peer = AtRank(rank);
  peer->refusal = why;
  session_line(peer->line).state.store(static_cast<uint32_t>(contract::SessionState::kRefused));
  Wake();
}

void FakeDaemon::HangUp(uint32_t rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  shutdown(AtRank(rank)->socket.get(), SHUT_RDWR);
}

void FakeDaemon::RefuseHello(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  hello_error_ = why;
}

void FakeDaemon::NextResult(v1::StepResult result, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  next_result_ = result;
  next_reason_ = reason;
}

void FakeDaemon::NextOpen(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  next_open_ = status;
}

void FakeDaemon::NextJoin(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  next_join_ = status;
}

void FakeDaemon::NextEndStep(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  next_end_step_ = status;
}

void FakeDaemon::WeightsReady(bool ready) {
  std::lock_guard<std::mutex> lock(mutex_);
  weights_ready_ = ready;
  if (ready) PublishWeights();
  Wake();
}

// --- attach socket --------------------------------------------------------

void FakeDaemon::AcceptLoop() {
  while (true) {
    std::array<pollfd, 2> fds = {pollfd{listener_.get(), POLLIN, 0},
                                 pollfd{stop_event_.get(), POLLIN, 0}};
    if (poll(fds.data(), fds.size(), -1) < 0) continue;
    if (fds[1].revents != 0) return;
    const int fd = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    auto peer = std::make_unique<Peer>();
    peer->socket.Reset(fd);
    peer->nonce = nonces_ + sessions_.size() + 1;
    peer->token = absl::StrCat("token", 100000 + peer->nonce, "-----");
    Peer* raw = peer.get();
    sessions_.push_back(std::move(peer));
    raw->thread = std::thread(&FakeDaemon::ReadLoop, this, raw);
  }
}

void FakeDaemon::ReadLoop(Peer* peer) {
  while (OnMessage(peer)) {
  }
  std::lock_guard<std::mutex> lock(mutex_);
  peer->closed = true;
  shutdown(peer->socket.get(), SHUT_RDWR);
  changed_.notify_all();
}

bool FakeDaemon::OnMessage(Peer* peer) {
  AttachMessage message;
  auto fds = contract::ReceiveMessage(peer->socket.get(),
                                      std::as_writable_bytes(std::span(&message, 1)), 1);
  if (!fds.ok()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) return false;
  AttachMessage answer;
  answer.kind = message.kind;
  std::vector<int> out;
  contract::UniqueFd weights, window;
  if (message.kind == static_cast<uint16_t>(AttachKind::kDoorbell)) {
    ++doorbells_;
    ReadRings();
    changed_.notify_all();
    return true;
  }
  std::string error = hello_error_;
  if (message.kind == static_cast<uint16_t>(AttachKind::kHello)) {
    std::memcpy(answer.token, peer->token.data(), sizeof(answer.token));
    answer.session = peer->nonce;
    std::strncpy(answer.text, version_.c_str(), sizeof(answer.text) - 1);
  } else {
    struct stat info;
    fstat(fds->front().get(), &info);
    peer->ring_bytes = static_cast<uint64_t>(info.st_size);
    peer->ring = static_cast<const std::byte*>(
        mmap(nullptr, peer->ring_bytes, PROT_READ, MAP_SHARED, fds->front().get(), 0));
    peer->window = *MemoryFile::Create("window", kWindowBytes, false);
    weights = ReadOnly(weights_.fd());
    window = ReadOnly(peer->window.fd());
    out = {weights.get(), window.get()};
  }
  if (!error.empty()) {
    answer.kind = static_cast<uint16_t>(AttachKind::kError);
    std::strncpy(answer.text, error.c_str(), sizeof(answer.text) - 1);
    out.clear();
  }
  return contract::SendMessage(peer->socket.get(), std::as_bytes(std::span(&answer, 1)), out).ok();
}

}  // namespace shardd

#include "client/fake_daemon.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "proto/contract/attach.h"

namespace shardd {

namespace {

using contract::AttachKind;
using contract::AttachMessage;
using contract::Range;

constexpr uint32_t kSessionLines = 16;
constexpr uint64_t kWindowBytes = 4096;  // small: reads go in several windows
constexpr uint64_t kJobTag = 4711;
constexpr uint64_t kTimeline = 99;

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

kernels::DType Kernel(v1::DType dtype) { return static_cast<kernels::DType>(dtype); }

contract::UniqueFd ReadOnly(int fd) {
  return contract::UniqueFd(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
}

}  // namespace

FakeDaemon::FakeDaemon(const std::string& socket_path, const std::string& version)
    : version_(version), socket_path_(socket_path) {
  listener_ =
      *contract::ListenUnix(absl::StrCat(socket_path, contract::kAttachSuffix), SOCK_SEQPACKET, 16);
  stop_event_.Reset(eventfd(0, EFD_CLOEXEC));
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", socket_path), grpc::InsecureServerCredentials());
  builder.RegisterService(static_cast<v1::Control::Service*>(this));
  builder.RegisterService(static_cast<v1::Admin::Service*>(this));
  server_ = builder.BuildAndStart();
  accept_thread_ = std::thread(&FakeDaemon::AcceptLoop, this);
}

FakeDaemon::~FakeDaemon() {
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
  unlink(socket_path_.c_str());
  unlink(absl::StrCat(socket_path_, contract::kAttachSuffix).c_str());
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
    peer->nonce = sessions_.size() + 1;
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

// --- the control protocol -------------------------------------------------

FakeDaemon::Peer* FakeDaemon::FindToken(const std::string& token) {
  for (const auto& peer : sessions_) {
    if (token == peer->token.substr(0, contract::kTokenBytes)) return peer.get();
  }
  return nullptr;
}

FakeDaemon::Peer* FakeDaemon::AtRank(uint32_t rank) {
  for (auto peer = sessions_.rbegin(); peer != sessions_.rend(); ++peer) {
    if ((*peer)->open && (*peer)->rank == rank) return peer->get();
  }
  return nullptr;
}

contract::BucketLine& FakeDaemon::bucket_line(uint64_t bucket) {
  return *reinterpret_cast<contract::BucketLine*>(weights_.data() + 2 * contract::kSegmentPage +
                                                  bucket * contract::kLineBytes);
}

contract::SessionLine& FakeDaemon::session_line(uint32_t line) {
  return *reinterpret_cast<contract::SessionLine*>(weights_.data() + 2 * contract::kSegmentPage +
                                                   (layout_->num_buckets() + line) *
                                                       contract::kLineBytes);
}

void FakeDaemon::MakeJob(const v1::OpenRequest& request) {
  config_ = request.config();
  world_size_ = request.world_size();
  std::vector<contract::ParameterSpec> specs;
  for (const v1::Parameter& p : request.parameters()) {
    specs.push_back({p.name(), {p.shape().begin(), p.shape().end()}, p.group()});
  }
  contract::Layout::Options options;
  options.chunk_elements = config_.chunk_elements();
  options.bucket_elements = config_.bucket_elements();
  options.groups = static_cast<uint32_t>(config_.groups_size());
  layout_ = std::make_unique<contract::Layout>(*contract::Layout::Create(specs, options));
  missing_elements_ = layout_->trainable_elements();
  masters_.assign(layout_->flat_elements(), 0);
  sum_.assign(layout_->flat_elements(), 0);

  contract::WeightsHeader header{};
  header.magic = contract::kWeightsMagic;
  header.version = contract::kFormatVersion;
  header.weight_dtype = static_cast<uint32_t>(config_.weight_dtype());
  header.job_tag = kJobTag;
  header.timeline = kTimeline;
  header.layout_hash = layout_->hash();
  header.flat_elements = layout_->flat_elements();
  header.buckets = layout_->num_buckets();
  header.session_lines = kSessionLines;
  header.bucket_lines_offset = 2 * contract::kSegmentPage;
  header.session_lines_offset = header.bucket_lines_offset + header.buckets * contract::kLineBytes;
  header.weights_offset = contract::RoundUpTo(
      header.session_lines_offset + kSessionLines * contract::kLineBytes, contract::kSegmentPage);
  header.total_bytes = header.weights_offset +
                       header.flat_elements * kernels::DTypeSize(Kernel(config_.weight_dtype()));
  weights_offset_ = header.weights_offset;
  weights_ = *MemoryFile::Create("weights", header.total_bytes, false);
  std::memcpy(weights_.data(), &header, sizeof(header));
  board().state.store(static_cast<uint32_t>(
      missing_elements_ == 0 ? contract::BoardState::kReady : contract::BoardState::kInitialising));
  board().generation.store(generation_);
  board().daemon_sleeps.store(1);  // always: every publication rings
}

grpc::Status FakeDaemon::Open(grpc::ServerContext*, const v1::OpenRequest* request,
                              v1::OpenReply* reply) {
  std::lock_guard<std::mutex> lock(mutex_);
  Peer* peer = FindToken(request->token());
  reply->set_created(layout_ == nullptr);
  if (layout_ == nullptr) MakeJob(*request);
  peer->open = true;
  peer->rank = request->rank();
  peer->line = static_cast<uint32_t>(peer->nonce) % kSessionLines;
  contract::SessionLine& line = session_line(peer->line);
  line.released.store(0);
  line.state.store(static_cast<uint32_t>(contract::SessionState::kAttached));
  line.session.store(peer->nonce);
  reply->set_job_id(std::string(32, '0'));
  reply->set_timeline(kTimeline);
  reply->set_layout_hash(layout_->hash());
  reply->set_session_line(peer->line);
  reply->set_initialising(missing_elements_ > 0);
  reply->set_committed_step(committed_);
  reply->set_chunk_elements(layout_->chunk_elements());
  reply->set_bucket_elements(layout_->bucket_elements());
  reply->set_weights_bytes(weights_.size());
  reply->set_window_bytes(kWindowBytes);
  reply->set_job_tag(kJobTag);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Join(grpc::ServerContext*, const v1::JoinRequest* request,
                              v1::JoinReply* reply) {
  std::unique_lock<std::mutex> lock(mutex_);
  Peer* peer = FindToken(request->token());
  if (!peer->refusal.ok()) return ToGrpc(peer->refusal);
  if (!next_join_.ok()) return ToGrpc(std::exchange(next_join_, absl::OkStatus()));
  peer->joining = true;
  TryForm();
  changed_.wait(lock, [&] { return peer->joined || stop_ || peer->closed; });
  if (!peer->joined) return {grpc::StatusCode::CANCELLED, "stopped"};
  reply->set_generation(generation_);
  reply->set_next_step(committed_ + 1);
  reply->set_blob(blob_);
  reply->set_loss_scale(config_.loss_scale().initial());
  reply->set_initialising(missing_elements_ > 0);
  reply->set_applied(applied_);
  return grpc::Status::OK;
}

void FakeDaemon::TryForm() {
  uint32_t joining = 0;
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    Peer* peer = AtRank(rank);
    joining += peer != nullptr && peer->joining ? 1 : 0;
  }
  if (running_ || joining < world_size_) return;
  running_ = true;
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    AtRank(rank)->joining = false;
    AtRank(rank)->joined = true;
  }
  changed_.notify_all();
}

grpc::Status FakeDaemon::EndStep(grpc::ServerContext*, const v1::EndStepRequest* request,
                                 v1::EndStepReply*) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!next_end_step_.ok()) return ToGrpc(std::exchange(next_end_step_, absl::OkStatus()));
  if (request->generation() != generation_) return {grpc::StatusCode::ABORTED, "generation"};
  FindToken(request->token())->ended = *request;
  end_steps_.push_back(*request);
  ReadRings();
  TryDecide();
  changed_.notify_all();
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::StepRecords(grpc::ServerContext*, const v1::StepRecordsRequest* request,
                                     v1::StepRecordsReply* reply) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::StepRecord& record : records_) {
    if (record.step() >= request->first_step()) *reply->add_records() = record;
  }
  reply->set_committed_step(committed_);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::FillWindow(grpc::ServerContext*, const v1::FillWindowRequest* request,
                                    v1::FillWindowReply* reply) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (request->count() * sizeof(float) > kWindowBytes) {
    return {grpc::StatusCode::INVALID_ARGUMENT, "window"};
  }
  const Range range = layout_->parameter_range(request->parameter());
  std::memcpy(FindToken(request->token())->window.data(),
              masters_.data() + range.begin + request->offset(), request->count() * sizeof(float));
  reply->set_committed_step(committed_);
  reply->set_parameter_applied(applied_);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::SessionError(grpc::ServerContext*, const v1::SessionErrorRequest* request,
                                      v1::SessionErrorReply* reply) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Peer* peer = FindToken(request->token());
  const absl::Status why = !peer->refusal.ok()
                               ? peer->refusal
                               : absl::DeadlineExceededError("step waits for EndStep of rank 1");
  reply->set_code(static_cast<int>(why.code()));
  reply->set_message(std::string(why.message()));
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Close(grpc::ServerContext*, const v1::CloseRequest* request,
                               v1::CloseReply*) {
  std::lock_guard<std::mutex> lock(mutex_);
  FindToken(request->token())->closed = true;
  changed_.notify_all();
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::ServerInfo(grpc::ServerContext*, const v1::ServerInfoRequest*,
                                    v1::ServerInfoReply* reply) {
  std::lock_guard<std::mutex> lock(mutex_);
  reply->set_version(version_);
  reply->set_pid(getpid());
  uint32_t connected = 0;
  for (const auto& peer : sessions_) connected += peer->open ? 1 : 0;
  reply->set_sessions(connected);
  return grpc::Status::OK;
}

// --- rings and steps ------------------------------------------------------

void FakeDaemon::Wake() {
  if (layout_ == nullptr) return;
  board().event.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&board().event), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
  changed_.notify_all();
}

const std::byte* FakeDaemon::Data(const Peer& peer, const contract::Descriptor& descriptor) const {
  const auto& header = *reinterpret_cast<const contract::RingHeader*>(peer.ring);
  return peer.ring + header.data_offset + descriptor.data_offset;
}

void FakeDaemon::ReadRings() {
  if (hold_rings_ || layout_ == nullptr) return;
  for (const auto& peer : sessions_) {
    if (peer->ring == nullptr || peer->closed) continue;
    const auto& header = *reinterpret_cast<const contract::RingHeader*>(peer->ring);
    const auto* queue =
        reinterpret_cast<const contract::Descriptor*>(peer->ring + contract::kSegmentPage);
    while (peer->read < header.head.load(std::memory_order_acquire)) {
      const contract::Descriptor descriptor = queue[peer->read & (header.queue_entries - 1)];
      peer->done.push_back(false);
      OnDescriptor(peer.get(), descriptor, peer->read++);
    }
  }
  TryDecide();
  Wake();
}

void FakeDaemon::OnDescriptor(Peer* peer, const contract::Descriptor& descriptor, uint64_t index) {
  const bool init = descriptor.kind == static_cast<uint8_t>(contract::DescriptorKind::kInit);
  if (init || descriptor.generation != generation_) {
    if (init && descriptor.job_tag == kJobTag) OnInit(*peer, descriptor);
    Release(peer, index);
  } else {
    OnGradient(peer, descriptor, index);
  }
}

void FakeDaemon::OnInit(const Peer& peer, const contract::Descriptor& descriptor) {
  std::memcpy(masters_.data() + descriptor.begin, Data(peer, descriptor),
              descriptor.count * sizeof(float));
  missing_elements_ -= descriptor.count;
  if (missing_elements_ > 0) return;
  PublishWeights();
  board().state.store(static_cast<uint32_t>(contract::BoardState::kReady));
}

void FakeDaemon::OnGradient(Peer* peer, const contract::Descriptor& descriptor, uint64_t index) {
  std::vector<Part>& parts = parts_[descriptor.bucket];
  auto at = parts.begin();
  while (at != parts.end() && at->descriptor.slot_lo < descriptor.slot_lo) ++at;
  parts.insert(at, {descriptor, peer, index});
  uint32_t slots = 0;
  for (const Part& part : parts) slots += part.descriptor.slot_hi - part.descriptor.slot_lo;
  if (slots == config_.slots()) Fold(descriptor.bucket);
}

void FakeDaemon::Fold(uint64_t bucket) {
  std::vector<kernels::SlotRange> nodes;
  std::vector<kernels::ReduceInput> inputs;
  for (const Part& part : parts_[bucket]) {
    nodes.push_back({part.descriptor.slot_lo, part.descriptor.slot_hi});
    inputs.push_back(
        {Data(*part.peer, part.descriptor), static_cast<kernels::DType>(part.descriptor.dtype)});
  }
  kernels::ReduceProgram program;
  kernels::SlotTreeProgram(config_.slots(), nodes, &program);
  const Range range = layout_->bucket_range(bucket);
  kernels::Reduce(kernels::Isa::kScalar, program, inputs, range.size(), sum_.data() + range.begin,
                  kernels::DType::kFloat32, nullptr);
  folded_[bucket] = true;
  for (const Part& part : parts_[bucket]) Release(part.peer, part.index);
  parts_.erase(bucket);
}

void FakeDaemon::Release(Peer* peer, uint64_t index) {
  peer->done[index] = true;
  while (peer->released < peer->done.size() && peer->done[peer->released]) ++peer->released;
  session_line(peer->line).released.store(peer->released, std::memory_order_release);
}

void FakeDaemon::TryDecide() {
  if (hold_decisions_ || !running_ || layout_ == nullptr ||
      folded_.size() < layout_->num_buckets()) {
    return;
  }
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    if (!AtRank(rank)->ended) return;
  }
  ++committed_;
  blob_ = AtRank(0)->ended->blob();
  const double lr = AtRank(0)->ended->groups(0).lr();
  const bool apply = next_result_ == v1::STEP_APPLIED;
  applied_ += apply ? 1 : 0;
  for (size_t i = 0; apply && i < masters_.size(); ++i) {
    masters_[i] -= static_cast<float>(lr) * sum_[i];
  }
  sums_[committed_] = sum_;
  folded_.clear();
  for (uint32_t rank = 0; rank < world_size_; ++rank) AtRank(rank)->ended.reset();
  v1::StepRecord& record = records_.emplace_back();
  record.set_step(committed_);
  record.set_applied(applied_);
  record.set_result(next_result_);
  record.set_reason(next_reason_);

  contract::Board& b = board();
  b.decision_seq.fetch_add(1, std::memory_order_acq_rel);
  b.applied.store(applied_);
  b.result.store(next_result_);
  b.loss.store(static_cast<double>(committed_) + 0.5);
  b.grad_norm.store(2.0 * static_cast<double>(committed_));
  b.loss_scale.store(config_.loss_scale().initial() * static_cast<double>(committed_ + 1));
  std::memset(b.skip_reason, 0, sizeof(b.skip_reason));
  std::strncpy(b.skip_reason, next_reason_.c_str(), sizeof(b.skip_reason) - 1);
  b.committed_step.store(committed_, std::memory_order_release);
  b.decision_seq.fetch_add(1, std::memory_order_release);
  next_result_ = v1::STEP_APPLIED;
  next_reason_.clear();
  if (weights_ready_) PublishWeights();
  Wake();
}

void FakeDaemon::PublishWeights() {
  kernels::MasterToWeight(kernels::Isa::kScalar, masters_.data(), masters_.size(),
                          weights_.data() + weights_offset_, Kernel(config_.weight_dtype()));
  for (uint64_t b = 0; b < layout_->num_buckets(); ++b) {
    bucket_line(b).ready_step.store(committed_, std::memory_order_release);
  }
}

void FakeDaemon::BeginGeneration() {
  ++generation_;
  running_ = false;
  parts_.clear();
  folded_.clear();
  for (const auto& peer : sessions_) {
    if (!peer->open) continue;
    peer->joined = false;
    peer->ended.reset();
    std::fill(peer->done.begin(), peer->done.end(), true);
    peer->released = peer->read;
    session_line(peer->line).released.store(peer->released, std::memory_order_release);
  }
  board().generation.store(generation_, std::memory_order_release);
  Wake();
}

}  // namespace shardd

#include "tests/support/raw_session.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <span>

#include "proto/contract/layout.h"

namespace shardd::test {

namespace {

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "raw session: %s\n", why.c_str());
  std::abort();
}

contract::AttachMessage Message(contract::AttachKind kind) {
  contract::AttachMessage message;
  message.kind = static_cast<uint16_t>(kind);
  message.protocol_version = contract::kProtocolVersion;
  return message;
}

// Waits on the board's event until `done` holds, for up to 30 seconds.
bool Await(const contract::Board* board, const std::function<bool()>& done) {
  for (int i = 0; i < 300; ++i) {
    const uint64_t event = board->event.load();
    if (done()) return true;
    const timespec timeout{0, 100'000'000};
    syscall(SYS_futex, &board->event, FUTEX_WAIT, static_cast<uint32_t>(event), &timeout, nullptr,
            0);
  }
  return done();
}

}  // namespace

RawSession::RawSession(const std::string& socket) {
  absl::StatusOr<contract::UniqueFd> connected =
      contract::ConnectUnix(socket + contract::kAttachSuffix, SOCK_SEQPACKET);
  if (!connected.ok()) Die(connected.status().ToString());
  attach_ = *std::move(connected);
  contract::AttachMessage hello = Message(contract::AttachKind::kHello);
  if (!contract::SendMessage(attach_.get(), std::as_bytes(std::span(&hello, 1)), {}).ok() ||
      !contract::ReceiveMessage(attach_.get(), std::as_writable_bytes(std::span(&hello, 1)), 0)
           .ok()) {
    Die("no hello");
  }
  token_.assign(reinterpret_cast<const char*>(hello.token), sizeof(hello.token));
  const auto channel = grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials());
  control_ = v1::Control::NewStub(channel);
  admin_ = v1::Admin::NewStub(channel);
}

RawSession::~RawSession() {
  if (ring_ != nullptr) munmap(ring_, ring_bytes_);
  if (weights_ != nullptr) munmap(const_cast<std::byte*>(weights_), weights_bytes_);
}

v1::OpenRequest RawSession::MakeOpen(const std::string& job, uint64_t elements, uint32_t rank,
                                     uint32_t world_size) const {
  v1::OpenRequest request;
  request.set_token(token_);
  request.set_protocol_version(contract::kProtocolVersion);
  v1::JobConfig* config = request.mutable_config();
  config->set_name(job);
  config->set_slots(world_size);
  config->set_grad_dtype(v1::fp32);
  config->set_weight_dtype(v1::fp32);
  config->set_chunk_elements(4096);
  config->set_bucket_elements(4096);
  config->set_heartbeat_seconds(60);  // nothing here beats
  config->set_join_seconds(30);
  v1::Hyperparameters* hyper = config->add_groups()->mutable_hyper();
  hyper->set_lr(1e-3);
  hyper->set_eps(1e-8);
  v1::Parameter* parameter = request.add_parameters();
  parameter->set_name("w");
  parameter->add_shape(static_cast<int64_t>(elements));
  request.set_rank(rank);
  request.set_world_size(world_size);
  request.set_resume(v1::RESUME_AUTO);
  return request;
}

grpc::Status RawSession::Open(const v1::OpenRequest& request) {
  request_ = request;
  grpc::ClientContext context;
  return control_->Open(&context, request, &open_);
}

bool RawSession::AttachRing(uint64_t data_bytes) {
  return AttachRing(data_bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}

bool RawSession::AttachRing(uint64_t data_bytes, int seals) {
  constexpr uint32_t kEntries = 64;
  data_offset_ = 2 * contract::kSegmentPage;
  ring_bytes_ = data_offset_ + contract::RoundUpTo(data_bytes, contract::kSegmentPage);
  ring_fd_ = contract::UniqueFd(memfd_create("raw-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (ftruncate(ring_fd_.get(), static_cast<off_t>(ring_bytes_)) != 0) Die("ftruncate");
  ring_ = static_cast<std::byte*>(
      mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, ring_fd_.get(), 0));
  ring()->magic = contract::kRingMagic;
  ring()->version = contract::kFormatVersion;
  ring()->queue_entries = kEntries;
  ring()->data_offset = data_offset_;
  ring()->data_bytes = ring_bytes_ - data_offset_;
  if (seals != 0 && fcntl(ring_fd_.get(), F_ADD_SEALS, seals) != 0) Die("seals");
  contract::AttachMessage message = Message(contract::AttachKind::kSegments);
  std::memcpy(message.token, token_.data(), sizeof(message.token));
  const int fd = ring_fd_.get();
  if (!contract::SendMessage(attach_.get(), std::as_bytes(std::span(&message, 1)), {&fd, 1}).ok()) {
    Die("kSegments was not sent");
  }
  auto fds =
      contract::ReceiveMessage(attach_.get(), std::as_writable_bytes(std::span(&message, 1)), 2);
  if (!fds.ok() || fds->size() != 2) {
    error_ = fds.ok() ? message.text : fds.status().ToString();
    return false;
  }
  weights_fd_ = std::move((*fds)[0]);
  window_fd_ = std::move((*fds)[1]);
  weights_bytes_ = open_.weights_bytes();
  void* weights = mmap(nullptr, weights_bytes_, PROT_READ, MAP_SHARED, weights_fd_.get(), 0);
  if (weights == MAP_FAILED) Die("weights cannot be mapped");
  weights_ = static_cast<const std::byte*>(weights);
  return true;
}

grpc::Status RawSession::Join(v1::JoinReply* reply) {
  grpc::ClientContext context;
  v1::JoinRequest request;
  request.set_token(token_);
  const grpc::Status status = control_->Join(&context, request, reply);
  if (status.ok()) joined_ = *reply;
  return status;
}

v1::EndStepRequest RawSession::MakeEndStep() const {
  const v1::Hyperparameters& h = request_.config().groups(0).hyper();
  v1::EndStepRequest request;
  request.set_token(token_);
  request.set_generation(joined_.generation());
  request.set_step(board()->committed_step.load() + 1);
  request.set_hyper_hash(contract::Hasher()
                             .Add(h.lr())
                             .Add(h.beta1())
                             .Add(h.beta2())
                             .Add(h.eps())
                             .Add(h.weight_decay())
                             .value());
  request.add_slots();
  if (request_.rank() == 0) *request.add_groups() = h;
  return request;
}

grpc::Status RawSession::EndStep(const v1::EndStepRequest& request) {
  grpc::ClientContext context;
  v1::EndStepReply reply;
  return control_->EndStep(&context, request, &reply);
}

grpc::Status RawSession::Close() {
  grpc::ClientContext context;
  v1::CloseRequest request;
  request.set_token(token_);
  v1::CloseReply reply;
  return control_->Close(&context, request, &reply);
}

void RawSession::Start(const std::string& job, uint64_t elements, uint32_t rank,
                       uint32_t world_size) {
  if (grpc::Status s = Open(MakeOpen(job, elements, rank, world_size)); !s.ok()) {
    Die("Open: " + s.error_message());
  }
  if (!AttachRing(elements * 8 + 65536)) Die("ring: " + error_);
  v1::JoinReply reply;
  if (grpc::Status s = Join(&reply); !s.ok()) Die("Join: " + s.error_message());
  if (rank == 0 && reply.initialising()) {
    contract::Descriptor init{};
    init.job_tag = open_.job_tag();
    init.generation = reply.generation();
    init.count = elements;
    init.kind = static_cast<uint8_t>(contract::DescriptorKind::kInit);
    init.dtype = 1;
    Publish(init);
  }
  Await(board(), [&] {
    return board()->state.load() == static_cast<uint32_t>(contract::BoardState::kReady);
  });
}

contract::Descriptor RawSession::Gradient() const {
  contract::Descriptor d{};
  d.job_tag = open_.job_tag();
  d.generation = joined_.generation();
  d.step = board()->committed_step.load() + 1;
  const uint64_t elements = static_cast<uint64_t>(request_.parameters(0).shape(0));
  const uint64_t flat = contract::RoundUpTo(elements, 32);
  const uint64_t buckets = (flat + 4095) / 4096;
  d.begin = (buckets - 1) * 4096;
  d.count = flat - d.begin;
  d.slot_lo = request_.rank();
  d.slot_hi = request_.rank() + 1;
  d.kind = static_cast<uint8_t>(contract::DescriptorKind::kGrad);
  d.dtype = 1;
  return d;
}

void RawSession::Put(const contract::Descriptor& descriptor) {
  const uint64_t head = ring()->head.load();
  std::memcpy(ring_ + contract::kSegmentPage + (head & 63) * sizeof(descriptor), &descriptor,
              sizeof(descriptor));
  ring()->head.store(head + 1, std::memory_order_release);
}

void RawSession::Ring() {
  contract::AttachMessage bell = Message(contract::AttachKind::kDoorbell);
  contract::SendMessage(attach_.get(), std::as_bytes(std::span(&bell, 1)), {}, MSG_DONTWAIT)
      .IgnoreError();
}

void RawSession::Publish(const contract::Descriptor& descriptor) {
  Put(descriptor);
  Ring();
}

void RawSession::PublishIfAwake(const contract::Descriptor& descriptor) {
  Put(descriptor);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (board()->daemon_sleeps.load() != 0) Ring();
}

void RawSession::DeleteJob(const std::string& name) {
  grpc::ClientContext context;
  v1::DeleteJobRequest request;
  request.set_token(token_);
  request.set_job(name);
  request.set_force(true);
  v1::DeleteJobReply reply;
  admin_->DeleteJob(&context, request, &reply);
}

void RawSession::DeleteAllJobsBut(const std::string& name) {
  grpc::ClientContext context;
  v1::ListJobsRequest request;
  request.set_token(token_);
  v1::ListJobsReply reply;
  admin_->ListJobs(&context, request, &reply);
  for (const v1::JobStatus& job : reply.jobs()) {
    if (job.name() != name) DeleteJob(job.name());
  }
}

const contract::Board* RawSession::board() const {
  return reinterpret_cast<const contract::Board*>(weights_ + contract::kSegmentPage);
}

const contract::SessionLine* RawSession::line() const {
  const auto* header = reinterpret_cast<const contract::WeightsHeader*>(weights_);
  return reinterpret_cast<const contract::SessionLine*>(weights_ + header->session_lines_offset) +
         open_.session_line();
}

bool RawSession::AwaitReleased(uint64_t count) {
  const auto refused = static_cast<uint32_t>(contract::SessionState::kRefused);
  Await(board(),
        [&] { return line()->released.load() >= count || line()->state.load() == refused; });
  return line()->released.load() >= count && line()->state.load() != refused;
}

bool RawSession::AwaitRefused() {
  const auto refused = static_cast<uint32_t>(contract::SessionState::kRefused);
  return Await(board(), [&] { return line()->state.load() == refused; });
}

bool RawSession::AwaitCommitted(uint64_t step) {
  return Await(board(), [&] { return board()->committed_step.load() >= step; });
}

std::string RawSession::Refusal() {
  grpc::ClientContext context;
  v1::SessionErrorRequest request;
  request.set_token(token_);
  v1::SessionErrorReply reply;
  const grpc::Status status = control_->SessionError(&context, request, &reply);
  return status.ok() ? reply.message() : "RPC: " + status.error_message();
}

}  // namespace shardd::test

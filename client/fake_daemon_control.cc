// The fake daemon's side of the control protocol.
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/fake_daemon.h"
#include "kernels/dtype.h"
#include "proto/contract/attach.h"

namespace shardd {

namespace {

using contract::Range;

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

grpc::Status Unknown() { return {grpc::StatusCode::UNAUTHENTICATED, "no token of a session"}; }

kernels::DType Kernel(v1::DType dtype) { return static_cast<kernels::DType>(dtype); }

}  // namespace

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
  header.timeline = timeline_;
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
  if (!next_open_.ok()) return ToGrpc(std::exchange(next_open_, absl::OkStatus()));
  Peer* peer = FindToken(request->token());
  if (peer == nullptr) return Unknown();
  if (layout_ == nullptr && request->resume() == v1::RESUME_MUST) {
    return {grpc::StatusCode::NOT_FOUND, "there is no job"};
  }
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
  reply->set_timeline(timeline_);
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
  if (peer == nullptr) return Unknown();
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
  ++groups_;
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
  if (FindToken(request->token()) == nullptr) return Unknown();
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
  if (FindToken(request->token()) == nullptr) return Unknown();
  for (const v1::StepRecord& record : records_) {
    if (record.step() >= request->first_step()) *reply->add_records() = record;
  }
  reply->set_committed_step(committed_);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::FillWindow(grpc::ServerContext*, const v1::FillWindowRequest* request,
                                    v1::FillWindowReply* reply) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (FindToken(request->token()) == nullptr) return Unknown();
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
  if (peer == nullptr) return Unknown();
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
  Peer* peer = FindToken(request->token());
  if (peer == nullptr) return Unknown();
  peer->closed = true;
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

}  // namespace shardd

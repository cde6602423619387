#include "client/session_impl.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/private_daemon.h"
#include "proto/contract/slot_tree.h"

namespace shardd {

namespace {

// Uploads go in parts, so that the daemon reads one while the next is written.
constexpr uint64_t kUploadParts = 4;
// State that moves on while it is read is read again, at most this often.
constexpr int kReadAttempts = 10;

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Open(
    const SessionOptions& options, const JobOptions& job,
    const std::vector<ParameterSpec>& parameters) {
  absl::StatusOr<SessionParts> parts = OpenParts(options, job, parameters);
  if (!parts.ok()) return parts.status();
  return SessionImpl::Start(*std::move(parts));
}

SessionImpl::SessionImpl(SessionParts parts)
    : parts_(std::move(parts)),
      layout_(*parts_.layout),
      run_(parts_.staging->plan().run),
      uploads_wanted_(parts_.daemon.job.initialising()),
      groups_(parts_.job.groups) {
  MakePublisher();
}

void SessionImpl::MakePublisher() {
  BucketPublisher::Options options;
  options.layout = parts_.layout.get();
  options.staging = parts_.staging.get();
  options.ring = parts_.ring.get();
  options.peer = MakeRingPeer();
  options.grad_dtype = static_cast<kernels::DType>(parts_.job.grad_dtype);
  options.job_tag = parts_.daemon.job.job_tag();
  options.discard_published = parts_.job.stage >= 2;
  publisher_ = std::make_unique<BucketPublisher>(options);
}

absl::Status SessionImpl::MakeView() {
  WeightsSource source;
  source.weights = parts_.daemon.segment->weights();
  source.dtype = static_cast<kernels::DType>(parts_.job.weight_dtype);
  source.ready_step = [this](uint64_t bucket) { return parts_.daemon.segment->ready_step(bucket); };
  source.wait = [this](absl::FunctionRef<bool()> done) { return Await(done); };
  if (parts_.job.weights == WeightsMode::kShared) {
    view_ = MakeSharedWeights(layout_, std::move(source));
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<WeightsView>> view =
      parts_.job.stage == 3 ? MakeShardedWeights(layout_, std::move(source),
                                                 layout_.shard_range(rank(), world_size()))
                            : MakePrivateWeights(layout_, std::move(source));
  if (view.ok()) view_ = *std::move(view);
  return view.status();
}

absl::StatusOr<std::unique_ptr<Session>> SessionImpl::Start(SessionParts parts) {
  std::unique_ptr<SessionImpl> session(new SessionImpl(std::move(parts)));
  absl::Status status = session->MakeView();
  if (status.ok()) status = session->JoinFirst();
  if (!status.ok()) return status;
  const bool resumed = !session->parts_.daemon.job.created() && session->next_step_ > 1;
  if (resumed && session->rank() == 0) {
    session->parts_.options.log(
        absl::StrCat("resuming ", session->parts_.job.name, " at step ", session->next_step_));
  }
  return session;
}

bool SessionImpl::initialising() const {
  return parts_.daemon.segment->board().state.load(std::memory_order_acquire) ==
         static_cast<uint32_t>(contract::BoardState::kInitialising);
}

absl::Status SessionImpl::PublishUpload(const contract::Descriptor& part,
                                        std::span<const std::byte> data) {
  RingWriter& ring = *parts_.ring;
  const auto released = [&] {
    return parts_.daemon.segment->line().released.load(std::memory_order_acquire);
  };
  absl::Status status = Await([&] { return ring.TryReserve(data.size(), 1, released()); });
  if (!status.ok()) return status;
  std::memcpy(ring.block(), data.data(), data.size());
  contract::Descriptor descriptor = part;
  descriptor.job_tag = parts_.daemon.job.job_tag();
  descriptor.generation = generation_;
  ring.Publish(std::span(&descriptor, 1));
  MakeRingPeer().doorbell();
  return absl::OkStatus();
}

absl::Status SessionImpl::UploadFloats(const contract::Descriptor& of, size_t parameter,
                                       uint64_t offset, std::span<const float> values) {
  absl::Status status = CheckParameter(parameter);
  if (!status.ok()) return status;
  const uint64_t elements = layout_.parameter_elements(parameter);
  const uint64_t unit = contract::kParameterAlignment;
  if (offset > elements || values.size() > elements - offset || offset % unit != 0 ||
      (values.size() % unit != 0 && offset + values.size() != elements)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an upload of ", values.size(), " elements at ", offset, " of '", Name(parameter),
        "', which has ", elements, "; a part begins at a multiple of ", unit,
        " and ends at one or at the parameter's end"));
  }
  // The last element may have made the job complete before a parameter without any comes.
  if (values.empty()) return absl::OkStatus();
  if (!initialising()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job '", parts_.job.name, "' has its weights; upload only while initialising()"));
  }
  const uint64_t most = parts_.ring->data_bytes() / sizeof(float) / kUploadParts / unit * unit;
  for (uint64_t at = 0; at < values.size() && status.ok(); at += most) {
    const auto some = values.subspan(at, std::min<uint64_t>(most, values.size() - at));
    contract::Descriptor part = of;
    part.begin = layout_.parameter_range(parameter).begin + offset + at;
    part.count = some.size();
    part.dtype = static_cast<uint8_t>(kernels::DType::kFloat32);
    status = PublishUpload(part, std::as_bytes(some));
  }
  return status;
}

absl::Status SessionImpl::Upload(size_t parameter, uint64_t offset, std::span<const float> values) {
  return RunVerb([&] {
    contract::Descriptor part{};
    part.kind = static_cast<uint8_t>(contract::DescriptorKind::kInit);
    return UploadFloats(part, parameter, offset, values);
  });
}

absl::Status SessionImpl::UploadMoment(uint32_t moment, size_t parameter, uint64_t offset,
                                       std::span<const float> values, uint64_t applied) {
  return RunVerb([&] {
    contract::Descriptor part{};
    part.kind = static_cast<uint8_t>(contract::DescriptorKind::kMoment);
    part.bucket = moment;
    part.step = applied;
    return UploadFloats(part, parameter, offset, values);
  });
}

absl::Status SessionImpl::FinishUpload() {
  return RunVerb([&] { return Await([&] { return !initialising(); }); });
}

absl::StatusOr<std::vector<StepRecord>> SessionImpl::StepRecords(uint64_t first_step) {
  v1::StepRecordsRequest request;
  request.set_first_step(first_step);
  absl::StatusOr<v1::StepRecordsReply> reply;
  absl::Status status = RunRead([&] {
    reply = parts_.daemon.control->StepRecords(request);
    return reply.status();
  });
  if (!status.ok()) return status;
  std::vector<StepRecord> records;
  for (const v1::StepRecord& from : reply->records()) {
    StepRecord& record = records.emplace_back();
    record.step = from.step();
    record.applied = from.applied();
    record.generation = from.generation();
    record.result = static_cast<StepResult>(from.result());
    record.reason = from.reason();
    record.loss = from.loss();
    record.grad_norm = from.grad_norm();
    record.loss_scale = from.loss_scale();
    record.lr = from.lr();
    record.tokens = from.tokens();
    record.unix_nanos = from.unix_nanos();
  }
  return records;
}

absl::Status SessionImpl::FillWindow(StateKind kind, size_t parameter, uint64_t offset,
                                     std::span<float> out, uint64_t* committed_step) {
  const uint64_t room = parts_.daemon.window.size() / sizeof(float);
  for (size_t at = 0; at < out.size();) {
    const size_t count = std::min<size_t>(out.size() - at, room);
    v1::FillWindowRequest request;
    request.set_kind(static_cast<v1::StateKind>(kind));
    request.set_parameter(static_cast<uint32_t>(parameter));
    request.set_offset(offset + at);
    request.set_count(count);
    absl::StatusOr<v1::FillWindowReply> reply = parts_.daemon.control->FillWindow(request);
    if (!reply.ok()) return reply.status();
    if (at == 0) *committed_step = reply->committed_step();
    if (reply->committed_step() != *committed_step) {
      return absl::AbortedError("the state moved on while it was read");
    }
    std::memcpy(out.data() + at, parts_.daemon.window.data(), count * sizeof(float));
    at += count;
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::ReadState(StateKind kind, size_t parameter, uint64_t offset,
                                    std::span<float> out) {
  absl::Status status = CheckParameter(parameter);
  if (!status.ok()) return status;
  const uint64_t elements = layout_.parameter_elements(parameter);
  if (offset > elements || out.size() > elements - offset) {
    return absl::InvalidArgumentError(absl::StrCat("reading ", out.size(), " elements at ", offset,
                                                   " of '", Name(parameter), "', which has ",
                                                   elements));
  }
  return RunRead([&] {
    uint64_t committed_step = 0;
    absl::Status read;
    for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
      read = FillWindow(kind, parameter, offset, out, &committed_step);
      if (!absl::IsAborted(read)) break;
    }
    return read;
  });
}

absl::StatusOr<uint64_t> SessionImpl::ParameterApplied(size_t parameter) {
  absl::Status status = CheckParameter(parameter);
  if (!status.ok()) return status;
  v1::FillWindowRequest request;
  request.set_kind(v1::STATE_MASTER);
  request.set_parameter(static_cast<uint32_t>(parameter));
  absl::StatusOr<v1::FillWindowReply> reply;
  status = RunRead([&] {
    reply = parts_.daemon.control->FillWindow(request);
    return reply.status();
  });
  if (!status.ok()) return status;
  return reply->parameter_applied();
}

absl::Status SessionImpl::Close() {
  std::unique_lock<std::shared_mutex> lock(verbs_);
  if (closed_) return absl::OkStatus();
  if (!lost_.ok()) return lost_;
  absl::Status status;
  if (ended_) {
    // The others' step needs what this rank gave. When it does not come about, leaving is right.
    status = Await([this] {
      return parts_.daemon.segment->board().committed_step.load(std::memory_order_acquire) >=
             next_step_;
    });
  }
  if (!DaemonGone(status)) status = parts_.daemon.control->Close();
  while (DaemonGone(status)) {
    status = Reattach();
    if (status.ok()) status = parts_.daemon.control->Close();
  }
  if (!status.ok()) return status;
  closed_ = true;
  if (parts_.daemon.found.private_directory.empty()) return absl::OkStatus();
  // Nobody else uses a private daemon: its memory would be held for nobody.
  return EndPrivateDaemon(
      parts_.daemon.found.private_directory, parts_.daemon.attach().daemon_pid(),
      [&]() -> absl::StatusOr<bool> {
        absl::StatusOr<v1::ServerInfoReply> info = parts_.daemon.control->ServerInfo();
        if (!info.ok()) return info.status();
        if (info->sessions() > 1) return false;
        absl::Status deleted = parts_.daemon.control->DeleteJob(parts_.job.name);
        if (!deleted.ok()) return deleted;
        return true;
      });
}

absl::Status SessionImpl::DeleteJob() {
  std::unique_lock<std::shared_mutex> lock(verbs_);
  if (!closed_) {
    return absl::FailedPreconditionError(
        absl::StrCat("job '", parts_.job.name, "' is in use by this session; call Close first"));
  }
  if (!parts_.daemon.found.private_directory.empty()) return absl::OkStatus();
  const absl::Status status = parts_.daemon.control->DeleteJob(parts_.job.name);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

}  // namespace shardd

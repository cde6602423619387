#include "client/session_parts.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/bucket_publisher.h"
#include "client/daemon_address.h"
#include "client/job_options.h"
#include "client/slot_plan.h"
#include "kernels/isa.h"
#include "proto/contract/segments.h"
#include "proto/contract/slot_tree.h"

namespace shardd {

namespace {

// Admission makes the job's memory resident first, which takes a second per gigabyte.
constexpr absl::Duration kOpenTimeout = absl::Minutes(10);
// Below this an upload would be all descriptors and no data.
constexpr uint64_t kSmallestRing = 64 * 1024;

v1::Resume ToProto(Resume resume) {
  switch (resume) {
    case Resume::kNever:
      return v1::RESUME_NEVER;
    case Resume::kMust:
      return v1::RESUME_MUST;
    case Resume::kAuto:
      break;
  }
  return v1::RESUME_AUTO;
}

v1::OpenRequest MakeOpenRequest(const SessionOptions& options, const JobOptions& job,
                                const std::vector<ParameterSpec>& parameters) {
  v1::OpenRequest request;
  request.set_protocol_version(contract::kProtocolVersion);
  *request.mutable_config() = ToProto(job);
  for (const ParameterSpec& spec : parameters) {
    v1::Parameter* parameter = request.add_parameters();
    parameter->set_name(spec.name);
    for (int64_t extent : spec.shape) parameter->add_shape(extent);
    parameter->set_group(spec.group);
    for (const std::string& alias : spec.aliases) parameter->add_aliases(alias);
  }
  request.set_rank(options.rank);
  request.set_world_size(options.world_size);
  request.set_resume(ToProto(options.resume));
  request.set_restarted(options.restarted);
  return request;
}

absl::StatusOr<std::unique_ptr<const contract::Layout>> MakeLayout(
    const JobOptions& job, const std::vector<ParameterSpec>& parameters,
    const v1::OpenReply& reply) {
  contract::Layout::Options options;
  options.chunk_elements = reply.chunk_elements();
  options.bucket_elements = reply.bucket_elements();
  options.groups = static_cast<uint32_t>(job.groups.size());
  absl::StatusOr<contract::Layout> layout =
      contract::Layout::Create(LayoutSpecs(parameters), options);
  if (!layout.ok()) return layout.status();
  if (layout->hash() != reply.layout_hash()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon lays job '", job.name,
                     "' out otherwise than this client; install matching versions of both"));
  }
  return std::make_unique<const contract::Layout>(*std::move(layout));
}

absl::Status MakeRing(SessionParts* parts) {
  const contract::SlotRange run =
      contract::SlotsOfRank(parts->job.slots, parts->options.world_size, parts->options.rank);
  absl::StatusOr<std::unique_ptr<GradStaging>> staging =
      GradStaging::Create(*parts->layout, MakeSlotPlan(parts->job.slots, run),
                          static_cast<kernels::DType>(parts->job.grad_dtype), kernels::BestIsa());
  if (!staging.ok()) return staging.status();
  parts->staging = *std::move(staging);
  RingWriter::Options options;
  // Two buckets with all their nodes: one is read while the next is written.
  options.data_bytes =
      std::max(kSmallestRing, 2 * BucketPublisher::LargestBlock(*parts->layout, *parts->staging));
  options.descriptors = 2 * BucketPublisher::DescriptorsPerBucket(*parts->staging);
  options.heartbeat = parts->job.heartbeat;
  absl::StatusOr<std::unique_ptr<RingWriter>> ring = RingWriter::Create(options);
  if (!ring.ok()) return ring.status();
  parts->ring = *std::move(ring);
  return absl::OkStatus();
}

absl::Status MapSegments(const v1::OpenReply& reply, SessionParts* parts) {
  absl::StatusOr<AttachConnection::Segments> segments =
      parts->attach->ExchangeSegments(parts->ring->fd());
  if (!segments.ok()) return segments.status();
  WeightsSegment::Expected expected;
  expected.bytes = reply.weights_bytes();
  expected.job_tag = reply.job_tag();
  expected.timeline = reply.timeline();
  expected.session_line = reply.session_line();
  expected.weight_dtype = static_cast<kernels::DType>(parts->job.weight_dtype);
  absl::StatusOr<std::unique_ptr<WeightsSegment>> segment =
      WeightsSegment::Map(std::move(segments->weights), *parts->layout, expected);
  if (!segment.ok()) return segment.status();
  parts->segment = *std::move(segment);
  absl::StatusOr<ReadOnlyMapping> window =
      ReadOnlyMapping::Map(std::move(segments->window), reply.window_bytes(), "the window");
  if (!window.ok()) return window.status();
  parts->window = *std::move(window);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SessionParts> OpenParts(const SessionOptions& options, const JobOptions& job,
                                       const std::vector<ParameterSpec>& parameters) {
  absl::Status status = CheckOpen(options, job, parameters);
  if (!status.ok()) return status;
  SessionParts parts;
  parts.options = options;
  parts.job = job;
  if (!parts.options.log) {
    parts.options.log = [](const std::string& line) {
      std::fprintf(stderr, "shardd: %s\n", line.c_str());
    };
  }
  absl::StatusOr<FoundDaemon> daemon = FindDaemon(options, job.name);
  if (!daemon.ok()) return daemon.status();
  parts.attach = std::move(daemon->attach);
  parts.private_directory = daemon->private_directory;
  parts.control = std::make_unique<ControlChannel>(daemon->socket_path, parts.attach->token());

  absl::StatusOr<v1::OpenReply> reply =
      parts.control->Open(MakeOpenRequest(options, job, parameters), kOpenTimeout);
  if (!reply.ok()) return reply.status();
  parts.created = reply->created();
  parts.job_tag = reply->job_tag();
  parts.committed_step = reply->committed_step();
  absl::StatusOr<std::unique_ptr<const contract::Layout>> layout =
      MakeLayout(job, parameters, *reply);
  if (!layout.ok()) return layout.status();
  parts.layout = *std::move(layout);
  status = MakeRing(&parts);
  if (status.ok()) status = MapSegments(*reply, &parts);
  if (!status.ok()) return status;
  return parts;
}

}  // namespace shardd

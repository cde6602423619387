#include "client/session_parts.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/bucket_publisher.h"
#include "client/daemon_address.h"
#include "client/job_options.h"
#include "client/retry.h"
#include "client/slot_plan.h"
#include "kernels/isa.h"
#include "proto/contract/segments.h"
#include "proto/contract/slot_tree.h"

namespace shardd {

namespace {

// Admission makes the job's memory resident first, which takes a second per gigabyte.
constexpr absl::Duration kOpenTimeout = absl::Minutes(10);
// A job that is there is opened at once; this is for a daemon that is busy.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(10);
// Below this an upload would be all descriptors and no data.
constexpr Backoff kOpenAgain = {.first = absl::Milliseconds(5), .most = absl::Milliseconds(100)};
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
  for (const FrozenSpec& spec : job.frozen) {
    v1::FrozenParameter* frozen = request.add_frozen();
    frozen->set_name(spec.name);
    for (int64_t extent : spec.shape) frozen->add_shape(extent);
    frozen->set_dtype(static_cast<v1::DType>(spec.dtype));
    for (const std::string& alias : spec.aliases) frozen->add_aliases(alias);
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

absl::Status MapSegments(const SessionParts& parts, DaemonLink* link) {
  const v1::OpenReply& reply = link->job;
  absl::StatusOr<AttachConnection::Segments> segments =
      link->found.attach->ExchangeSegments(parts.ring->fd());
  if (!segments.ok()) return segments.status();
  WeightsSegment::Expected expected;
  expected.bytes = reply.weights_bytes();
  expected.job_tag = reply.job_tag();
  expected.timeline = reply.timeline();
  expected.session_line = reply.session_line();
  expected.weight_dtype = static_cast<kernels::DType>(parts.job.weight_dtype);
  absl::StatusOr<std::unique_ptr<WeightsSegment>> segment =
      WeightsSegment::Map(std::move(segments->weights), *parts.layout, expected);
  if (!segment.ok()) return segment.status();
  link->segment = *std::move(segment);
  absl::StatusOr<ReadOnlyMapping> window =
      ReadOnlyMapping::Map(std::move(segments->window), reply.window_bytes(), "the window");
  if (!window.ok()) return window.status();
  link->window = *std::move(window);
  return absl::OkStatus();
}

absl::Status SendOpen(const v1::OpenRequest& request, absl::Duration timeout, DaemonLink* link) {
  link->control = std::make_unique<ControlChannel>(link->found.socket_path, link->attach().token());
  absl::StatusOr<v1::OpenReply> reply = link->control->Open(request, timeout);
  if (!reply.ok()) return reply.status();
  link->job = *std::move(reply);
  return absl::OkStatus();
}

// Whether the job that a daemon came back with is the one that was trained.
absl::Status CheckSameJob(const SessionParts& parts, const DaemonLink& link) {
  const v1::OpenReply& was = parts.daemon.job;
  const v1::OpenReply& is = link.job;
  if (is.job_id() == was.job_id() && is.timeline() == was.timeline() &&
      is.job_tag() == was.job_tag()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the daemon at ", link.found.socket_path, " came back with another job '", parts.job.name,
      "' (id ", is.job_id(), ", timeline ", is.timeline(), ", at step ", is.committed_step(),
      ") than this session trained (id ", was.job_id(), ", timeline ", was.timeline(),
      "); open the job again to go on with that one, or start shardd with the state directory "
      "that it had"));
}

// `found` becomes true once a daemon has answered.
absl::StatusOr<SessionParts> OpenOnce(const SessionOptions& options, const JobOptions& job,
                                      const std::vector<ParameterSpec>& parameters, bool* found) {
  SessionParts parts;
  parts.options = options;
  parts.job = job;
  if (!parts.options.log) {
    parts.options.log = [](const std::string& line) {
      std::fprintf(stderr, "shardd: %s\n", line.c_str());
    };
  }
  parts.request = MakeOpenRequest(options, job, parameters);
  absl::StatusOr<FoundDaemon> daemon = FindDaemon(options, job.name);
  if (!daemon.ok()) return daemon.status();
  *found = true;
  parts.daemon.found = *std::move(daemon);
  absl::Status status = SendOpen(parts.request, kOpenTimeout, &parts.daemon);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<const contract::Layout>> layout =
      MakeLayout(job, parameters, parts.daemon.job);
  if (!layout.ok()) return layout.status();
  parts.layout = *std::move(layout);
  status = MakeRing(&parts);
  if (status.ok()) status = MapSegments(parts, &parts.daemon);
  if (!status.ok()) return status;
  return parts;
}

}  // namespace

absl::StatusOr<SessionParts> OpenParts(const SessionOptions& options, const JobOptions& job,
                                       const std::vector<ParameterSpec>& parameters) {
  absl::Status status = CheckOpen(options, job, parameters);
  if (!status.ok()) return status;
  absl::StatusOr<SessionParts> parts;
  bool found = false;
  // One that answered and went away while the job was being opened is waited for, as later on.
  status = RetryUntil(
      absl::Now() + options.reconnect_timeout, kOpenAgain, SystemWait(),
      [&] {
        parts = OpenOnce(options, job, parameters, &found);
        return parts.status();
      },
      [&](const absl::Status& failed) {
        return found && options.reconnect_timeout > absl::ZeroDuration() &&
               (absl::IsUnavailable(failed) || absl::IsCancelled(failed) ||
                absl::IsUnauthenticated(failed));
      });
  if (!status.ok()) return status;
  return parts;
}

absl::StatusOr<DaemonLink> Reopen(const SessionParts& parts, bool has_state, absl::Time deadline) {
  DaemonLink link;
  absl::StatusOr<FoundDaemon> found =
      FindDaemonAgain(parts.daemon.found, parts.options, parts.job.name, deadline);
  if (!found.ok()) return found.status();
  link.found = *std::move(found);
  v1::OpenRequest request = parts.request;
  // The group goes on where it was: ranks that have closed meanwhile are not waited for.
  request.set_restarted(true);
  if (has_state) request.set_resume(v1::RESUME_MUST);
  const absl::Duration timeout =
      has_state ? std::max(deadline - absl::Now(), kAnswerTimeout) : kOpenTimeout;
  absl::Status status = SendOpen(request, timeout, &link);
  if (absl::IsNotFound(status)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon at ", link.found.socket_path, " came back without job '",
                     parts.job.name, "'; start shardd with the state directory that it had"));
  }
  if (!status.ok()) return status;
  if (link.job.layout_hash() != parts.layout->hash()) {
    return absl::FailedPreconditionError(absl::StrCat("the daemon at ", link.found.socket_path,
                                                      " now lays job '", parts.job.name,
                                                      "' out otherwise; start this rank again"));
  }
  if (has_state) status = CheckSameJob(parts, link);
  if (status.ok()) {
    parts.ring->Restart();
    status = MapSegments(parts, &link);
  }
  if (!status.ok()) return status;
  return link;
}

}  // namespace shardd

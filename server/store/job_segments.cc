#include "server/store/job_segments.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>

#include "absl/strings/str_cat.h"
#include "server/store/crc32c.h"

namespace shardd::store {

namespace {

using contract::kLineBytes;
using contract::kSegmentPage;
using contract::RoundUpTo;

struct WeightsOffsets {
  uint64_t buckets, sessions, weights, total;
};

WeightsOffsets WeightsLayout(const contract::Layout& layout, uint32_t slots, size_t element) {
  WeightsOffsets at{};
  at.buckets = 2 * kSegmentPage;
  at.sessions = at.buckets + layout.num_buckets() * kLineBytes;
  // A leaver's line may be kept for a moment while its successor comes.
  at.weights = RoundUpTo(at.sessions + (uint64_t{slots} + 16) * kLineBytes, kSegmentPage);
  at.total = RoundUpTo(at.weights + layout.flat_elements() * element, kSegmentPage);
  return at;
}

struct ReducedOffsets {
  uint64_t lines, sums, data, total;
};

ReducedOffsets ReducedLayout(const contract::Layout& layout, size_t element) {
  ReducedOffsets at{};
  at.lines = kSegmentPage;
  at.sums = at.lines + layout.num_buckets() * kLineBytes;
  at.data = RoundUpTo(at.sums + layout.num_blocks() * sizeof(double), kSegmentPage);
  at.total = RoundUpTo(at.data + layout.flat_elements() * element, kSegmentPage);
  return at;
}

struct JobOffsets {
  uint64_t config, parameters, table, records, decisions, decision_bytes, total;
};

JobOffsets JobLayout(const contract::Layout& layout, const JobSpec& spec) {
  JobOffsets at{};
  at.config = kSegmentPage;
  at.parameters = RoundUpTo(at.config + spec.config.ByteSizeLong(), kLineBytes);
  at.table = RoundUpTo(at.parameters + spec.parameters.size(), kSegmentPage);
  at.records = at.table + 2 * layout.num_parameters() * sizeof(contract::ParameterEntry);
  at.decisions = RoundUpTo(at.records + contract::kStepRecords * sizeof(contract::StepRecordEntry),
                           kSegmentPage);
  at.decision_bytes =
      DecisionSlotBytes(layout.num_parameters(), static_cast<uint64_t>(spec.config.groups_size()));
  at.total = at.decisions + 2 * at.decision_bytes;
  return at;
}

std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

void CopyText(const std::string& text, char* out, size_t size) {
  const size_t n = std::min(text.size(), size - 1);
  std::memcpy(out, text.data(), n);
  out[n] = '\0';
}

}  // namespace

uint64_t DecisionSlotBytes(uint64_t parameters, uint64_t groups) {
  return RoundUpTo(sizeof(contract::DecisionHeader) + (parameters + 63) / 64 * 8 +
                       groups * sizeof(contract::DecisionGroup) + contract::kMaxBlobBytes,
                   kSegmentPage);
}

kernels::DType ReducedDType(const v1::JobConfig& config) {
  return config.slots() == 1 ? static_cast<kernels::DType>(config.grad_dtype())
                             : kernels::DType::kFloat32;
}

SegmentPlan PlanSegments(const contract::Layout& layout, const JobSpec& spec, uint64_t page_bytes) {
  const auto weight = static_cast<kernels::DType>(spec.config.weight_dtype());
  SegmentPlan plan;
  plan.job_bytes = RoundUpTo(JobLayout(layout, spec).total, page_bytes);
  plan.state_bytes =
      RoundUpTo(std::max<uint64_t>(layout.num_chunks(), 1) *
                    contract::ChunkRecordBytes(layout.chunk_elements(), spec.moments),
                page_bytes);
  plan.reduced_bytes = RoundUpTo(
      ReducedLayout(layout, kernels::DTypeSize(ReducedDType(spec.config))).total, page_bytes);
  plan.weights_bytes = RoundUpTo(
      WeightsLayout(layout, spec.config.slots(), kernels::DTypeSize(weight)).total, page_bytes);
  return plan;
}

absl::StatusOr<std::unique_ptr<JobSegments>> JobSegments::Create(
    const StateDirectory& directory, const contract::Layout& layout, const JobSpec& spec,
    const std::function<void()>& before_rename) {
  std::unique_ptr<JobSegments> job(new JobSegments());
  const std::string building = directory.NewJobPath(spec.config.name());
  job->path_ = directory.JobPath(spec.config.name());
  job->plan_ = PlanSegments(layout, spec, directory.page_bytes());
  job->chunk_elements_ = layout.chunk_elements();
  job->moments_ = spec.moments;
  job->record_bytes_ = contract::ChunkRecordBytes(layout.chunk_elements(), spec.moments);
  job->reduced_dtype_ = ReducedDType(spec.config);
  job->weight_dtype_ = static_cast<kernels::DType>(spec.config.weight_dtype());
  job->timeline_ = spec.timeline;
  job->job_tag_ = contract::Hasher()
                      .Add(std::string(spec.job_id.begin(), spec.job_id.end()))
                      .Add(spec.timeline)
                      .value();

  absl::StatusOr<uint64_t> free = directory.FreeBytes();
  if (!free.ok()) return free.status();
  if (job->plan_.total() > *free) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "job '", spec.config.name(), "' needs ", job->plan_.total(),
        " bytes of the state directory ", directory.path(), ", which has ", *free,
        " free (pages of ", directory.page_bytes(), " bytes); enlarge its tmpfs or delete a job"));
  }
  if (absl::Status status = RemoveJobDirectory(building); !status.ok()) return status;
  if (mkdir(building.c_str(), 0700) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot make ", building));
  }
  const auto make = [&](const char* name, uint64_t bytes, Segment* out) -> absl::Status {
    absl::StatusOr<Segment> segment = Segment::Create(building + "/" + name, bytes);
    if (!segment.ok()) return segment.status();
    *out = *std::move(segment);
    return absl::OkStatus();
  };
  absl::Status status = make("job", job->plan_.job_bytes, &job->job_);
  if (status.ok()) status = make("state", job->plan_.state_bytes, &job->state_);
  if (status.ok()) status = make("reduced", job->plan_.reduced_bytes, &job->reduced_);
  if (status.ok()) status = make("weights", job->plan_.weights_bytes, &job->weights_);
  if (status.ok()) {
    job->InitialiseJob(layout, spec);
    job->InitialiseState(layout);
    job->InitialiseReduced(layout);
    job->InitialiseWeights(layout, spec);
    before_rename();
    if (rename(building.c_str(), job->path_.c_str()) != 0) {
      status = contract::ErrnoStatus(errno, absl::StrCat("cannot rename ", building));
    }
  }
  if (!status.ok()) {
    RemoveJobDirectory(building).IgnoreError();
    return status;
  }
  return job;
}

void JobSegments::InitialiseJob(const contract::Layout& layout, const JobSpec& spec) {
  const JobOffsets at = JobLayout(layout, spec);
  contract::JobHeader* h = header();
  h->version = contract::kFormatVersion;
  h->uid = spec.uid;
  CopyText(spec.config.name(), h->name, sizeof(h->name));
  CopyText(BootId(), h->boot_id, sizeof(h->boot_id));
  std::memcpy(h->job_id, spec.job_id.data(), sizeof(h->job_id));
  h->job_tag = job_tag_;
  h->timeline = spec.timeline;
  h->layout_hash = layout.hash();
  h->config_hash = spec.config_hash;
  h->parameters = layout.num_parameters();
  h->groups = static_cast<uint64_t>(spec.config.groups_size());
  h->config_offset = at.config;
  h->config_bytes = spec.config.ByteSizeLong();
  h->parameters_offset = at.parameters;
  h->parameters_bytes = spec.parameters.size();
  h->table_offset = at.table;
  h->records_offset = at.records;
  h->decisions_offset = at.decisions;
  h->decision_bytes = at.decision_bytes;
  h->total_bytes = at.total;
  h->generation = 1;
  spec.config.SerializeToArray(job_.at<char>(at.config), static_cast<int>(h->config_bytes));
  std::memcpy(job_.at<char>(at.parameters), spec.parameters.data(), spec.parameters.size());
  auto* table = job_.at<contract::ParameterEntry>(at.table);
  for (uint64_t i = 0; i < 2 * layout.num_parameters(); ++i) {
    table[i].beta1_product = 1.0;
    table[i].beta2_product = 1.0;
  }
  h->magic = contract::kJobMagic;
}

void JobSegments::InitialiseState(const contract::Layout& layout) {
  for (uint64_t c = 0; c < layout.num_chunks(); ++c) {
    const ChunkView view = chunk(c);
    contract::ChunkHeader* h = view.header;
    h->magic = contract::kChunkMagic;
    h->version = contract::kFormatVersion;
    h->chunk_elements = layout.chunk_elements();
    h->job_tag = job_tag_;
    h->timeline = timeline_;
    h->chunk = c;
    h->crc = Crc32c(h, offsetof(contract::ChunkHeader, applied));
    kernels::ResetUndo(view.undo, timeline_);
  }
}

void JobSegments::InitialiseReduced(const contract::Layout& layout) {
  const ReducedOffsets at = ReducedLayout(layout, kernels::DTypeSize(reduced_dtype_));
  contract::ReducedHeader* h = reduced_header();
  h->version = contract::kFormatVersion;
  h->dtype = static_cast<uint32_t>(reduced_dtype_);
  h->job_tag = job_tag_;
  h->timeline = timeline_;
  h->flat_elements = layout.flat_elements();
  h->buckets = layout.num_buckets();
  h->blocks = layout.num_blocks();
  h->lines_offset = at.lines;
  h->sums_offset = at.sums;
  h->data_offset = at.data;
  h->total_bytes = at.total;
  h->magic = contract::kReducedMagic;
}

void JobSegments::InitialiseWeights(const contract::Layout& layout, const JobSpec& spec) {
  const WeightsOffsets at =
      WeightsLayout(layout, spec.config.slots(), kernels::DTypeSize(weight_dtype_));
  session_lines_ = static_cast<uint32_t>((at.weights - at.sessions) / kLineBytes);
  auto* h = weights_.at<contract::WeightsHeader>(0);
  h->version = contract::kFormatVersion;
  h->weight_dtype = static_cast<uint32_t>(weight_dtype_);
  h->job_tag = job_tag_;
  h->timeline = timeline_;
  h->layout_hash = layout.hash();
  h->flat_elements = layout.flat_elements();
  h->buckets = layout.num_buckets();
  h->session_lines = session_lines_;
  h->bucket_lines_offset = at.buckets;
  h->session_lines_offset = at.sessions;
  h->weights_offset = at.weights;
  h->total_bytes = at.total;
  h->magic = contract::kWeightsMagic;
  board()->state = static_cast<uint32_t>(contract::BoardState::kInitialising);
  board()->generation = header()->generation.load();
}

ChunkView JobSegments::chunk(uint64_t index) const {
  std::byte* record = state_.data() + index * record_bytes_;
  ChunkView view;
  view.header = reinterpret_cast<contract::ChunkHeader*>(record);
  static_assert(sizeof(kernels::UndoLog) == contract::kUndoBytes);
  view.undo = reinterpret_cast<kernels::UndoLog*>(record + contract::kUndoOffset);
  view.master = reinterpret_cast<float*>(record + contract::MasterOffset());
  for (int m = 0; m < moments_; ++m) {
    view.moment[static_cast<size_t>(m)] =
        reinterpret_cast<float*>(record + contract::MomentOffset(chunk_elements_, m));
  }
  return view;
}

contract::ReducedLine* JobSegments::reduced_line(uint64_t bucket) const {
  return reduced_.at<contract::ReducedLine>(reduced_header()->lines_offset) + bucket;
}

double* JobSegments::sums() const { return reduced_.at<double>(reduced_header()->sums_offset); }

std::byte* JobSegments::reduced(uint64_t begin) const {
  return reduced_.data() + reduced_header()->data_offset +
         begin * kernels::DTypeSize(reduced_dtype_);
}

contract::BucketLine* JobSegments::bucket_line(uint64_t bucket) const {
  return weights_.at<contract::BucketLine>(
             weights_.at<contract::WeightsHeader>(0)->bucket_lines_offset) +
         bucket;
}

contract::SessionLine* JobSegments::session_line(uint32_t index) const {
  return weights_.at<contract::SessionLine>(
             weights_.at<contract::WeightsHeader>(0)->session_lines_offset) +
         index;
}

std::byte* JobSegments::weights(uint64_t begin) const {
  return weights_.data() + weights_.at<contract::WeightsHeader>(0)->weights_offset +
         begin * kernels::DTypeSize(weight_dtype_);
}

absl::StatusOr<contract::UniqueFd> JobSegments::OpenWeights() const {
  return Segment::OpenReadOnly(path_ + "/weights");
}

}  // namespace shardd::store

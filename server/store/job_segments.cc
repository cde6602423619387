#include "server/store/job_segments.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>

#include "absl/strings/str_cat.h"
#include "kernels/optimizer.h"
#include "proto/control.pb.h"
#include "server/store/crc32c.h"

namespace shardd::store {

namespace {

using contract::kLineBytes;
using contract::kSegmentPage;
using contract::RoundUpTo;

// A leaver's line may be kept for a moment while its successor comes.
constexpr uint32_t kSpareLines = 16;

struct WeightsOffsets {
  uint64_t buckets, sessions, weights, total;
  uint32_t session_lines() const {
    return static_cast<uint32_t>((weights - sessions) / kLineBytes);
  }
};

WeightsOffsets WeightsLayout(const contract::Layout& layout, uint32_t slots, size_t element) {
  WeightsOffsets at{};
  at.buckets = 2 * kSegmentPage;
  at.sessions = at.buckets + layout.num_buckets() * kLineBytes;
  at.weights = RoundUpTo(at.sessions + (uint64_t{slots} + kSpareLines) * kLineBytes, kSegmentPage);
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

absl::Status Damaged(const std::string& path, const std::string& what) {
  return absl::DataLossError(absl::StrCat(path, " ", what));
}

// What the job segment says of the job: its header, then configuration and parameters.
struct JobFile {
  JobSpec spec;
  v1::OpenRequest parameters;
};

absl::Status CheckJobHeader(const Segment& job, const std::string& path);

absl::StatusOr<JobFile> ReadJobFile(const Segment& job, const std::string& path) {
  if (absl::Status status = CheckJobHeader(job, path); !status.ok()) return status;
  const auto* h = job.at<contract::JobHeader>(0);
  JobFile file;
  if (!file.spec.config.ParseFromArray(job.at<char>(h->config_offset),
                                       static_cast<int>(h->config_bytes)) ||
      !file.parameters.ParseFromArray(job.at<char>(h->parameters_offset),
                                      static_cast<int>(h->parameters_bytes))) {
    return Damaged(path, "holds no readable configuration");
  }
  file.spec.parameters.assign(job.at<char>(h->parameters_offset), h->parameters_bytes);
  file.spec.config_hash = h->config_hash;
  file.spec.uid = h->uid;
  file.spec.timeline = h->timeline;
  std::memcpy(file.spec.job_id.data(), h->job_id, sizeof(h->job_id));
  return file;
}

std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

absl::Status CheckJobHeader(const Segment& job, const std::string& path) {
  if (job.bytes() < kSegmentPage) return Damaged(path, "is shorter than its header");
  const auto* h = job.at<contract::JobHeader>(0);
  if (h->magic != contract::kJobMagic) return Damaged(path, "is no job segment");
  if (h->version != contract::kFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has format version ", h->version, "; this daemon reads ",
                     contract::kFormatVersion, ": start the daemon that wrote it"));
  }
  if (std::string(h->boot_id, strnlen(h->boot_id, sizeof(h->boot_id))) != BootId()) {
    return absl::FailedPreconditionError(absl::StrCat(path, " was written before the last boot"));
  }
  const auto inside = [&](uint64_t offset, uint64_t bytes) {
    return offset <= job.bytes() && bytes <= job.bytes() - offset;
  };
  if (h->parameters > contract::kMaxParameters || h->groups > contract::kMaxParameters ||
      !inside(h->config_offset, h->config_bytes) ||
      !inside(h->parameters_offset, h->parameters_bytes) ||
      !inside(h->table_offset, 2 * h->parameters * sizeof(contract::ParameterEntry)) ||
      !inside(h->records_offset, contract::kStepRecords * sizeof(contract::StepRecordEntry)) ||
      h->decision_bytes != DecisionSlotBytes(h->parameters, h->groups) ||
      !inside(h->decisions_offset, 2 * h->decision_bytes)) {
    return Damaged(path, "has a header that points outside of it");
  }
  return absl::OkStatus();
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
  job->Describe(directory, layout, spec);

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

// All that follows from the specification.
void JobSegments::Describe(const StateDirectory& directory, const contract::Layout& layout,
                           const JobSpec& spec) {
  path_ = directory.JobPath(spec.config.name());
  plan_ = PlanSegments(layout, spec, directory.page_bytes());
  chunk_elements_ = layout.chunk_elements();
  moments_ = spec.moments;
  record_bytes_ = contract::ChunkRecordBytes(layout.chunk_elements(), spec.moments);
  slots_ = spec.config.slots();
  session_lines_ = WeightsLayout(layout, slots_, 1).session_lines();
  reduced_dtype_ = ReducedDType(spec.config);
  weight_dtype_ = static_cast<kernels::DType>(spec.config.weight_dtype());
  timeline_ = spec.timeline;
  job_tag_ = contract::Hasher()
                 .Add(std::string(spec.job_id.begin(), spec.job_id.end()))
                 .Add(spec.timeline)
                 .value();
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

absl::StatusOr<AdoptedJob> JobSegments::Open(const StateDirectory& directory,
                                             const std::string& name) {
  const std::string path = directory.JobPath(name);
  std::unique_ptr<JobSegments> job(new JobSegments());
  const auto map = [&](const char* file, Segment* out) -> absl::Status {
    absl::StatusOr<Segment> segment = Segment::Open(path + "/" + file);
    if (!segment.ok()) return segment.status();
    *out = *std::move(segment);
    return absl::OkStatus();
  };
  if (absl::Status status = map("job", &job->job_); !status.ok()) return status;
  absl::StatusOr<JobFile> file = ReadJobFile(job->job_, path + "/job");
  if (!file.ok()) return file.status();
  if (file->spec.config.name() != name) {
    return Damaged(path, absl::StrCat("holds job '", file->spec.config.name(), "'"));
  }
  const kernels::Optimizer* optimizer = kernels::FindOptimizer(file->spec.config.optimizer());
  if (optimizer == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(path, " uses the optimizer '",
                                                      file->spec.config.optimizer(),
                                                      "', which this daemon does not have"));
  }
  file->spec.moments = optimizer->num_states();
  std::vector<contract::ParameterSpec> parameters;
  for (const v1::Parameter& p : file->parameters.parameters()) {
    parameters.push_back({p.name(), {p.shape().begin(), p.shape().end()}, p.group()});
  }
  contract::Layout::Options options;
  options.chunk_elements = file->spec.config.chunk_elements();
  options.bucket_elements = file->spec.config.bucket_elements();
  options.groups = static_cast<uint32_t>(file->spec.config.groups_size());
  absl::StatusOr<contract::Layout> layout = contract::Layout::Create(parameters, options);
  if (!layout.ok()) return layout.status();
  const contract::JobHeader* h = job->header();
  if (layout->hash() != h->layout_hash || layout->num_parameters() != h->parameters ||
      h->groups != options.groups) {
    return Damaged(path, "has a layout that is not that of its parameters");
  }
  job->Describe(directory, *layout, file->spec);
  absl::Status status = map("state", &job->state_);
  if (status.ok()) status = map("reduced", &job->reduced_);
  if (status.ok()) status = map("weights", &job->weights_);
  if (status.ok()) status = job->CheckSegments(*layout);
  if (!status.ok()) return status;
  return AdoptedJob{std::move(job), *std::move(layout), file->spec.config};
}

// Sizes, then headers: each segment is of this job, this timeline and this layout.
absl::Status JobSegments::CheckSegments(const contract::Layout& layout) const {
  const auto short_of = [&](const Segment& segment, uint64_t bytes) {
    return segment.bytes() < bytes;
  };
  if (header()->job_tag != job_tag_)
    return Damaged(path_ + "/job", "has a tag that is not its own");
  const WeightsOffsets w = WeightsLayout(layout, slots_, kernels::DTypeSize(weight_dtype_));
  const ReducedOffsets r = ReducedLayout(layout, kernels::DTypeSize(reduced_dtype_));
  if (short_of(state_, layout.num_chunks() * record_bytes_))
    return Damaged(path_ + "/state", "is cut short");
  if (short_of(reduced_, r.total)) return Damaged(path_ + "/reduced", "is cut short");
  if (short_of(weights_, w.weights)) return Damaged(path_ + "/weights", "is cut short");
  const auto* wh = weights_.at<contract::WeightsHeader>(0);
  if (wh->magic != contract::kWeightsMagic || wh->version != contract::kFormatVersion ||
      wh->job_tag != job_tag_ || wh->timeline != timeline_ || wh->layout_hash != layout.hash() ||
      wh->bucket_lines_offset != w.buckets || wh->session_lines_offset != w.sessions ||
      wh->weights_offset != w.weights || short_of(weights_, wh->total_bytes)) {
    return Damaged(path_ + "/weights", "does not belong to this job");
  }
  const contract::ReducedHeader* rh = reduced_header();
  if (rh->magic != contract::kReducedMagic || rh->version != contract::kFormatVersion ||
      rh->job_tag != job_tag_ || rh->timeline != timeline_ || rh->lines_offset != r.lines ||
      rh->sums_offset != r.sums || rh->data_offset != r.data) {
    return Damaged(path_ + "/reduced", "does not belong to this job");
  }
  for (uint64_t c = 0; c < layout.num_chunks(); ++c) {
    const contract::ChunkHeader* h = chunk(c).header;
    if (h->magic != contract::kChunkMagic || h->job_tag != job_tag_ || h->timeline != timeline_ ||
        h->chunk != c || h->crc != Crc32c(h, offsetof(contract::ChunkHeader, applied))) {
      return Damaged(path_ + "/state", absl::StrCat("has a damaged header at chunk ", c));
    }
  }
  return absl::OkStatus();
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

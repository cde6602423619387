#include "server/store/job_segments.h"

#include <sys/stat.h>

#include <algorithm>
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
  uint64_t config, parameters, table, records, decisions, decision_bytes, frozen, total;
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
  at.frozen = at.decisions + 2 * at.decision_bytes;
  at.total = at.frozen;
  for (const uint64_t bytes : spec.frozen_bytes) at.total += RoundUpTo(bytes, kLineBytes);
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

// A job segment, mapped or read from elsewhere.
using JobImage = std::span<const std::byte>;

absl::Status CheckJobHeader(JobImage job, const std::string& path);

const contract::JobHeader* HeaderOf(JobImage job) {
  return reinterpret_cast<const contract::JobHeader*>(job.data());
}

absl::StatusOr<JobFile> ReadJobFile(JobImage job, const std::string& path) {
  if (absl::Status status = CheckJobHeader(job, path); !status.ok()) return status;
  const contract::JobHeader* h = HeaderOf(job);
  JobFile file;
  const auto* text = reinterpret_cast<const char*>(job.data());
  if (!file.spec.config.ParseFromArray(text + h->config_offset,
                                       static_cast<int>(h->config_bytes)) ||
      !file.parameters.ParseFromArray(text + h->parameters_offset,
                                      static_cast<int>(h->parameters_bytes))) {
    return Damaged(path, "holds no readable configuration");
  }
  file.spec.parameters.assign(text + h->parameters_offset, h->parameters_bytes);
  absl::StatusOr<std::vector<uint64_t>> frozen = FrozenBytes(file.parameters);
  if (!frozen.ok()) return Damaged(path, std::string(frozen.status().message()));
  file.spec.frozen_bytes = *std::move(frozen);
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

absl::Status CheckBoot(JobImage job, const std::string& path) {
  const contract::JobHeader* h = HeaderOf(job);
  if (std::string(h->boot_id, strnlen(h->boot_id, sizeof(h->boot_id))) == BootId()) {
    return absl::OkStatus();
  }
  return absl::OutOfRangeError(absl::StrCat(path, " was written before the last boot"));
}

absl::Status CheckJobHeader(JobImage job, const std::string& path) {
  if (job.size() < kSegmentPage) return Damaged(path, "is shorter than its header");
  const contract::JobHeader* h = HeaderOf(job);
  if (h->magic != contract::kJobMagic) return Damaged(path, "is no job segment");
  if (h->version != contract::kFormatVersion && h->version != contract::kStateFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " has format version ", h->version, "; this daemon reads ", contract::kFormatVersion,
        " and ", contract::kStateFormatVersion, ": start the daemon that wrote it"));
  }
  const auto inside = [&](uint64_t offset, uint64_t bytes) {
    return offset <= job.size() && bytes <= job.size() - offset;
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

// The layout that a job segment describes; completes `file`.
absl::StatusOr<contract::Layout> LayoutOf(JobImage job, JobFile* file, const std::string& name,
                                          const std::string& path) {
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
  const contract::JobHeader* h = HeaderOf(job);
  if (layout->hash() != h->layout_hash || layout->num_parameters() != h->parameters ||
      h->groups != options.groups) {
    return Damaged(path, "has a layout that is not that of its parameters");
  }
  return layout;
}

void CopyText(const std::string& text, char* out, size_t size) {
  const size_t n = std::min(text.size(), size - 1);
  std::memcpy(out, text.data(), n);
  out[n] = '\0';
}

}  // namespace

absl::StatusOr<JobDescription> ReadJobImage(std::span<const std::byte> image,
                                            const std::string& path) {
  absl::StatusOr<JobFile> file = ReadJobFile(image, path);
  if (!file.ok()) return file.status();
  absl::StatusOr<contract::Layout> layout = LayoutOf(image, &*file, file->spec.config.name(), path);
  if (!layout.ok()) return layout.status();
  return JobDescription{std::move(file->spec), *std::move(layout)};
}

uint64_t DecisionSlotBytes(uint64_t parameters, uint64_t groups) {
  return RoundUpTo(sizeof(contract::DecisionHeader) + (parameters + 63) / 64 * 8 +
                       groups * sizeof(contract::DecisionGroup) + contract::kMaxBlobBytes,
                   kSegmentPage);
}

absl::StatusOr<std::vector<uint64_t>> FrozenBytes(const v1::OpenRequest& request) {
  std::vector<uint64_t> sizes;
  for (const v1::FrozenParameter& frozen : request.frozen()) {
    uint64_t bytes = frozen.dtype() == v1::fp32 ? 4 : 2;
    bool fits =
        frozen.dtype() == v1::fp32 || frozen.dtype() == v1::bf16 || frozen.dtype() == v1::fp16;
    for (const int64_t extent : frozen.shape()) {
      fits = fits && extent >= 0 &&
             !__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes) &&
             bytes <= contract::kMaxElements;
    }
    if (!fits) {
      return absl::InvalidArgumentError(absl::StrCat("frozen parameter '", frozen.name(),
                                                     "' has no dtype of fp32, bf16, fp16, ",
                                                     "or a shape that is none or too large"));
    }
    sizes.push_back(bytes);
  }
  return sizes;
}

kernels::DType ReducedDType(const v1::JobConfig& config) {
  return config.slots() == 1 ? static_cast<kernels::DType>(config.grad_dtype())
                             : kernels::DType::kFloat32;
}

kernels::StateFormat StateFormatOf(const v1::JobConfig& config) {
  kernels::StateFormat format;
  if (config.split_master()) format.master = kernels::MasterFormat::kSplit;
  if (config.moments() == v1::MomentFormat::bf16) {
    format.moments = kernels::MomentFormat::kBFloat16;
  }
  format.stochastic_moments = config.stochastic_moments();
  format.stochastic_weights = config.stochastic_weights();
  format.seed = config.seed();
  return format;
}

contract::StateShape ShapeOf(const v1::JobConfig& config, int moments) {
  const kernels::StateFormat format = StateFormatOf(config);
  return {moments, format.master_bytes(), format.moment_bytes()};
}

SegmentPlan PlanSegments(const contract::Layout& layout, const JobSpec& spec, uint64_t page_bytes) {
  const auto weight = static_cast<kernels::DType>(spec.config.weight_dtype());
  SegmentPlan plan;
  plan.job_bytes = RoundUpTo(JobLayout(layout, spec).total, page_bytes);
  plan.state_bytes = RoundUpTo(
      std::max<uint64_t>(layout.num_chunks(), 1) *
          contract::ChunkRecordBytes(layout.chunk_elements(), ShapeOf(spec.config, spec.moments)),
      page_bytes);
  plan.reduced_bytes = RoundUpTo(
      ReducedLayout(layout, kernels::DTypeSize(ReducedDType(spec.config))).total, page_bytes);
  plan.weights_bytes = RoundUpTo(
      WeightsLayout(layout, spec.config.slots(), kernels::DTypeSize(weight)).total, page_bytes);
  return plan;
}

uint64_t ChunkBytes(const contract::Layout& layout, const JobSpec& spec) {
  return contract::ChunkRecordBytes(layout.chunk_elements(), ShapeOf(spec.config, spec.moments)) +
         layout.chunk_elements() * kernels::DTypeSize(ReducedDType(spec.config));
}

absl::StatusOr<std::unique_ptr<JobSegments>> JobSegments::Create(
    const StateDirectory& directory, const contract::Layout& layout, const JobSpec& spec,
    const std::function<absl::Status(JobSegments*)>& fill) {
  std::unique_ptr<JobSegments> job(new JobSegments());
  const std::string building = directory.NewJobPath(spec.config.name());
  job->Describe(directory, layout, spec);

  absl::StatusOr<uint64_t> free = directory.FreeBytes();
  if (!free.ok()) return free.status();
  if (!spec.sparse && job->plan_.total() > *free) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "job '", spec.config.name(), "' needs ", job->plan_.total(),
        " bytes of the state directory ", directory.path(), ", which has ", *free,
        " free (pages of ", directory.page_bytes(), " bytes); enlarge its tmpfs or delete a job"));
  }
  if (absl::Status status = RemoveJobDirectory(building); !status.ok()) return status;
  if (mkdir(building.c_str(), 0700) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot make ", building));
  }
  const auto make = [&](const char* name, uint64_t bytes, Segment* out,
                        uint64_t resident = ~uint64_t{0}) -> absl::Status {
    absl::StatusOr<Segment> segment =
        Segment::CreateSparse(building + "/" + name, bytes, std::min(bytes, resident));
    if (!segment.ok()) return segment.status();
    *out = *std::move(segment);
    return absl::OkStatus();
  };
  absl::Status status = make("job", job->plan_.job_bytes, &job->job_);
  const uint64_t everything = ~uint64_t{0};
  const uint64_t sums_end =
      ReducedLayout(layout, kernels::DTypeSize(ReducedDType(spec.config))).data;
  if (status.ok()) {
    status = make("state", job->plan_.state_bytes, &job->state_, spec.sparse ? 0 : everything);
  }
  if (status.ok()) {
    status = make("reduced", job->plan_.reduced_bytes, &job->reduced_,
                  spec.sparse ? sums_end : everything);
  }
  if (status.ok()) status = make("weights", job->plan_.weights_bytes, &job->weights_);
  if (status.ok()) {
    job->InitialiseJob(layout, spec);
    if (!spec.sparse) job->InitialiseState(layout);
    job->InitialiseReduced(layout);
    job->InitialiseWeights(layout, spec);
    status = fill(job.get());
    if (status.ok() && rename(building.c_str(), job->path_.c_str()) != 0) {
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
  format_ = StateFormatOf(spec.config);
  shape_ = ShapeOf(spec.config, spec.moments);
  record_bytes_ = contract::ChunkRecordBytes(layout.chunk_elements(), shape_);
  flat_elements_ = layout.flat_elements();
  slots_ = spec.config.slots();
  session_lines_ = WeightsLayout(layout, slots_, 1).session_lines();
  reduced_dtype_ = ReducedDType(spec.config);
  weight_dtype_ = static_cast<kernels::DType>(spec.config.weight_dtype());
  timeline_ = spec.timeline;
  uint64_t frozen = JobLayout(layout, spec).frozen;
  for (const uint64_t bytes : spec.frozen_bytes) {
    frozen_.push_back({frozen, bytes});
    frozen += RoundUpTo(bytes, kLineBytes);
  }
  job_tag_ = contract::Hasher()
                 .Add(std::string(spec.job_id.begin(), spec.job_id.end()))
                 .Add(spec.timeline)
                 .value();
}

void JobSegments::InitialiseJob(const contract::Layout& layout, const JobSpec& spec) {
  const JobOffsets at = JobLayout(layout, spec);
  contract::JobHeader* h = header();
  h->version = format_.plain() ? contract::kFormatVersion : contract::kStateFormatVersion;
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
  for (uint64_t c = 0; c < layout.num_chunks(); ++c) InitialiseChunk(c);
}

void JobSegments::InitialiseChunk(uint64_t chunk_index) const {
  const ChunkView view = chunk(chunk_index);
  contract::ChunkHeader* h = view.header;
  h->magic = contract::kChunkMagic;
  h->version = contract::kFormatVersion;
  h->chunk_elements = chunk_elements_;
  h->job_tag = job_tag_;
  h->timeline = timeline_;
  h->chunk = chunk_index;
  h->crc = Crc32c(h, offsetof(contract::ChunkHeader, applied));
  kernels::ResetUndo(view.undo, timeline_);
}

uint64_t JobSegments::ChunkBytes(uint64_t chunks) const {
  return chunks * (record_bytes_ + chunk_elements_ * kernels::DTypeSize(reduced_dtype_));
}

absl::Status JobSegments::AddChunks(contract::Range chunks, bool fresh) const {
  const size_t gradient = chunk_elements_ * kernels::DTypeSize(reduced_dtype_);
  absl::Status status =
      state_.Populate(chunks.begin * record_bytes_, chunks.size() * record_bytes_);
  if (status.ok()) {
    status = reduced_.Populate(reduced_header()->data_offset + chunks.begin * gradient,
                               chunks.size() * gradient);
  }
  if (!status.ok() || !fresh) return status;
  for (uint64_t c = chunks.begin; c < chunks.end; ++c) {
    std::memset(record(c), 0, record_bytes_);
    InitialiseChunk(c);
  }
  return absl::OkStatus();
}

void JobSegments::FreeChunks(contract::Range chunks) const {
  const size_t gradient = chunk_elements_ * kernels::DTypeSize(reduced_dtype_);
  state_.Punch(chunks.begin * record_bytes_, chunks.size() * record_bytes_);
  reduced_.Punch(reduced_header()->data_offset + chunks.begin * gradient, chunks.size() * gradient);
}

absl::Status JobSegments::CheckChunks(contract::Range chunks) const {
  for (uint64_t c = chunks.begin; c < chunks.end; ++c) {
    const contract::ChunkHeader* h = chunk(c).header;
    if (h->magic != contract::kChunkMagic || h->job_tag != job_tag_ || h->timeline != timeline_ ||
        h->chunk != c || h->crc != Crc32c(h, offsetof(contract::ChunkHeader, applied))) {
      return Damaged(path_ + "/state", absl::StrCat("has a damaged header at chunk ", c));
    }
  }
  return absl::OkStatus();
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
                                             const std::string& name,
                                             const std::vector<contract::Range>* held) {
  return OpenFrom(directory, name, {}, held, [&](const std::string& file) {
    return Segment::Open(directory.JobPath(name) + "/" + file);
  });
}

absl::StatusOr<AdoptedJob> JobSegments::OpenKept(const StateDirectory& directory,
                                                 const std::string& name, KeptSegments kept) {
  std::map<std::string, int> fds;
  for (const auto& [file, fd] : kept) fds[file] = fd.get();
  return OpenFrom(directory, name, std::move(kept), nullptr, [&](const std::string& file) {
    return Segment::Map(fds.at(file), absl::StrCat("segment '", file, "' of job '", name, "'"));
  });
}

absl::StatusOr<AdoptedJob> JobSegments::OpenFrom(
    const StateDirectory& directory, const std::string& name, KeptSegments kept,
    const std::vector<contract::Range>* held,
    const std::function<absl::StatusOr<Segment>(const std::string& file)>& map_file) {
  const std::string path = directory.JobPath(name);
  std::unique_ptr<JobSegments> job(new JobSegments());
  job->kept_ = std::move(kept);
  const auto map = [&](const char* file, Segment* out) -> absl::Status {
    absl::StatusOr<Segment> segment = map_file(file);
    if (!segment.ok()) return segment.status();
    *out = *std::move(segment);
    return absl::OkStatus();
  };
  if (absl::Status status = map("job", &job->job_); !status.ok()) return status;
  const JobImage image(job->job_.data(), job->job_.bytes());
  absl::StatusOr<JobFile> file = ReadJobFile(image, path + "/job");
  if (!file.ok()) return file.status();
  if (absl::Status status = CheckBoot(image, path + "/job"); !status.ok()) return status;
  absl::StatusOr<contract::Layout> layout = LayoutOf(image, &*file, name, path);
  if (!layout.ok()) return layout.status();
  job->Describe(directory, *layout, file->spec);
  absl::Status status = map("state", &job->state_);
  if (status.ok()) status = map("reduced", &job->reduced_);
  if (status.ok()) status = map("weights", &job->weights_);
  if (status.ok()) status = job->CheckSegments(*layout, held);
  if (!status.ok()) return status;
  return AdoptedJob{std::move(job), *std::move(layout), file->spec.config};
}

absl::StatusOr<AdoptedJob> JobSegments::CreateFrom(
    const StateDirectory& directory, const std::string& name, std::span<const std::byte> image,
    const std::function<absl::Status(std::span<std::byte> state, std::span<std::byte> weights)>&
        read_state) {
  const std::string what = absl::StrCat("the job segment of job '", name, "'");
  absl::StatusOr<JobFile> file = ReadJobFile(image, what);
  if (!file.ok()) return file.status();
  absl::StatusOr<contract::Layout> layout = LayoutOf(image, &*file, name, what);
  if (!layout.ok()) return layout.status();
  absl::StatusOr<std::unique_ptr<JobSegments>> made =
      Create(directory, *layout, file->spec, [](auto*) { return absl::OkStatus(); });
  if (!made.ok()) return made.status();
  std::unique_ptr<JobSegments> job = *std::move(made);
  const contract::JobHeader* from = HeaderOf(image);
  contract::JobHeader* to = job->header();
  absl::Status status;
  if (from->table_offset != to->table_offset || from->total_bytes != to->total_bytes ||
      image.size() < to->total_bytes) {
    status = Damaged(what, "has a table that does not fit its parameters");
  }
  if (status.ok()) {
    status = read_state({job->state_.data(), layout->num_chunks() * job->record_bytes_},
                        {job->weights(0), job->weights_image().size()});
  }
  if (status.ok()) status = job->CheckSegments(*layout, nullptr);
  if (!status.ok()) {
    RemoveJobDirectory(job->path_).IgnoreError();
    return status;
  }
  std::memcpy(job->job_.data() + to->table_offset, image.data() + to->table_offset,
              to->total_bytes - to->table_offset);
  to->generation = from->generation.load();
  to->recomputed_steps = from->recomputed_steps.load();
  to->regroups = from->regroups.load();
  to->failed = from->failed.load();
  std::memcpy(to->failure, from->failure, sizeof(to->failure));
  // Last: until now a daemon that dies leaves a job that counts as never uploaded.
  to->initialised.store(1, std::memory_order_release);
  return AdoptedJob{std::move(job), *std::move(layout), file->spec.config};
}

std::span<const std::byte> JobSegments::job_image() const {
  return {job_.data(), header()->total_bytes};
}

std::span<const std::byte> JobSegments::state_image(const contract::Layout& layout) const {
  return {state_.data(), layout.num_chunks() * record_bytes_};
}

std::span<const std::byte> JobSegments::weights_image() const {
  return {weights(0), format_.split() ? flat_elements_ * sizeof(uint16_t) : 0};
}

uint64_t JobSegments::split_elements(uint64_t chunk) const {
  if (!format_.split()) return 0;
  return std::min<uint64_t>(chunk_elements_, flat_elements_ - chunk * chunk_elements_);
}

uint64_t JobSegments::moved_bytes(uint64_t chunk) const {
  return record_bytes_ + split_elements(chunk) * sizeof(uint16_t);
}

uint64_t JobSegments::moved_bytes(contract::Range chunks) const {
  uint64_t bytes = 0;
  for (uint64_t c = chunks.begin; c < chunks.end; ++c) bytes += moved_bytes(c);
  return bytes;
}

void JobSegments::CopyMoved(uint64_t chunk, uint64_t offset, std::span<char> out) const {
  const uint64_t of_record = std::min(out.size(), record_bytes_ - std::min(offset, record_bytes_));
  std::memcpy(out.data(), record(chunk) + offset, of_record);
  if (of_record == out.size()) return;
  std::memcpy(out.data() + of_record,
              weights(chunk * chunk_elements_) + (offset + of_record - record_bytes_),
              out.size() - of_record);
}

void JobSegments::TakeMoved(uint64_t chunk, uint64_t offset, std::span<const char> in) const {
  const uint64_t of_record = std::min(in.size(), record_bytes_ - std::min(offset, record_bytes_));
  std::memcpy(record(chunk) + offset, in.data(), of_record);
  if (of_record == in.size()) return;
  std::memcpy(weights(chunk * chunk_elements_) + (offset + of_record - record_bytes_),
              in.data() + of_record, in.size() - of_record);
}

// Sizes, then headers: each segment is of this job, this timeline and this layout.
absl::Status JobSegments::CheckSegments(const contract::Layout& layout,
                                        const std::vector<contract::Range>* held) const {
  const auto short_of = [&](const Segment& segment, uint64_t bytes) {
    return segment.bytes() < bytes;
  };
  if (header()->job_tag != job_tag_)
    return Damaged(path_ + "/job", "has a tag that is not its own");
  const WeightsOffsets w = WeightsLayout(layout, slots_, kernels::DTypeSize(weight_dtype_));
  const ReducedOffsets r = ReducedLayout(layout, kernels::DTypeSize(reduced_dtype_));
  if (!frozen_.empty() && short_of(job_, frozen_.back().offset + frozen_.back().bytes)) {
    return Damaged(path_ + "/job", "is cut short");
  }
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
  if (held == nullptr) return CheckChunks({0, layout.num_chunks()});
  for (const contract::Range& chunks : *held) {
    if (chunks.end > layout.num_chunks()) return Damaged(path_ + "/peers", "names too many chunks");
    if (absl::Status status = CheckChunks(chunks); !status.ok()) return status;
  }
  return absl::OkStatus();
}

ChunkView JobSegments::chunk(uint64_t index) const {
  std::byte* record = state_.data() + index * record_bytes_;
  ChunkView view;
  view.header = reinterpret_cast<contract::ChunkHeader*>(record);
  static_assert(sizeof(kernels::UndoLog) == contract::kUndoBytes);
  view.undo = reinterpret_cast<kernels::UndoLog*>(record + contract::kUndoOffset);
  view.format = format_;
  view.arrays.master = record + contract::MasterOffset();
  for (int m = 0; m < shape_.moments; ++m) {
    view.arrays.moments[static_cast<size_t>(m)] =
        record + contract::MomentOffset(chunk_elements_, m, shape_);
  }
  if (format_.split()) {
    view.arrays.weights = reinterpret_cast<uint16_t*>(weights(index * chunk_elements_));
  }
  return view;
}

void ChunkView::Read(size_t array, uint64_t begin, uint64_t count, float* out) const {
  const kernels::Isa isa = kernels::BestIsa();
  const kernels::StateArrays from = kernels::Advance(format, arrays, begin);
  if (array == 0) return kernels::ReadMaster(isa, format, from, count, out);
  kernels::ReadMoment(isa, format, from, array - 1, count, out);
}

void ChunkView::Write(size_t array, uint64_t begin, uint64_t count, const float* in) const {
  const kernels::Isa isa = kernels::BestIsa();
  const kernels::StateArrays to = kernels::Advance(format, arrays, begin);
  if (array == 0) return kernels::WriteMaster(isa, format, to, count, in);
  kernels::WriteMoment(isa, format, to, array - 1, count, in);
}

absl::Status JobSegments::CheckFrozen(size_t index, uint64_t offset, uint64_t bytes) const {
  if (index < frozen_.size() && offset <= frozen_[index].bytes &&
      bytes <= frozen_[index].bytes - offset) {
    return absl::OkStatus();
  }
  return absl::OutOfRangeError(absl::StrCat(bytes, " bytes at ", offset, " of frozen parameter ",
                                            index, " of ", frozen_.size()));
}

absl::Status JobSegments::WriteFrozen(size_t index, uint64_t offset,
                                      std::span<const std::byte> data) {
  if (absl::Status s = CheckFrozen(index, offset, data.size()); !s.ok()) return s;
  if (!data.empty()) {
    std::memcpy(job_.at<std::byte>(frozen_[index].offset + offset), data.data(), data.size());
  }
  return absl::OkStatus();
}

absl::Status JobSegments::ReadFrozen(size_t index, uint64_t offset,
                                     std::span<std::byte> out) const {
  if (absl::Status s = CheckFrozen(index, offset, out.size()); !s.ok()) return s;
  if (!out.empty()) {
    std::memcpy(out.data(), job_.at<std::byte>(frozen_[index].offset + offset), out.size());
  }
  return absl::OkStatus();
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
  // A descriptor of its own: one made from the kept one by dup could be written through.
  return Segment::OpenReadOnly(by_descriptor()
                                   ? absl::StrCat("/proc/self/fd/", kept_.at("weights").get())
                                   : path_ + "/weights");
}

}  // namespace shardd::store

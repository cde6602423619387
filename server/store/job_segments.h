// The four segments of one job, and typed views of what lies in them.
#ifndef SHARDD_SERVER_STORE_JOB_SEGMENTS_H_
#define SHARDD_SERVER_STORE_JOB_SEGMENTS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"
#include "kernels/state_format.h"
#include "kernels/undo.h"
#include "proto/contract/layout.h"
#include "proto/contract/segments.h"
#include "proto/control.pb.h"
#include "proto/job_config.pb.h"
#include "server/store/descriptor_store.h"
#include "server/store/segment.h"
#include "server/store/state_directory.h"

namespace shardd::store {

// What a job needs in the state directory, in bytes rounded up to its pages.
struct SegmentPlan {
  uint64_t job_bytes = 0;
  uint64_t state_bytes = 0;
  uint64_t reduced_bytes = 0;
  uint64_t weights_bytes = 0;
  uint64_t total() const { return job_bytes + state_bytes + reduced_bytes + weights_bytes; }
};

// What a job is made of. `parameters` is the serialized list as the client sent it.
struct JobSpec {
  v1::JobConfig config;    // complete: no field left at "default"
  std::string parameters;  // serialized OpenRequest with `parameters` only
  uint64_t config_hash = 0;
  uint32_t uid = 0;
  int moments = 2;
  std::vector<uint64_t> frozen_bytes;  // of each parameter that is not trained
  std::array<uint8_t, 16> job_id{};
  uint64_t timeline = 0;
  // Hold no chunk at first (AddChunks): of a job that several daemons may share.
  bool sparse = false;
};

// Bytes of each of the request's frozen parameters. InvalidArgument names one whose shape or
// dtype is none.
absl::StatusOr<std::vector<uint64_t>> FrozenBytes(const v1::OpenRequest& request);

// The dtype in which the reduced gradient is kept.
kernels::DType ReducedDType(const v1::JobConfig& config);

// How the state of a job lies in memory.
kernels::StateFormat StateFormatOf(const v1::JobConfig& config);

// What that takes in a chunk record.
contract::StateShape ShapeOf(const v1::JobConfig& config, int moments);

SegmentPlan PlanSegments(const contract::Layout& layout, const JobSpec& spec, uint64_t page_bytes);

// What one chunk takes in the state and the reduced segment.
uint64_t ChunkBytes(const contract::Layout& layout, const JobSpec& spec);

// A chunk within the state segment; of a split master the working weights are part of it.
struct ChunkView {
  contract::ChunkHeader* header = nullptr;
  kernels::UndoLog* undo = nullptr;
  kernels::StateFormat format;
  kernels::StateArrays arrays;

  // fp32 values of elements [begin, begin + count) of one array: 0 is the master, 1 and up are the
  // moments. What is written is rounded to the format; writing what was read changes no bit.
  void Read(size_t array, uint64_t begin, uint64_t count, float* out) const;
  void Write(size_t array, uint64_t begin, uint64_t count, const float* in) const;
  bool has_moment(size_t moment) const {
    return moment < arrays.moments.size() && arrays.moments[moment] != nullptr;
  }
};

class JobSegments;

// What a job segment, or a copy of one, says of its job.
struct JobDescription {
  JobSpec spec;
  contract::Layout layout;
};

// Reads and checks the header, configuration and parameters in `image`. DataLoss: damaged.
// FailedPrecondition: of another format version, or with an optimizer that is not there. Whether
// it is of this boot is the caller's to see. `path` is for messages.
absl::StatusOr<JobDescription> ReadJobImage(std::span<const std::byte> image,
                                            const std::string& path);

// What an earlier daemon left of a job.
struct AdoptedJob {
  std::unique_ptr<JobSegments> segments;
  contract::Layout layout;
  v1::JobConfig config;
};

// Owned by one job; the mappings live as long as the object.
class JobSegments {
 public:
  // Builds all segments under a temporary name, resident and initialised, and renames them into
  // place. On failure nothing is left. ResourceExhausted says what is needed and what is free.
  // `fill` may give them a state before anybody sees them; its error is returned.
  static absl::StatusOr<std::unique_ptr<JobSegments>> Create(
      const StateDirectory& directory, const contract::Layout& layout, const JobSpec& spec,
      const std::function<absl::Status(JobSegments*)>& fill);

  // Maps the segments of a job that an earlier daemon left, after checking that they belong
  // together, to this boot and to this version. DataLoss or FailedPrecondition says what does
  // not fit, OutOfRange that they are of an earlier boot; nothing is changed or removed.
  // `held`: the chunks that are there, of a job that several daemons share; null: all.
  static absl::StatusOr<AdoptedJob> Open(const StateDirectory& directory, const std::string& name,
                                         const std::vector<contract::Range>* held = nullptr);
  // The same of a job whose files are gone from the directory and whose segments live by these
  // descriptors, which it keeps.
  static absl::StatusOr<AdoptedJob> OpenKept(const StateDirectory& directory,
                                             const std::string& name, KeptSegments kept);

  // Builds segments with the contents of a job segment that lay elsewhere, of a state segment, and
  // of weights_image, which `read_state` fills in. The job counts as initialised only when all of
  // it is there; on failure nothing is left. DataLoss: the image or the state are not what they
  // should be.
  static absl::StatusOr<AdoptedJob> CreateFrom(
      const StateDirectory& directory, const std::string& name, std::span<const std::byte> image,
      const std::function<absl::Status(std::span<std::byte> state, std::span<std::byte> weights)>&
          read_state);

  // The used bytes of the job and the state segment: what CreateFrom takes.
  std::span<const std::byte> job_image() const;
  std::span<const std::byte> state_image(const contract::Layout& layout) const;
  // The working weights where they are state, else nothing.
  std::span<const std::byte> weights_image() const;

  // Of a sparse job. Makes room for chunks [begin, end); with `fresh` they are zero and of no step
  // yet, else their records are to be written as they come. ResourceExhausted: no room.
  absl::Status AddChunks(contract::Range chunks, bool fresh) const;
  // NotFound or DataLoss unless these chunks are there whole, as far as their headers tell.
  absl::Status CheckChunks(contract::Range chunks) const;
  // Gives the memory of chunks back.
  void FreeChunks(contract::Range chunks) const;
  // What chunks take in the state and the reduced segment.
  uint64_t ChunkBytes(uint64_t chunks) const;
  // Of one chunk in the state segment.
  size_t record_bytes() const { return record_bytes_; }
  // All of a chunk's state as it lies in memory, for another daemon: its record, then its working
  // weights where they are state. [offset, offset + size) must be inside of moved_bytes.
  uint64_t moved_bytes(uint64_t chunk) const;
  uint64_t moved_bytes(contract::Range chunks) const;
  void CopyMoved(uint64_t chunk, uint64_t offset, std::span<char> out) const;
  void TakeMoved(uint64_t chunk, uint64_t offset, std::span<const char> in) const;

  contract::JobHeader* header() const { return job_.at<contract::JobHeader>(0); }
  const Segment& job() const { return job_; }
  ChunkView chunk(uint64_t index) const;

  contract::ReducedHeader* reduced_header() const {
    return reduced_.at<contract::ReducedHeader>(0);
  }
  contract::ReducedLine* reduced_line(uint64_t bucket) const;
  double* sums() const;
  // The reduced gradient from element `begin` on.
  std::byte* reduced(uint64_t begin) const;
  kernels::DType reduced_dtype() const { return reduced_dtype_; }

  contract::Board* board() const { return weights_.at<contract::Board>(contract::kSegmentPage); }
  contract::BucketLine* bucket_line(uint64_t bucket) const;
  contract::SessionLine* session_line(uint32_t index) const;
  uint32_t session_lines() const { return session_lines_; }
  // The working weights from element `begin` on.
  std::byte* weights(uint64_t begin) const;
  kernels::DType weight_dtype() const { return weight_dtype_; }
  const kernels::StateFormat& state_format() const { return format_; }
  uint64_t weights_bytes() const { return weights_.bytes(); }
  absl::StatusOr<contract::UniqueFd> OpenWeights() const;

  // Frozen parameters, in the job segment: `data` is [offset, offset + data.size()) of parameter
  // `index`. OutOfRange: not inside of it.
  size_t num_frozen() const { return frozen_.size(); }
  uint64_t frozen_bytes(size_t index) const { return frozen_[index].bytes; }
  absl::Status WriteFrozen(size_t index, uint64_t offset, std::span<const std::byte> data);
  absl::Status ReadFrozen(size_t index, uint64_t offset, std::span<std::byte> out) const;

  const SegmentPlan& plan() const { return plan_; }
  const std::string& path() const { return path_; }
  // Not in the state directory.
  bool by_descriptor() const { return !kept_.empty(); }
  uint64_t job_tag() const { return job_tag_; }
  uint64_t timeline() const { return timeline_; }

 private:
  JobSegments() = default;
  std::byte* record(uint64_t chunk) const { return state_.data() + chunk * record_bytes_; }
  // Elements of a chunk whose working weights are state; else 0.
  uint64_t split_elements(uint64_t chunk) const;
  void Describe(const StateDirectory& directory, const contract::Layout& layout,
                const JobSpec& spec);
  absl::Status CheckSegments(const contract::Layout& layout,
                             const std::vector<contract::Range>* held) const;
  void InitialiseChunk(uint64_t chunk) const;
  void InitialiseJob(const contract::Layout& layout, const JobSpec& spec);
  void InitialiseState(const contract::Layout& layout);
  void InitialiseReduced(const contract::Layout& layout);
  void InitialiseWeights(const contract::Layout& layout, const JobSpec& spec);

  static absl::StatusOr<AdoptedJob> OpenFrom(
      const StateDirectory& directory, const std::string& name, KeptSegments kept,
      const std::vector<contract::Range>* held,
      const std::function<absl::StatusOr<Segment>(const std::string& file)>& map_file);

  std::string path_;
  KeptSegments kept_;
  SegmentPlan plan_;
  Segment job_, state_, reduced_, weights_;
  uint32_t chunk_elements_ = 0;
  kernels::StateFormat format_;
  contract::StateShape shape_;
  size_t record_bytes_ = 0;
  uint64_t flat_elements_ = 0;
  uint32_t slots_ = 0;
  uint32_t session_lines_ = 0;
  kernels::DType reduced_dtype_ = kernels::DType::kFloat32;
  kernels::DType weight_dtype_ = kernels::DType::kFloat32;
  uint64_t job_tag_ = 0;
  uint64_t timeline_ = 0;
  struct Frozen {
    uint64_t offset = 0;  // in the job segment
    uint64_t bytes = 0;
  };
  absl::Status CheckFrozen(size_t index, uint64_t offset, uint64_t bytes) const;
  std::vector<Frozen> frozen_;
};

// Bytes of one decision slot: header, presence bits, groups, the largest blob; whole pages.
uint64_t DecisionSlotBytes(uint64_t parameters, uint64_t groups);

}  // namespace shardd::store

#endif  // SHARDD_SERVER_STORE_JOB_SEGMENTS_H_

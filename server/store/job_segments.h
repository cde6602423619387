// The four segments of one job, and typed views of what lies in them.
#ifndef SHARDD_SERVER_STORE_JOB_SEGMENTS_H_
#define SHARDD_SERVER_STORE_JOB_SEGMENTS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"
#include "kernels/undo.h"
#include "proto/contract/layout.h"
#include "proto/contract/segments.h"
#include "proto/job_config.pb.h"
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
  std::array<uint8_t, 16> job_id{};
  uint64_t timeline = 0;
};

// The dtype in which the reduced gradient is kept.
kernels::DType ReducedDType(const v1::JobConfig& config);

SegmentPlan PlanSegments(const contract::Layout& layout, const JobSpec& spec, uint64_t page_bytes);

// A chunk's arrays within the state segment.
struct ChunkView {
  contract::ChunkHeader* header = nullptr;
  kernels::UndoLog* undo = nullptr;
  float* master = nullptr;
  std::array<float*, 2> moment = {nullptr, nullptr};
};

class JobSegments;

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
  static absl::StatusOr<std::unique_ptr<JobSegments>> Create(
      const StateDirectory& directory, const contract::Layout& layout, const JobSpec& spec,
      const std::function<void()>& before_rename);

  // Maps the segments of a job that an earlier daemon left, after checking that they belong
  // together, to this boot and to this version. DataLoss or FailedPrecondition says what does
  // not fit; nothing is changed or removed.
  static absl::StatusOr<AdoptedJob> Open(const StateDirectory& directory, const std::string& name);

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
  uint64_t weights_bytes() const { return weights_.bytes(); }
  absl::StatusOr<contract::UniqueFd> OpenWeights() const;

  const SegmentPlan& plan() const { return plan_; }
  const std::string& path() const { return path_; }
  uint64_t job_tag() const { return job_tag_; }
  uint64_t timeline() const { return timeline_; }

 private:
  JobSegments() = default;
  void Describe(const StateDirectory& directory, const contract::Layout& layout,
                const JobSpec& spec);
  absl::Status CheckSegments(const contract::Layout& layout) const;
  void InitialiseJob(const contract::Layout& layout, const JobSpec& spec);
  void InitialiseState(const contract::Layout& layout);
  void InitialiseReduced(const contract::Layout& layout);
  void InitialiseWeights(const contract::Layout& layout, const JobSpec& spec);

  std::string path_;
  SegmentPlan plan_;
  Segment job_, state_, reduced_, weights_;
  uint32_t chunk_elements_ = 0;
  int moments_ = 0;
  size_t record_bytes_ = 0;
  uint32_t slots_ = 0;
  uint32_t session_lines_ = 0;
  kernels::DType reduced_dtype_ = kernels::DType::kFloat32;
  kernels::DType weight_dtype_ = kernels::DType::kFloat32;
  uint64_t job_tag_ = 0;
  uint64_t timeline_ = 0;
};

// Bytes of one decision slot: header, presence bits, groups, the largest blob; whole pages.
uint64_t DecisionSlotBytes(uint64_t parameters, uint64_t groups);

}  // namespace shardd::store

#endif  // SHARDD_SERVER_STORE_JOB_SEGMENTS_H_

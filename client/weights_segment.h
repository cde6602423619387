// The weights segment as a worker sees it (docs/formats/segments.md): board, ready
// steps, session lines and weights, all read-only.
#ifndef SHARDD_CLIENT_WEIGHTS_SEGMENT_H_
#define SHARDD_CLIENT_WEIGHTS_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/memory_file.h"
#include "kernels/dtype.h"
#include "proto/contract/layout.h"
#include "proto/contract/segments.h"

namespace shardd {

// The fields of the board that describe the newest decision, read as one.
struct BoardDecision {
  uint64_t committed_step = 0;
  uint64_t applied = 0;
  uint32_t result = 0;  // shardd.v1.StepResult
  double loss = 0;
  double grad_norm = 0;
  double loss_scale = 1;
  std::string skip_reason;
  std::vector<double> lr;  // [kBoardGroups]
};

// Thread-safe.
class WeightsSegment {
 public:
  struct Expected {
    uint64_t bytes = 0;
    uint64_t job_tag = 0;
    uint64_t timeline = 0;
    uint32_t session_line = 0;
    kernels::DType weight_dtype = kernels::DType::kBFloat16;
  };
  // FailedPrecondition: the header is not what Open announced and `layout` demands.
  static absl::StatusOr<std::unique_ptr<WeightsSegment>> Map(contract::UniqueFd fd,
                                                             const contract::Layout& layout,
                                                             const Expected& expected);

  const contract::Board& board() const {
    return *reinterpret_cast<const contract::Board*>(mapping_.data() + contract::kSegmentPage);
  }
  const contract::SessionLine& line() const { return *line_; }  // of this session
  uint64_t ready_step(uint64_t bucket) const {
    return bucket_lines_[bucket].ready_step.load(std::memory_order_acquire);
  }
  const std::byte* weights() const { return weights_; }  // [flat_elements] of weight_dtype

  // nullopt: the daemon is writing it. Or died while it did: so do not spin on this.
  std::optional<BoardDecision> ReadDecision() const;
  // Board::failure, for a board in state kFailed.
  std::string Failure() const;

 private:
  WeightsSegment() = default;

  ReadOnlyMapping mapping_;
  const contract::BucketLine* bucket_lines_ = nullptr;
  const contract::SessionLine* line_ = nullptr;
  const std::byte* weights_ = nullptr;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_WEIGHTS_SEGMENT_H_

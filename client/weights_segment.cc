#include "client/weights_segment.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd {

namespace {

// Text that the daemon may be writing: byte by byte, each an atomic load.
template <size_t N>
std::string ReadText(const char (&text)[N]) {
  std::string out;
  for (size_t i = 0; i < N; ++i) {
    const char c = __atomic_load_n(&text[i], __ATOMIC_RELAXED);
    if (c == '\0') break;
    out.push_back(c);
  }
  return out;
}

// [offset, offset + count * size) lies within `total`.
bool Inside(uint64_t offset, uint64_t count, uint64_t size, uint64_t total) {
  return offset <= total && count <= (total - offset) / size;
}

absl::Status CheckHeader(const contract::WeightsHeader& header, const contract::Layout& layout,
                         const WeightsSegment::Expected& expected) {
  const auto wrong = [](const std::string& what) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon's weights segment has another ", what,
                     " than its answer to Open; daemon and client are of different versions"));
  };
  if (header.magic != contract::kWeightsMagic || header.version != contract::kFormatVersion) {
    return wrong("format");
  }
  if (header.weight_dtype != static_cast<uint32_t>(expected.weight_dtype)) return wrong("dtype");
  if (header.job_tag != expected.job_tag || header.timeline != expected.timeline) {
    return wrong("job");
  }
  if (header.layout_hash != layout.hash() || header.flat_elements != layout.flat_elements() ||
      header.buckets != layout.num_buckets()) {
    return wrong("layout");
  }
  const size_t element = kernels::DTypeSize(expected.weight_dtype);
  if (header.total_bytes > expected.bytes || expected.session_line >= header.session_lines ||
      header.bucket_lines_offset % contract::kLineBytes != 0 ||
      header.session_lines_offset % contract::kLineBytes != 0 ||
      header.weights_offset % contract::kSegmentPage != 0 ||
      !Inside(header.bucket_lines_offset, header.buckets, contract::kLineBytes, expected.bytes) ||
      !Inside(header.session_lines_offset, header.session_lines, contract::kLineBytes,
              expected.bytes) ||
      !Inside(header.weights_offset, header.flat_elements, element, expected.bytes)) {
    return wrong("size");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<WeightsSegment>> WeightsSegment::Map(contract::UniqueFd fd,
                                                                    const contract::Layout& layout,
                                                                    const Expected& expected) {
  if (expected.bytes < 2 * contract::kSegmentPage) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon announced a weights segment of ", expected.bytes, " bytes"));
  }
  absl::StatusOr<ReadOnlyMapping> mapping =
      ReadOnlyMapping::Map(std::move(fd), expected.bytes, "the weights segment");
  if (!mapping.ok()) return mapping.status();
  contract::WeightsHeader header;
  std::memcpy(&header, mapping->data(), sizeof(header));
  absl::Status status = CheckHeader(header, layout, expected);
  if (!status.ok()) return status;

  std::unique_ptr<WeightsSegment> segment(new WeightsSegment());
  segment->mapping_ = *std::move(mapping);
  const std::byte* base = segment->mapping_.data();
  segment->bucket_lines_ =
      reinterpret_cast<const contract::BucketLine*>(base + header.bucket_lines_offset);
  segment->line_ =
      reinterpret_cast<const contract::SessionLine*>(base + header.session_lines_offset) +
      expected.session_line;
  segment->weights_ = base + header.weights_offset;
  return segment;
}

std::optional<BoardDecision> WeightsSegment::ReadDecision() const {
  const contract::Board& board = this->board();
  BoardDecision decision;
  const uint64_t before = board.decision_seq.load(std::memory_order_acquire);
  decision.committed_step = board.committed_step.load(std::memory_order_relaxed);
  decision.applied = board.applied.load(std::memory_order_relaxed);
  decision.result = board.result.load(std::memory_order_relaxed);
  decision.loss = board.loss.load(std::memory_order_relaxed);
  decision.grad_norm = board.grad_norm.load(std::memory_order_relaxed);
  decision.loss_scale = board.loss_scale.load(std::memory_order_relaxed);
  decision.skip_reason = ReadText(board.skip_reason);
  for (const std::atomic<double>& lr : board.lr) {
    decision.lr.push_back(lr.load(std::memory_order_relaxed));
  }
  // The loads above may not move below the second look at the sequence.
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t after = board.decision_seq.load(std::memory_order_relaxed);
  if (before != after || before % 2 != 0) return std::nullopt;
  return decision;
}

std::string WeightsSegment::Failure() const { return ReadText(board().failure); }

}  // namespace shardd

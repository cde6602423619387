#include "client/bucket_publisher.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/contract/segments.h"

namespace shardd {

namespace {

using contract::Range;
using contract::Run;

uint64_t BytesPerElement(const GradStaging& staging) {
  uint64_t bytes = 0;
  for (size_t node = 0; node < staging.plan().nodes.size(); ++node) {
    bytes += staging.node_element_bytes(node);
  }
  return bytes;
}

}  // namespace

BucketPublisher::BucketPublisher(const Options& options)
    : layout_(*options.layout),
      staging_(*options.staging),
      ring_(*options.ring),
      peer_(options.peer),
      grad_dtype_(options.grad_dtype),
      job_tag_(options.job_tag),
      discard_published_(options.discard_published),
      single_leaf_(staging_.plan().run.size() == 1),
      parameters_(layout_.num_parameters()),
      parameters_in_bucket_(layout_.num_buckets()) {
  for (size_t p = 0; p < layout_.num_parameters(); ++p) {
    const Range range = layout_.parameter_range(p);
    if (range.empty()) continue;
    const uint64_t last = layout_.bucket_of(range.begin);
    for (uint64_t b = layout_.bucket_of(range.end - 1); b <= last; ++b) ++parameters_in_bucket_[b];
  }
}

uint64_t BucketPublisher::LargestBlock(const contract::Layout& layout, const GradStaging& staging) {
  return layout.max_bucket_elements() * BytesPerElement(staging);
}

uint32_t BucketPublisher::DescriptorsPerBucket(const GradStaging& staging) {
  return static_cast<uint32_t>(staging.plan().nodes.size());
}

// Every node's part is a multiple of 64 bytes: buckets end at multiples of 32 elements.
uint64_t BucketPublisher::BlockBytes(uint64_t bucket) const {
  return layout_.bucket_range(bucket).size() * BytesPerElement(staging_);
}

void BucketPublisher::Begin(uint64_t generation, uint64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  ring_.Cancel();
  staging_.Reset();
  std::fill(parameters_.begin(), parameters_.end(), Parameter());
  waiting_for_ = parameters_in_bucket_;
  turn_ = 0;
  generation_ = generation;
  step_ = step;
}

absl::StatusOr<void*> BucketPublisher::Acquire(size_t parameter, uint32_t slot) {
  Parameter& state = parameters_[parameter];
  if (slot < staging_.next_slot(parameter)) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot acquire the gradient of '", Name(parameter), "' in slot ", slot,
                     ": that slot or a later one of it is complete in this step; slots come in "
                     "ascending order, each once"));
  }
  if (state.acquired && state.slot == slot && state.in_ring) {
    return static_cast<void*>(*AcquireInRing(parameter));
  }
  state.acquired = true;
  state.slot = slot;
  if (single_leaf_ && !layout_.parameter_range(parameter).empty()) {
    absl::StatusOr<std::byte*> buffer = AcquireInRing(parameter);
    if (buffer.ok()) {
      state.in_ring = true;
      return static_cast<void*>(*buffer);
    }
  }
  return static_cast<void*>(staging_.Leaf(parameter, slot));
}

// Only a parameter that lies wholly in the bucket whose turn it is, and only if there
// is room now: waiting is for ReadyGrad.
absl::StatusOr<std::byte*> BucketPublisher::AcquireInRing(size_t parameter) {
  const Range range = layout_.parameter_range(parameter);
  std::lock_guard<std::mutex> lock(mutex_);
  if (layout_.bucket_of(range.begin) != turn_ || layout_.bucket_of(range.end - 1) != turn_ ||
      (!ring_.reserved() && !TryReserve())) {
    return absl::UnavailableError("not in the ring");
  }
  return ring_.block() +
         (range.begin - layout_.bucket_range(turn_).begin) * kernels::DTypeSize(grad_dtype_);
}

bool BucketPublisher::TryReserve() {
  return ring_.TryReserve(BlockBytes(turn_), DescriptorsPerBucket(staging_), peer_.released());
}

absl::Status BucketPublisher::Ready(size_t parameter, uint32_t slot) {
  Parameter& state = parameters_[parameter];
  if (!state.acquired || state.slot != slot) {
    return absl::FailedPreconditionError(absl::StrCat("the gradient of '", Name(parameter),
                                                      "' in slot ", slot,
                                                      " is ready but was not acquired"));
  }
  state.acquired = false;
  state.given = true;
  staging_.Complete(parameter, slot);
  if (slot + 1 != staging_.plan().run.hi) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  Count(parameter);
  return PublishReady();
}

void BucketPublisher::Count(size_t parameter) {
  Parameter& state = parameters_[parameter];
  if (state.counted) return;
  state.counted = true;
  const Range range = layout_.parameter_range(parameter);
  if (range.empty()) return;
  const uint64_t last = layout_.bucket_of(range.begin);
  for (uint64_t b = layout_.bucket_of(range.end - 1); b <= last; ++b) --waiting_for_[b];
}

absl::Status BucketPublisher::PublishReady() {
  while (turn_ < layout_.num_buckets() && waiting_for_[turn_] == 0) {
    absl::Status status = PublishOne();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status BucketPublisher::PublishOne() {
  if (!ring_.reserved() && !TryReserve()) {
    absl::Status status = peer_.wait([this] { return TryReserve(); });
    if (!status.ok()) return status;
  }
  FillBlock(turn_);
  const Range range = layout_.bucket_range(turn_);
  std::vector<contract::Descriptor> descriptors;
  uint64_t offset = 0;
  for (size_t node = 0; node < staging_.plan().nodes.size(); ++node) {
    const SlotPlan::Node& step = staging_.plan().nodes[node];
    contract::Descriptor descriptor{};
    descriptor.job_tag = job_tag_;
    descriptor.generation = generation_;
    descriptor.step = step_;
    descriptor.begin = range.begin;
    descriptor.count = range.size();
    descriptor.data_offset = offset;
    descriptor.slot_lo = step.range.lo;
    descriptor.slot_hi = step.range.hi;
    descriptor.bucket = static_cast<uint32_t>(turn_);
    descriptor.kind = static_cast<uint8_t>(contract::DescriptorKind::kGrad);
    descriptor.dtype = static_cast<uint8_t>(step.leaf() ? grad_dtype_ : kernels::DType::kFloat32);
    descriptors.push_back(descriptor);
    offset += range.size() * staging_.node_element_bytes(node);
  }
  ring_.Publish(descriptors);
  if (discard_published_) staging_.Discard(range);
  ++turn_;
  peer_.doorbell();
  return absl::OkStatus();
}

void BucketPublisher::FillBlock(uint64_t bucket) {
  const Range range = layout_.bucket_range(bucket);
  const std::vector<Run> runs = layout_.runs(range);
  std::byte* out = ring_.block();
  for (size_t node = 0; node < staging_.plan().nodes.size(); ++node) {
    FillNode(node, range, runs, out);
    out += range.size() * staging_.node_element_bytes(node);
  }
}

void BucketPublisher::FillNode(size_t node, Range range, const std::vector<Run>& runs,
                               std::byte* out) {
  const size_t element = staging_.node_element_bytes(node);
  const auto at = [&](uint64_t begin) { return out + (begin - range.begin) * element; };
  // Runs with the padding behind them tile the bucket but for what is before the
  // first. Neighbours that come from staging are copied as one: padding there is zero.
  uint64_t staged = range.begin;  // everything below is written
  const auto copy_until = [&](uint64_t end) {
    if (staged < end) staging_.Fill(node, {staged, end}, at(staged));
    staged = end;
  };
  for (size_t i = 0; i < runs.size(); ++i) {
    const Parameter& state = parameters_[runs[i].parameter];
    const uint64_t next = i + 1 < runs.size() ? runs[i + 1].range.begin : range.end;
    if (state.given && !state.in_ring) continue;
    copy_until(runs[i].range.begin);
    const uint64_t zeros = state.given ? runs[i].range.end : runs[i].range.begin;
    std::memset(at(zeros), 0, (next - zeros) * element);
    staged = next;
  }
  copy_until(range.end);
}

absl::Status BucketPublisher::Finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].counted) continue;
    // Given in some slot but not in the last; else nothing of it is read.
    if (parameters_[p].given) staging_.CompleteRest(p);
    Count(p);
  }
  return PublishReady();
}

}  // namespace shardd

#include "client/weights_view.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/memory_file.h"
#include "proto/contract/segments.h"

namespace shardd {

namespace {

using contract::Layout;
using contract::Range;

constexpr uint64_t kPage = contract::kSegmentPage;
constexpr uint64_t kNoStep = UINT64_MAX;

// Buckets first .. end-1 hold a parameter.
struct Buckets {
  uint64_t first = 0;
  uint64_t end = 0;
};
Buckets BucketsOf(const Layout& layout, size_t parameter) {
  const Range range = layout.parameter_range(parameter);
  if (range.empty()) return {};
  return {layout.bucket_of(range.end - 1), layout.bucket_of(range.begin) + 1};
}

// What all views know: where things lie and how to wait.
class View : public WeightsView {
 protected:
  View(const Layout& layout, WeightsSource source)
      : layout_(layout), source_(std::move(source)), element_(kernels::DTypeSize(source_.dtype)) {}

  absl::Status WaitReady(size_t parameter, uint64_t step) {
    const Buckets buckets = BucketsOf(layout_, parameter);
    uint64_t next = buckets.first;
    const auto ready = [&] {
      while (next < buckets.end && source_.ready_step(next) >= step) ++next;
      return next == buckets.end;
    };
    return ready() ? absl::OkStatus() : source_.wait(ready);
  }

  const Layout& layout_;
  WeightsSource source_;
  const size_t element_;
};

class SharedWeights : public View {
 public:
  SharedWeights(const Layout& layout, WeightsSource source) : View(layout, std::move(source)) {}

  absl::StatusOr<const void*> Wait(size_t parameter, uint64_t step) override {
    absl::Status status = WaitReady(parameter, step);
    if (!status.ok()) return status;
    return source_.weights + layout_.parameter_range(parameter).begin * element_;
  }
  absl::Status Gather(std::span<const size_t> parameters, uint64_t step) override {
    for (size_t parameter : parameters) {
      absl::Status status = WaitReady(parameter, step);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  void Release(std::span<const size_t> /*parameters*/) override {}
  void Rebase(const std::byte* weights) override { source_.weights = weights; }
};

// A full copy, refreshed bucket by bucket as its parameters are asked for.
class PrivateWeights : public View {
 public:
  PrivateWeights(const Layout& layout, WeightsSource source, MemoryFile memory)
      : View(layout, std::move(source)),
        memory_(std::move(memory)),
        step_of_(layout.num_buckets(), kNoStep) {}

  absl::StatusOr<const void*> Wait(size_t parameter, uint64_t step) override {
    absl::Status status = WaitReady(parameter, step);
    if (!status.ok()) return status;
    const Buckets buckets = BucketsOf(layout_, parameter);
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t bucket = buckets.first; bucket < buckets.end; ++bucket) {
      if (step_of_[bucket] == step) continue;
      const Range range = layout_.bucket_range(bucket);
      std::memcpy(memory_.data() + range.begin * element_, source_.weights + range.begin * element_,
                  range.size() * element_);
      step_of_[bucket] = step;
    }
    return memory_.data() + layout_.parameter_range(parameter).begin * element_;
  }
  absl::Status Gather(std::span<const size_t> parameters, uint64_t step) override {
    for (size_t parameter : parameters) {
      absl::Status status = Wait(parameter, step).status();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  void Release(std::span<const size_t> /*parameters*/) override {}
  void Rebase(const std::byte* weights) override {
    source_.weights = weights;
    std::fill(step_of_.begin(), step_of_.end(), kNoStep);
  }

 private:
  MemoryFile memory_;
  std::mutex mutex_;
  std::vector<uint64_t> step_of_;  // [buckets] that was copied last
};

// The flat space as addresses, of which only the own shard and what is gathered have
// memory. A page goes back when the last parameter in it is released.
class ShardedWeights : public View {
 public:
  ShardedWeights(const Layout& layout, WeightsSource source, MemoryFile memory, Range shard)
      : View(layout, std::move(source)),
        memory_(std::move(memory)),
        holders_(memory_.size() / kPage, 0),
        step_of_(layout.num_parameters(), kNoStep),
        gathered_(layout.num_parameters(), false) {
    Hold(shard, 1);
  }

  absl::StatusOr<const void*> Wait(size_t parameter, uint64_t step) override {
    if (!gathered_[parameter]) {
      return absl::FailedPreconditionError(
          absl::StrCat("the weights of '", layout_.parameter(parameter).name,
                       "' are not gathered; at stage 3 with private weights call Gather first"));
    }
    absl::Status status = Refresh(parameter, step);
    if (!status.ok()) return status;
    return memory_.data() + layout_.parameter_range(parameter).begin * element_;
  }

  absl::Status Gather(std::span<const size_t> parameters, uint64_t step) override {
    for (size_t parameter : parameters) {
      absl::Status status = WaitReady(parameter, step);
      if (!status.ok()) return status;
      if (!gathered_[parameter]) {
        gathered_[parameter] = true;
        step_of_[parameter] = kNoStep;
        Hold(layout_.parameter_range(parameter), 1);
      }
      status = Refresh(parameter, step);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  void Release(std::span<const size_t> parameters) override {
    for (size_t parameter : parameters) {
      if (!gathered_[parameter]) continue;
      gathered_[parameter] = false;
      Hold(layout_.parameter_range(parameter), -1);
    }
  }

  void Rebase(const std::byte* weights) override {
    source_.weights = weights;
    std::fill(step_of_.begin(), step_of_.end(), kNoStep);
  }

 private:
  absl::Status Refresh(size_t parameter, uint64_t step) {
    absl::Status status = WaitReady(parameter, step);
    if (!status.ok()) return status;
    if (step_of_[parameter] == step) return absl::OkStatus();
    const Range range = layout_.parameter_range(parameter);
    std::memcpy(memory_.data() + range.begin * element_, source_.weights + range.begin * element_,
                range.size() * element_);
    step_of_[parameter] = step;
    return absl::OkStatus();
  }

  // Counts one holder more or less of the pages that elements `range` lie in.
  void Hold(Range range, int change) {
    if (range.empty()) return;
    const uint64_t end = (range.end * element_ + kPage - 1) / kPage;
    uint64_t free_from = end;
    for (uint64_t page = range.begin * element_ / kPage; page < end; ++page) {
      holders_[page] += change;
      if (holders_[page] == 0) {
        free_from = std::min(free_from, page);
      } else {
        memory_.Discard(free_from * kPage, page * kPage);
        free_from = end;
      }
    }
    memory_.Discard(free_from * kPage, end * kPage);
  }

  MemoryFile memory_;
  std::vector<int32_t> holders_;   // [pages] parameters that are gathered, and the shard
  std::vector<uint64_t> step_of_;  // [parameters] that was copied last
  std::vector<bool> gathered_;     // [parameters]
};

absl::StatusOr<MemoryFile> WeightsMemory(const Layout& layout, const WeightsSource& source) {
  return MemoryFile::Create("shardd-weights",
                            layout.flat_elements() * kernels::DTypeSize(source.dtype),
                            /*sealed=*/false);
}

}  // namespace

std::unique_ptr<WeightsView> MakeSharedWeights(const Layout& layout, WeightsSource source) {
  return std::make_unique<SharedWeights>(layout, std::move(source));
}

absl::StatusOr<std::unique_ptr<WeightsView>> MakePrivateWeights(const Layout& layout,
                                                                WeightsSource source) {
  absl::StatusOr<MemoryFile> memory = WeightsMemory(layout, source);
  if (!memory.ok()) return memory.status();
  return std::make_unique<PrivateWeights>(layout, std::move(source), *std::move(memory));
}

absl::StatusOr<std::unique_ptr<WeightsView>> MakeShardedWeights(const Layout& layout,
                                                                WeightsSource source, Range shard) {
  absl::StatusOr<MemoryFile> memory = WeightsMemory(layout, source);
  if (!memory.ok()) return memory.status();
  return std::make_unique<ShardedWeights>(layout, std::move(source), *std::move(memory), shard);
}

}  // namespace shardd

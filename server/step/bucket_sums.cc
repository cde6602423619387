#include "server/step/bucket_sums.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/env/fault_guard.h"

namespace shardd::step {

using kernels::kBlockElements;

BucketSums::BucketSums(const contract::Layout* layout, store::JobSegments* segments, uint32_t slots,
                       kernels::Isa isa, env::ThreadPool* pool)
    : layout_(layout),
      segments_(segments),
      slots_(slots),
      isa_(isa),
      pool_(pool),
      buckets_(layout->num_buckets()) {
  SetOwned({{0, layout->flat_elements()}});
}

void BucketSums::SetOwned(const std::vector<contract::Range>& owned) {
  to_fold_ = 0;
  for (uint64_t b = 0; b < buckets_.size(); ++b) {
    const contract::Range bucket = layout_->bucket_range(b);
    buckets_[b].owned.clear();
    for (const contract::Range& range : owned) {
      const contract::Range part{std::max(bucket.begin, range.begin),
                                 std::min(bucket.end, range.end)};
      if (part.begin < part.end) buckets_[b].owned.push_back(part);
    }
    if (!buckets_[b].owned.empty()) ++to_fold_;
  }
}

void BucketSums::Clear() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].nodes.clear();
    buckets_[b].covered = buckets_[b].local = 0;
    buckets_[b].folded = false;
  }
  folded_ = 0;
  touched_ = false;
  nonfinite_ = NonFinite{};
}

AddResult BucketSums::Add(uint64_t bucket, const Contribution& contribution) {
  Bucket& b = buckets_[bucket];
  if (b.folded) return AddResult::kDuplicate;
  const kernels::SlotRange node = contribution.node;
  auto at = std::lower_bound(b.nodes.begin(), b.nodes.end(), node.lo,
                             [](const Contribution& c, uint32_t lo) { return c.node.lo < lo; });
  if (at != b.nodes.end() && at->node == node) return AddResult::kDuplicate;
  if (at != b.nodes.end() && at->node.lo < node.hi) return AddResult::kOverlaps;
  if (at != b.nodes.begin() && std::prev(at)->node.hi > node.lo) return AddResult::kOverlaps;
  b.nodes.insert(at, contribution);
  b.covered += node.hi - node.lo;
  if (contribution.daemon.empty()) b.local += node.hi - node.lo;
  touched_ = true;
  return AddResult::kAdded;
}

bool BucketSums::HasAllNodes(uint64_t bucket) const {
  const Bucket& b = buckets_[bucket];
  return !b.folded && b.covered == slots_ && !b.owned.empty();
}

std::vector<Contribution> BucketSums::Take(uint64_t bucket) {
  buckets_[bucket].folded = true;  // a duplicate is acknowledged
  return std::exchange(buckets_[bucket].nodes, {});
}

void BucketSums::DropWaiting() {
  for (Bucket& b : buckets_) {
    b.nodes.clear();
    if (!b.folded) b.covered = b.local = 0;
  }
}

absl::StatusOr<std::vector<Contribution>> BucketSums::Fold(uint64_t bucket, uint64_t step,
                                                           const void** fault_address) {
  Bucket& b = buckets_[bucket];
  const contract::Range range = layout_->bucket_range(bucket);
  std::vector<kernels::SlotRange> nodes;
  for (const Contribution& c : b.nodes) nodes.push_back(c.node);
  kernels::ReduceProgram program;
  if (!kernels::SlotTreeProgram(slots_, nodes, &program)) {
    return absl::InternalError("nodes that cover all slots do not fold to the root");
  }
  contract::ReducedLine* line = segments_->reduced_line(bucket);
  line->step.store(0, std::memory_order_release);
  // A task is a few blocks: short enough for two threads to end together, and long
  // enough to amortise the hand-out.
  constexpr uint64_t kTask = 16 * kBlockElements;
  const uint64_t blocks = (range.size() + kBlockElements - 1) / kBlockElements;
  std::vector<kernels::BlockStats> stats(blocks);
  std::vector<contract::Range> tasks;
  for (const contract::Range& owned : b.owned) {
    for (uint64_t at = owned.begin; at < owned.end; at += kTask) {
      tasks.push_back({at, std::min(at + kTask, owned.end)});
    }
  }
  std::atomic<const void*> fault{nullptr};
  pool_->ParallelFor(tasks.size(), [&](size_t task) {
    const contract::Range part = tasks[task];
    std::vector<kernels::ReduceInput> inputs;
    for (const Contribution& c : b.nodes) inputs.push_back({c.at(part.begin), c.dtype});
    // What it allocates must be outside of the guard, or a fault would leak it.
    kernels::Reducer reducer(isa_, program, inputs);
    const void* at = env::RunGuarded([&] {
      reducer.Run(part.size(), segments_->reduced(part.begin), segments_->reduced_dtype(),
                  stats.data() + (part.begin - range.begin) / kBlockElements);
    });
    if (at != nullptr) fault.store(at);
  });
  if (fault.load() != nullptr) {
    *fault_address = fault.load();
    return absl::DataLossError("a ring could not be read");
  }
  uint32_t nonfinite = 0;
  double* sums = segments_->sums() + range.begin / kBlockElements;
  for (const contract::Range& owned : b.owned) {
    const uint64_t last = (owned.end - range.begin + kBlockElements - 1) / kBlockElements;
    for (uint64_t i = (owned.begin - range.begin) / kBlockElements; i < last; ++i) {
      sums[i] = stats[i].sum_squares;
      if (stats[i].nonfinite != 0) {
        if (nonfinite == 0 && !nonfinite_.found) Blame(bucket, b.nodes, i);
        nonfinite = 1;
      }
    }
  }
  line->nonfinite.store(nonfinite, std::memory_order_relaxed);
  line->step.store(step, std::memory_order_release);
  b.folded = true;
  ++folded_;
  return std::move(b.nodes);
}

// Says whose value it was. The rings may have changed since; then it is said of the sum.
void BucketSums::Blame(uint64_t bucket, const std::vector<Contribution>& nodes, size_t block) {
  const contract::Range range = layout_->bucket_range(bucket);
  const uint64_t begin = block * kBlockElements;
  const uint64_t count = std::min<uint64_t>(kBlockElements, range.size() - begin);
  nonfinite_.found = true;
  bool is_nan = false;
  uint64_t element = 0;
  std::string from = "the sum over all ranks";
  bool located = false;
  for (const Contribution& c : nodes) {
    uint64_t at = count;
    env::RunGuarded(
        [&] { at = kernels::FindNonFinite(c.at(range.begin + begin), c.dtype, count, &is_nan); });
    if (at < count) {
      element = range.begin + begin + at;
      from = c.daemon.empty() ? absl::StrCat("rank ", c.rank)
                              : absl::StrCat("the ranks of daemon ", c.daemon);
      located = true;
      break;
    }
  }
  if (!located) {
    const uint64_t at = kernels::FindNonFinite(segments_->reduced(range.begin + begin),
                                               segments_->reduced_dtype(), count, &is_nan);
    element = range.begin + begin + std::min(at, count - 1);
  }
  const std::vector<contract::Run> runs = layout_->runs({element, element + 1});
  const std::string where = runs.empty()
                                ? absl::StrCat("padding element ", element)
                                : absl::StrCat("element ", runs[0].offset, " of parameter '",
                                               layout_->parameter(runs[0].parameter).name, "'");
  nonfinite_.what =
      absl::StrCat(is_nan ? "NaN" : "Inf", " in the gradient's ", where, " from ", from);
}

double BucketSums::SumSquares() const {
  return kernels::FoldTree({segments_->sums(), layout_->num_blocks()});
}

}  // namespace shardd::step

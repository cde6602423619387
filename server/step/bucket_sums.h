// Collects the tree nodes of one step, bucket by bucket, and folds a bucket when
// all of its nodes are there.
#ifndef SHARDD_SERVER_STEP_BUCKET_SUMS_H_
#define SHARDD_SERVER_STEP_BUCKET_SUMS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/isa.h"
#include "kernels/reduce.h"
#include "proto/contract/layout.h"
#include "server/env/thread_pool.h"
#include "server/store/job_segments.h"

namespace shardd::step {

// One published node that waits in its owner's ring, or has come from another daemon.
struct Contribution {
  kernels::SlotRange node;
  kernels::DType dtype = kernels::DType::kFloat32;
  const std::byte* data = nullptr;  // of element `begin` of the flat space
  uint64_t begin = 0;
  uint32_t rank = 0;
  uint64_t ring_index = 0;  // descriptor to release when the bucket is folded
  // From another daemon: its name, and the memory in which `data` lies.
  std::string daemon;
  std::shared_ptr<const std::vector<float>> memory;
  const std::byte* at(uint64_t element) const {
    return data + (element - begin) * kernels::DTypeSize(dtype);
  }
};

enum class AddResult { kAdded, kDuplicate, kOverlaps };

// A non-finite gradient that was found.
struct NonFinite {
  bool found = false;
  std::string what;  // "NaN in element 3 of parameter 'w' from rank 1"
};

// The job's thread only.
class BucketSums {
 public:
  BucketSums(const contract::Layout* layout, store::JobSegments* segments, uint32_t slots,
             kernels::Isa isa, env::ThreadPool* pool);

  // What is summed here: ranges of the flat space, ascending, cut at chunk borders. At first all
  // of it. Between steps only.
  void SetOwned(const std::vector<contract::Range>& owned);
  // The parts of a bucket that are summed here.
  const std::vector<contract::Range>& Owned(uint64_t bucket) const {
    return buckets_[bucket].owned;
  }

  // Forgets all contributions and sums of the step that is not decided.
  void Clear();
  AddResult Add(uint64_t bucket, const Contribution& contribution);
  bool HasAllNodes(uint64_t bucket) const;
  // Folds the bucket into the reduced segment and marks it with `step`. Returns
  // its contributions, whose ring space is free again. Faulted: reading a ring
  // raised SIGBUS at *fault_address; nothing is marked.
  absl::StatusOr<std::vector<Contribution>> Fold(uint64_t bucket, uint64_t step,
                                                 const void** fault_address);
  // Contributions that wait, ascending.
  const std::vector<Contribution>& Waiting(uint64_t bucket) const { return buckets_[bucket].nodes; }
  // Slots of the bucket that ranks of this daemon have given.
  uint32_t LocalSlots(uint64_t bucket) const { return buckets_[bucket].local; }
  // Ends a bucket of which nothing is summed here; returns its contributions.
  std::vector<Contribution> Take(uint64_t bucket);
  // Forgets the contributions that wait; sums that are complete stay.
  void DropWaiting();
  uint64_t folded() const { return folded_; }
  bool AllFolded() const { return folded_ == to_fold_; }
  bool IsFolded(uint64_t bucket) const { return buckets_[bucket].folded; }
  bool empty() const { return !touched_; }
  // The first non-finite value that was met, in the order of folding.
  const NonFinite& nonfinite() const { return nonfinite_; }
  // Sum of squares over the job, by the slot-tree rule over its blocks.
  double SumSquares() const;

 private:
  struct Bucket {
    std::vector<Contribution> nodes;  // ascending
    uint32_t covered = 0;             // slots
    uint32_t local = 0;               // of those, from ranks of this daemon
    std::vector<contract::Range> owned;
    bool folded = false;
  };
  void Blame(uint64_t bucket, const std::vector<Contribution>& nodes, size_t block);

  const contract::Layout* layout_;
  store::JobSegments* segments_;
  const uint32_t slots_;
  const kernels::Isa isa_;
  env::ThreadPool* pool_;
  std::vector<Bucket> buckets_;
  uint64_t folded_ = 0;
  uint64_t to_fold_ = 0;  // buckets of which anything is owned
  bool touched_ = false;
  NonFinite nonfinite_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_BUCKET_SUMS_H_

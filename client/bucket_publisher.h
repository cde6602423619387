// Hands gradients to the daemon bucket by bucket, in the job's one publish order
// (docs/formats/segments.md), whatever order the trainer finishes parameters in.
//
// Ring space is assigned only at a bucket's turn, so no order of parameters or ranks
// can fill the ring with buckets that nobody else publishes yet.
#ifndef SHARDD_CLIENT_BUCKET_PUBLISHER_H_
#define SHARDD_CLIENT_BUCKET_PUBLISHER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/grad_staging.h"
#include "client/ring_writer.h"
#include "proto/contract/layout.h"

namespace shardd {

// The daemon's side of a ring, as the session sees it.
struct RingPeer {
  // Descriptors that the daemon is done with.
  std::function<uint64_t()> released;
  // Wakes the daemon if it sleeps; after each publication.
  std::function<void()> doorbell;
  // Waits until the predicate holds; it is asked again when `released` may have moved.
  // An error ends the wait and is what the publishing call returns.
  std::function<absl::Status(absl::FunctionRef<bool()>)> wait;
};

// Threads: Acquire and Ready of different parameters may run in parallel; all else is
// called by one thread while they do not run.
class BucketPublisher {
 public:
  struct Options {
    const contract::Layout* layout = nullptr;
    GradStaging* staging = nullptr;
    RingWriter* ring = nullptr;
    RingPeer peer;
    kernels::DType grad_dtype = kernels::DType::kBFloat16;
    uint64_t job_tag = 0;
    // Stages 2 and 3: staged gradients are given back as soon as they are published.
    bool discard_published = false;
  };
  explicit BucketPublisher(const Options& options);

  // Bytes of ring data that one publication of the largest bucket takes; two of them
  // are what a ring must have.
  static uint64_t LargestBlock(const contract::Layout& layout, const GradStaging& staging);
  // Descriptors per bucket.
  static uint32_t DescriptorsPerBucket(const GradStaging& staging);

  // Begins `step` of `generation`: nothing is acquired or published.
  void Begin(uint64_t generation, uint64_t step);

  // The buffer for a parameter's gradient in a slot of this rank. FailedPrecondition:
  // it, or a later slot of the parameter, is complete already.
  absl::StatusOr<void*> Acquire(size_t parameter, uint32_t slot);
  // The buffer holds the gradient. Publishes the buckets whose turn has come; waits
  // for ring space. FailedPrecondition: it was not acquired. After an error of the
  // wait the parameter is complete, and the next call goes on publishing.
  absl::Status Ready(size_t parameter, uint32_t slot);

  // Whether some slot of the parameter was complete in this step.
  bool given(size_t parameter) const { return parameters_[parameter].given; }
  // Publishes what is left, with zeros for every gradient that was not given.
  absl::Status Finish();

 private:
  struct Parameter {
    bool acquired = false;  // `slot` is
    bool given = false;     // some slot is complete
    bool in_ring = false;   // its buffer is in the open block
    bool counted = false;   // its buckets know that it is complete
    uint32_t slot = 0;
  };
  // Elements [range) of the open block that hold, or will hold, a parameter.
  absl::StatusOr<std::byte*> AcquireInRing(size_t parameter);
  bool TryReserve();
  void Count(size_t parameter);
  absl::Status PublishReady();
  absl::Status PublishOne();
  void FillBlock(uint64_t bucket);
  void FillNode(size_t node, contract::Range range, const std::vector<contract::Run>& runs,
                std::byte* out);
  uint64_t BlockBytes(uint64_t bucket) const;
  std::string Name(size_t parameter) const { return layout_.parameter(parameter).name; }

  const contract::Layout& layout_;
  GradStaging& staging_;
  RingWriter& ring_;
  const RingPeer peer_;
  const kernels::DType grad_dtype_;
  const uint64_t job_tag_;
  const bool discard_published_;
  const bool single_leaf_;

  std::vector<Parameter> parameters_;
  std::vector<uint32_t> parameters_in_bucket_;

  std::mutex mutex_;                   // guards what follows, and the ring
  std::vector<uint32_t> waiting_for_;  // [buckets] parameters that are not complete
  uint64_t turn_ = 0;                  // the bucket to publish next
  uint64_t generation_ = 0;
  uint64_t step_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_BUCKET_PUBLISHER_H_

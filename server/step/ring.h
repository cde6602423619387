// The daemon's side of a worker's ring: a read-only mapping of memory that its
// owner may change at any moment. Descriptors are copied, then checked.
#ifndef SHARDD_SERVER_STEP_RING_H_
#define SHARDD_SERVER_STEP_RING_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "absl/status/statusor.h"
#include "proto/contract/fd_passing.h"
#include "proto/contract/segments.h"
#include "server/env/budget.h"

namespace shardd::step {

// One thread.
class Ring {
 public:
  // Checks that `fd` is a memfd on tmpfs with the seals SHRINK, GROW and SEAL, no larger than
  // max_bytes, whose header describes it, and that the budget has room for it; maps it read-only.
  // InvalidArgument says what is wrong.
  static absl::StatusOr<std::unique_ptr<Ring>> Map(contract::UniqueFd fd, uint64_t max_bytes,
                                                   env::Budget* budget);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  uint64_t bytes() const { return bytes_; }
  // May raise SIGBUS, as Next and reads of data() may: call under env::RunGuarded.
  uint64_t head() const;
  uint64_t heartbeat() const;

  // Whether there is a descriptor that Next has not returned.
  bool HasNext() const { return head() != consumed_; }
  // Copies the next descriptor. False: none. OutOfRange when head has run ahead of what fits
  // (the worker wrote more than the queue holds) or has gone back.
  absl::StatusOr<bool> Next(contract::Descriptor* out);
  // Where a checked descriptor's data lies.
  const std::byte* data(uint64_t offset) const { return base_ + data_offset_ + offset; }
  uint64_t data_bytes() const { return data_bytes_; }
  bool Contains(const void* address) const {
    const auto* at = static_cast<const std::byte*>(address);
    return at >= base_ && at < base_ + bytes_;
  }

  // Index (since the session began) of the descriptor that Next returned last.
  uint64_t last_index() const { return consumed_ - 1; }
  // Marks descriptor `index` as done; returns the count up to which all are.
  uint64_t Release(uint64_t index);
  // All that were consumed.
  uint64_t ReleaseAll();

 private:
  Ring() = default;
  env::BudgetLease lease_;
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t data_offset_ = 0;
  uint64_t data_bytes_ = 0;
  uint64_t entries_ = 0;
  uint64_t consumed_ = 0;
  uint64_t released_ = 0;
  std::deque<bool> done_;  // of descriptors released_ .. consumed_ - 1
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_RING_H_

// The daemon's hard memory budget: nothing large is allocated without a lease.
#ifndef SHARDD_SERVER_ENV_BUDGET_H_
#define SHARDD_SERVER_ENV_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace shardd::env {

class Budget;

// Gives its bytes back when it goes. Movable.
class BudgetLease {
 public:
  BudgetLease() = default;
  BudgetLease(BudgetLease&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  BudgetLease& operator=(BudgetLease&& other) noexcept;
  ~BudgetLease() { Return(); }
  uint64_t bytes() const { return bytes_; }
  // Takes over what another lease of the same budget holds.
  void Absorb(BudgetLease other);
  // Gives back all but `bytes`, which is no more than it holds.
  void ShrinkTo(uint64_t bytes);

 private:
  friend class Budget;
  BudgetLease(Budget* budget, uint64_t bytes) : budget_(budget), bytes_(bytes) {}
  void Return();
  Budget* budget_ = nullptr;
  uint64_t bytes_ = 0;
};

// Thread-safe. Outlives its leases.
class Budget {
 public:
  explicit Budget(uint64_t limit_bytes) : limit_(limit_bytes) {}
  // ResourceExhausted says what is needed, what is left and what to do. `what`
  // begins the message: "job 'x'", "the ring of rank 2".
  absl::StatusOr<BudgetLease> Reserve(uint64_t bytes, const std::string& what);
  uint64_t limit() const { return limit_; }
  uint64_t used() const { return used_.load(); }

 private:
  friend class BudgetLease;
  const uint64_t limit_;
  std::atomic<uint64_t> used_{0};
};

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_BUDGET_H_

#include "server/env/budget.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace shardd::env {

BudgetLease& BudgetLease::operator=(BudgetLease&& other) noexcept {
  if (this != &other) {
    Return();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void BudgetLease::Absorb(BudgetLease other) {
  if (budget_ == nullptr) {
    *this = std::move(other);
    return;
  }
  bytes_ += std::exchange(other.bytes_, 0);
  other.budget_ = nullptr;
}

void BudgetLease::ShrinkTo(uint64_t bytes) {
  if (budget_ == nullptr || bytes >= bytes_) return;
  budget_->used_ -= bytes_ - bytes;
  bytes_ = bytes;
}

void BudgetLease::Return() {
  if (budget_ != nullptr) budget_->used_ -= bytes_;
  budget_ = nullptr;
  bytes_ = 0;
}

absl::StatusOr<BudgetLease> Budget::Reserve(uint64_t bytes, const std::string& what) {
  uint64_t used = used_.load();
  do {
    if (bytes > limit_ || used > limit_ - bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat(what, " needs ", bytes, " bytes, but of the daemon's budget of ", limit_,
                       " (memory.budget_bytes) ", limit_ - std::min(used, limit_),
                       " are left; raise it or delete a job"));
    }
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return BudgetLease(this, bytes);
}

}  // namespace shardd::env

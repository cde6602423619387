#include "server/step/ring.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/env/fault_guard.h"

namespace shardd::step {

namespace {

absl::Status Refuse(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("the ring ", what));
}

absl::StatusOr<uint64_t> CheckFile(int fd, uint64_t max_bytes) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return Refuse("must be a memfd sealed F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL");
  }
  struct statfs fs {};
  if (fstatfs(fd, &fs) != 0 || fs.f_type != TMPFS_MAGIC) {
    return Refuse("must be an ordinary memfd (not hugetlb)");
  }
  struct stat info {};
  if (fstat(fd, &info) != 0) return contract::ErrnoStatus(errno, "cannot stat the ring");
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes < 3 * contract::kSegmentPage || bytes > max_bytes) {
    return Refuse(absl::StrCat("has ", bytes, " bytes; it must have ", 3 * contract::kSegmentPage,
                               " to ", max_bytes, " (memory.ring_bytes_max)"));
  }
  return bytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Ring>> Ring::Map(contract::UniqueFd fd, uint64_t max_bytes,
                                                env::Budget* budget) {
  absl::StatusOr<uint64_t> bytes = CheckFile(fd.get(), max_bytes);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<env::BudgetLease> lease = budget->Reserve(*bytes, "a worker's ring");
  if (!lease.ok()) return lease.status();
  void* base = mmap(nullptr, *bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return contract::ErrnoStatus(errno, "cannot map the ring");
  std::unique_ptr<Ring> ring(new Ring());
  ring->base_ = static_cast<std::byte*>(base);
  ring->bytes_ = *bytes;
  ring->lease_ = *std::move(lease);
  contract::RingHeader header;
  const void* fault = env::RunGuarded([&] {
    std::memcpy(static_cast<void*>(&header), base, offsetof(contract::RingHeader, head));
  });
  if (fault != nullptr) return Refuse("cannot be read");
  if (header.magic != contract::kRingMagic || header.version != contract::kFormatVersion) {
    return Refuse(
        absl::StrCat("has the magic or version of something else; this daemon reads "
                     "ring format ",
                     contract::kFormatVersion));
  }
  const uint64_t entries = header.queue_entries;
  if (!std::has_single_bit(entries) || entries < 64 || entries > (1 << 20) ||
      header.data_offset % contract::kSegmentPage != 0 ||
      header.data_offset < contract::kSegmentPage + entries * sizeof(contract::Descriptor) ||
      header.data_offset > *bytes || header.data_bytes != *bytes - header.data_offset) {
    return Refuse("has a header that does not describe its own size");
  }
  ring->entries_ = entries;
  ring->data_offset_ = header.data_offset;
  ring->data_bytes_ = header.data_bytes;
  return ring;
}

Ring::~Ring() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

uint64_t Ring::head() const {
  return reinterpret_cast<const contract::RingHeader*>(base_)->head.load(std::memory_order_acquire);
}

uint64_t Ring::heartbeat() const {
  return reinterpret_cast<const contract::RingHeader*>(base_)->heartbeat.load(
      std::memory_order_relaxed);
}

absl::StatusOr<bool> Ring::Next(contract::Descriptor* out) {
  const uint64_t head = this->head();
  if (head == consumed_) return false;
  // Modulo 2^64: a head behind what was consumed is one that is far too large.
  const uint64_t outstanding = consumed_ - released_;
  if (head - consumed_ > entries_ - outstanding) {
    return absl::OutOfRangeError(absl::StrCat(
        "the ring's head is ", head, " after ", consumed_, " descriptors were read, ", outstanding,
        " of them outstanding; it may neither go back nor run ahead of its queue of ", entries_));
  }
  const std::byte* at =
      base_ + contract::kSegmentPage + (consumed_ & (entries_ - 1)) * sizeof(contract::Descriptor);
  // The copy must be made before it is checked: the compiler may not load again.
  std::memcpy(out, at, sizeof(*out));
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ++consumed_;
  done_.push_back(false);
  return true;
}

uint64_t Ring::Release(uint64_t index) {
  if (index >= released_ && index < consumed_) done_[index - released_] = true;
  while (!done_.empty() && done_.front()) {
    done_.pop_front();
    ++released_;
  }
  return released_;
}

uint64_t Ring::ReleaseAll() {
  done_.clear();
  released_ = consumed_;
  return released_;
}

}  // namespace shardd::step

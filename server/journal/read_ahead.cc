#include "server/journal/read_ahead.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardd::journal {

ReadAhead::ReadAhead(std::vector<Extent> extents, size_t depth)
    : extents_(std::move(extents)), slots_(depth + 1) {
  uint64_t largest = 0;
  for (const Extent& extent : extents_) largest = std::max(largest, extent.bytes);
  for (Slot& slot : slots_) slot.buffer = env::AlignedBuffer(largest);
  for (size_t i = 0; i < depth; ++i) threads_.emplace_back([this] { Read(); });
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ReadAhead::Read() {
  std::unique_lock lock(mutex_);
  while (true) {
    // An extent's buffer is free when the one before it there was given and is done with.
    changed_.wait(lock, [&] {
      return stop_ || started_ == extents_.size() || started_ + 1 < given_ + slots_.size() ||
             (given_ == 0 && started_ < slots_.size());
    });
    if (stop_ || started_ == extents_.size()) return;
    const size_t index = started_++;
    Slot& slot = slots_[index % slots_.size()];
    slot.done = false;
    lock.unlock();
    const Extent& extent = extents_[index];
    absl::StatusOr<size_t> n =
        extent.file->ReadAt(extent.offset, {slot.buffer.data(), extent.bytes});
    absl::Status status = n.status();
    if (n.ok() && *n < extent.bytes) {
      status =
          absl::DataLossError(absl::StrCat(extent.file->path(), " at ", extent.offset,
                                           " is cut short: ", *n, " of ", extent.bytes, " bytes"));
    }
    lock.lock();
    slot.status = status;
    slot.done = true;
    changed_.notify_all();
  }
}

absl::StatusOr<std::span<const std::byte>> ReadAhead::Next() {
  std::unique_lock lock(mutex_);
  const size_t index = given_++;
  changed_.notify_all();  // the buffer of the one before is free
  Slot& slot = slots_[index % slots_.size()];
  changed_.wait(lock, [&] { return started_ > index && slot.done; });
  if (!slot.status.ok()) return slot.status;
  return std::span<const std::byte>(slot.buffer.data(), extents_[index].bytes);
}

}  // namespace shardd::journal

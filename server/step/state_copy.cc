#include "server/step/state_copy.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardd::step {

namespace {

constexpr uint64_t kPopulateBytes = uint64_t{16} << 20;

uint64_t NowNanos() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace

absl::StatusOr<std::shared_ptr<CopyPool>> CopyPool::Create(uint64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system gives no ", bytes, " bytes for the copy of a job's state"));
  }
  return std::shared_ptr<CopyPool>(new CopyPool(static_cast<float*>(data), bytes));
}

CopyPool::CopyPool(float* data, uint64_t bytes) : data_(data), bytes_(bytes) {
  madvise(data, bytes, MADV_HUGEPAGE);
}

// A hint: where it fails, pages come with their first use.
void CopyPool::Populate() {
  auto* at = reinterpret_cast<std::byte*>(data_);
  for (uint64_t begin = 0; begin < bytes_ && !stop_; begin += kPopulateBytes) {
    madvise(at + begin, std::min(kPopulateBytes, bytes_ - begin), MADV_POPULATE_WRITE);
  }
}

void CopyPool::BeginPopulate() {
  populator_ = std::thread([this] { Populate(); });
}

CopyPool::~CopyPool() {
  stop_ = true;
  if (populator_.joinable()) populator_.join();
  munmap(data_, bytes_);
}

uint64_t StateCopy::SlotBytes(const contract::Layout& layout, int moments, bool masters_only) {
  const uint64_t arrays = masters_only ? 1 : static_cast<uint64_t>(moments) + 1;
  return arrays * layout.chunk_elements() * sizeof(float);
}

StateCopy::StateCopy(StateSnapshot snapshot, const Options& options,
                     const store::JobSegments* segments, ChunkGate* gate)
    : snapshot_(std::move(snapshot)),
      moments_(options.masters_only ? 0 : snapshot_.moments),
      segments_(segments),
      gate_(gate),
      slot_bytes_(SlotBytes(snapshot_.layout, snapshot_.moments, options.masters_only)),
      pool_(options.pool),
      slots_(static_cast<uint32_t>(pool_->bytes() / slot_bytes_)),
      places_(snapshot_.chunks.size()),
      hurried_(!options.lazy) {
  // What lies between the parts is not here, and never copied.
  uint64_t next = snapshot_.chunks.begin;
  for (const StateSnapshot::Part& part : snapshot_.parts) {
    for (; next < part.chunks.begin; ++next) place(next).where = Where::kTaken;
    next = part.chunks.end;
  }
  copier_ = std::thread([this] { CopyAll(); });
}

StateCopy::~StateCopy() { Detach(); }

void StateCopy::CopyChunk(uint64_t chunk, float* to) const {
  const store::ChunkView view = segments_->chunk(chunk);
  const uint64_t count = snapshot_.layout.chunk_range(chunk).size();
  const uint64_t stride = snapshot_.layout.chunk_elements();
  for (size_t array = 0; array <= static_cast<size_t>(moments_); ++array) {
    view.Read(array, 0, count, to + array * stride);
  }
}

ChunkArrays StateCopy::View(const float* slot, uint64_t chunk) const {
  const uint64_t stride = snapshot_.layout.chunk_elements();
  ChunkArrays arrays;
  arrays.count = snapshot_.layout.chunk_range(chunk).size();
  arrays.master = slot;
  for (size_t m = 0; m < static_cast<size_t>(moments_); ++m) {
    arrays.moment[m] = slot + (m + 1) * stride;
  }
  return arrays;
}

// Only whoever holds the claim moves a chunk out of kLive, so it stays as it was seen.
bool StateCopy::CopyToPool(uint64_t chunk) {
  uint32_t slot = 0;
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_ || place(chunk).where != Where::kLive) return true;
    if (!free_.empty()) {
      slot = free_.back();
      free_.pop_back();
    } else if (fresh_ < slots_) {
      slot = fresh_++;
    } else {
      return false;
    }
  }
  CopyChunk(chunk, Slot(slot));
  {
    const std::lock_guard lock(mutex_);
    place(chunk) = {Where::kPool, slot};
  }
  changed_.notify_all();
  return true;
}

void StateCopy::Hurry() {
  if (hurried_.load(std::memory_order_relaxed)) return;
  {
    const std::lock_guard lock(mutex_);
    if (hurried_.exchange(true)) return;
    if (!cancelled_) pool_->BeginPopulate();
  }
  changed_.notify_all();
}

bool StateCopy::CopyBeforeUpdate(uint64_t chunk) {
  if (!Covers(chunk)) return true;
  Hurry();
  const uint64_t start = NowNanos();
  const bool copied = CopyToPool(chunk);
  copy_nanos_ += NowNanos() - start;
  return copied;
}

bool StateCopy::HasChance(uint64_t chunk) {
  return cancelled_ || place(chunk).where != Where::kLive || !free_.empty() || fresh_ < slots_;
}

void StateCopy::AwaitRoom(uint64_t chunk) {
  if (!Covers(chunk)) return;
  std::unique_lock lock(mutex_);
  if (HasChance(chunk)) return;
  const uint64_t start = NowNanos();
  changed_.wait(lock, [&] { return HasChance(chunk); });
  stall_nanos_ += NowNanos() - start;
}

void StateCopy::CopyAll() {
  pthread_setname_np(pthread_self(), "shardd-copy");
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return hurried_.load() || cancelled_; });
  }
  for (uint64_t chunk = snapshot_.chunks.begin; chunk < snapshot_.chunks.end; ++chunk) {
    while (true) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return HasChance(chunk); });
        if (cancelled_) return;
        if (place(chunk).where != Where::kLive) break;
      }
      const ChunkClaim claim(gate_, chunk);
      if (CopyToPool(chunk)) break;
    }
  }
}

absl::Status StateCopy::Take(uint64_t chunk,
                             absl::FunctionRef<absl::Status(const ChunkArrays&)> read) {
  const absl::Status cancelled =
      absl::CancelledError("the copy of the job's state was cancelled, or the job has ended");
  std::unique_lock lock(mutex_);
  if (cancelled_) return cancelled;
  if (place(chunk).where == Where::kLive) {
    ++reading_;
    lock.unlock();
    // Read where it lies, into memory of the reader's own: what `read` does may take long.
    std::unique_ptr<float[]> own(new float[slot_bytes_ / sizeof(float)]);
    bool live = false;
    {
      const ChunkClaim claim(gate_, chunk);
      lock.lock();
      live = !cancelled_ && place(chunk).where == Where::kLive;
      if (live) {
        lock.unlock();
        CopyChunk(chunk, own.get());
        lock.lock();
        place(chunk).where = Where::kTaken;
      }
      lock.unlock();
    }
    lock.lock();
    --reading_;
    changed_.notify_all();
    if (live) {
      lock.unlock();
      return read(View(own.get(), chunk));
    }
    if (cancelled_) return cancelled;
  }
  if (place(chunk).where == Where::kTaken) {
    return absl::InternalError("a chunk of a copy was taken twice");
  }
  const uint32_t slot = place(chunk).slot;
  place(chunk).where = Where::kTaken;
  lock.unlock();
  absl::Status status = read(View(Slot(slot), chunk));
  lock.lock();
  free_.push_back(slot);
  lock.unlock();
  changed_.notify_all();
  return status;
}

void StateCopy::Cancel() {
  std::function<void()> told;
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    told.swap(told_);
  }
  changed_.notify_all();
  if (told) told();
}

void StateCopy::OnCancel(std::function<void()> told) {
  {
    const std::lock_guard lock(mutex_);
    if (!cancelled_) {
      told_ = std::move(told);
      return;
    }
  }
  if (told) told();
}

void StateCopy::Detach() {
  Cancel();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reading_ == 0; });
  std::thread copier = std::move(copier_);
  lock.unlock();
  if (copier.joinable()) copier.join();
}

uint64_t StateCopy::pool_bytes_used() const {
  const std::lock_guard lock(mutex_);
  return fresh_ * slot_bytes_;
}

}  // namespace shardd::step

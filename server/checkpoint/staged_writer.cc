#include "server/checkpoint/staged_writer.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd::checkpoint {

StagedWriter::StagedWriter(size_t open) {
  for (size_t b = 0; b < NumBlocks(open); ++b) {
    blocks_.emplace_back(kBlockBytes);
    free_.push_back(b);
  }
  for (size_t t = 0; t < kThreads; ++t) threads_.emplace_back([this] { Work(); });
}

StagedWriter::~StagedWriter() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    writes_.clear();
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status StagedWriter::AddFile(std::unique_ptr<env::File> file, uint64_t bytes) {
  if (bytes > 0) {
    if (absl::Status status = file->Preallocate(bytes); !status.ok()) return status;
  }
  outputs_.push_back({.file = std::move(file), .bytes = bytes, .block = kNone});
  return absl::OkStatus();
}

absl::Status StagedWriter::Append(size_t file, std::span<const std::byte> data) {
  Output& output = outputs_[file];
  if (data.size() > output.bytes - output.flushed - output.filled) {
    return absl::InternalError(
        absl::StrCat(output.file->path(), ": more than its ", output.bytes, " bytes"));
  }
  while (!data.empty()) {
    if (output.block == kNone) {
      if (absl::Status status = TakeBlock(&output); !status.ok()) return status;
    }
    const size_t count = std::min(data.size(), kBlockBytes - output.filled);
    std::memcpy(blocks_[output.block].data() + output.filled, data.data(), count);
    output.filled += count;
    data = data.subspan(count);
    if (output.filled == kBlockBytes || output.flushed + output.filled == output.bytes) {
      Flush(&output);
    }
  }
  return absl::OkStatus();
}

absl::Status StagedWriter::TakeBlock(Output* output) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !free_.empty() || !status_.ok(); });
  if (!status_.ok()) return status_;
  output->block = free_.back();
  free_.pop_back();
  output->filled = 0;
  return absl::OkStatus();
}

void StagedWriter::Flush(Output* output) {
  const size_t bytes = output->file->direct() ? env::RoundUpToPage(output->filled) : output->filled;
  std::memset(blocks_[output->block].data() + output->filled, 0, bytes - output->filled);
  {
    const std::lock_guard lock(mutex_);
    writes_.push_back({output->file.get(), output->flushed, output->block, bytes});
  }
  changed_.notify_all();
  output->flushed += output->filled;
  output->filled = 0;
  output->block = kNone;
}

void StagedWriter::Work() {
  pthread_setname_np(pthread_self(), "shardd-save");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !writes_.empty() || stop_; });
    if (writes_.empty()) return;
    const Write write = writes_.front();
    writes_.pop_front();
    if (status_.ok()) {
      ++under_way_;
      lock.unlock();
      absl::Status status = write.file->WriteAt(
          write.offset, std::span<const std::byte>(blocks_[write.block].data(), write.bytes));
      lock.lock();
      --under_way_;
      status_.Update(status);
    }
    free_.push_back(write.block);
    changed_.notify_all();
  }
}

absl::Status StagedWriter::AwaitWrites() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return writes_.empty() && under_way_ == 0; });
  return status_;
}

absl::Status StagedWriter::Finish() {
  if (absl::Status status = AwaitWrites(); !status.ok()) return status;
  for (Output& output : outputs_) {
    if (output.flushed != output.bytes) {
      return absl::InternalError(
          absl::StrCat(output.file->path(), ": ", output.flushed, " bytes of ", output.bytes));
    }
    // The last block was filled up to a whole page.
    const bool padded = output.file->direct() && output.bytes % env::kDirectAlignment != 0;
    absl::Status status = padded ? output.file->Truncate(output.bytes) : absl::OkStatus();
    if (status.ok()) status = output.file->Sync();
    if (!status.ok()) return status;
    output.file.reset();
  }
  return absl::OkStatus();
}

}  // namespace shardd::checkpoint

// Writes a set of files from front to back, on threads of its own.
//
// Data are gathered in blocks, and full blocks are written around the page cache where the file
// system can: a save neither pushes the page cache out nor waits for the system to write it back,
// and the disk works while the next block is filled.
#ifndef SHARDD_SERVER_CHECKPOINT_STAGED_WRITER_H_
#define SHARDD_SERVER_CHECKPOINT_STAGED_WRITER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "server/env/aligned_buffer.h"
#include "server/env/file_system.h"

namespace shardd::checkpoint {

// For one thread, the caller.
class StagedWriter {
 public:
  static constexpr size_t kBlockBytes = size_t{2} << 20;
  static constexpr size_t kThreads = 2;
  // What one with `open` takes: its blocks, and what its threads and files need. Bytes.
  static constexpr uint64_t MemoryBytes(size_t open) {
    return NumBlocks(open) * uint64_t{kBlockBytes} + (uint64_t{1} << 20);
  }

  // At most `open` files have been begun and are not complete at any time.
  explicit StagedWriter(size_t open);
  // Waits for writes that are under way.
  ~StagedWriter();
  StagedWriter(const StagedWriter&) = delete;
  StagedWriter& operator=(const StagedWriter&) = delete;

  // A new file of `bytes` bytes; it was opened for writing, with or without `direct`. Reserves its
  // space. Files are numbered from 0 on.
  absl::Status AddFile(std::unique_ptr<env::File> file, uint64_t bytes);
  // Puts `data` behind what the file has. Waits for a block. An error of any write comes back
  // from the next call; then the files are of no use.
  absl::Status Append(size_t file, std::span<const std::byte> data);
  // All files are complete: writes what is left and makes their contents durable.
  absl::Status Finish();

 private:
  struct Output {
    std::unique_ptr<env::File> file;
    uint64_t bytes = 0;
    uint64_t flushed = 0;  // handed to the threads
    size_t block = 0;      // kNone: none
    size_t filled = 0;     // of it
  };
  struct Write {
    env::File* file;
    uint64_t offset;
    size_t block;
    size_t bytes;  // as the file wants them: whole pages where it is direct
  };
  static constexpr size_t kNone = ~size_t{0};
  static constexpr size_t NumBlocks(size_t open) { return open + kThreads + 1; }

  void Work();
  absl::Status TakeBlock(Output* output);
  void Flush(Output* output);
  absl::Status AwaitWrites();

  std::vector<Output> outputs_;
  std::vector<env::AlignedBuffer> blocks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // All under mutex_.
  std::vector<size_t> free_;
  std::deque<Write> writes_;
  size_t under_way_ = 0;
  absl::Status status_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_STAGED_WRITER_H_

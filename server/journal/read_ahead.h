// Reads many extents of files in order, ahead of whoever uses them.
#ifndef SHARDD_SERVER_JOURNAL_READ_AHEAD_H_
#define SHARDD_SERVER_JOURNAL_READ_AHEAD_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "server/env/aligned_buffer.h"
#include "server/env/file_system.h"

namespace shardd::journal {

// Multiples of 4096.
struct Extent {
  env::File* file = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// `depth` threads read into as many buffers and one more; memory is that many times the largest
// extent. Next and the destructor are the owner's thread's.
class ReadAhead {
 public:
  ReadAhead(std::vector<Extent> extents, size_t depth);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The bytes of the next extent, valid until the next call. DataLoss if the file ends before.
  // Not after the last.
  absl::StatusOr<std::span<const std::byte>> Next();

 private:
  struct Slot {
    env::AlignedBuffer buffer;
    bool done = false;
    absl::Status status;
  };
  void Read();

  const std::vector<Extent> extents_;
  std::vector<Slot> slots_;  // extent i is read into slot i % size
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t started_ = 0;  // extents; under mutex_
  size_t given_ = 0;    // extents; under mutex_
  bool stop_ = false;   // under mutex_
  std::vector<std::thread> threads_;
};

}  // namespace shardd::journal

#endif  // SHARDD_SERVER_JOURNAL_READ_AHEAD_H_

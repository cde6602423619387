// Named, anonymous shared memory of this process: a memfd mapped as a whole. The
// name shows in /proc/PID/smaps, so that what a rank holds can be told apart.
#ifndef SHARDD_CLIENT_MEMORY_FILE_H_
#define SHARDD_CLIENT_MEMORY_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "proto/contract/fd_passing.h"

namespace shardd {

class MemoryFile {
 public:
  MemoryFile() = default;
  // `bytes` (at least 1; rounded up to pages) of zeros, resident only once touched.
  // sealed: the size can never change again, and no further seals can be added.
  // The mapping is not inherited by fork: a data loader's copy would keep the
  // memory alive after this process has died. ResourceExhausted: no memory.
  static absl::StatusOr<MemoryFile> Create(const std::string& name, uint64_t bytes, bool sealed);

  MemoryFile(MemoryFile&& other) noexcept;
  MemoryFile& operator=(MemoryFile&& other) noexcept;
  ~MemoryFile();

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  int fd() const { return fd_.get(); }

  // Gives the whole pages inside [begin, end) bytes back; they read as zeros.
  void Discard(uint64_t begin, uint64_t end);

 private:
  contract::UniqueFd fd_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// A read-only mapping of a descriptor that the daemon handed out; not inherited by
// fork. Closes the descriptor.
class ReadOnlyMapping {
 public:
  ReadOnlyMapping() = default;
  // InvalidArgument: the file has fewer than `bytes` (reading beyond its end would be a SIGBUS).
  static absl::StatusOr<ReadOnlyMapping> Map(contract::UniqueFd fd, uint64_t bytes,
                                             const std::string& what);
  ReadOnlyMapping(ReadOnlyMapping&& other) noexcept;
  ReadOnlyMapping& operator=(ReadOnlyMapping&& other) noexcept;
  ~ReadOnlyMapping();

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_MEMORY_FILE_H_

// One mapped file of the state directory.
#ifndef SHARDD_SERVER_STORE_SEGMENT_H_
#define SHARDD_SERVER_STORE_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "proto/contract/fd_passing.h"

namespace shardd::store {

// Movable; unmaps on destruction, never unlinks.
class Segment {
 public:
  Segment() = default;
  Segment(Segment&&) noexcept;
  Segment& operator=(Segment&&) noexcept;
  ~Segment();

  // Makes `path` (mode 0600, must not exist) of `bytes` zeros, maps it read-write and makes every
  // page resident, so that no later store can fail. ResourceExhausted when the file system has
  // no room; the file is then removed.
  static absl::StatusOr<Segment> Create(const std::string& path, uint64_t bytes) {
    return CreateSparse(path, bytes, bytes);
  }
  // The same, with only the first `resident_bytes` made resident: the rest must not be touched
  // before Populate.
  static absl::StatusOr<Segment> CreateSparse(const std::string& path, uint64_t bytes,
                                              uint64_t resident_bytes);
  // Maps an existing file read-write.
  static absl::StatusOr<Segment> Open(const std::string& path);
  // The same of a file that is open read-write; `name` is for messages. The descriptor may be
  // closed afterwards.
  static absl::StatusOr<Segment> Map(int fd, const std::string& name);

  // Makes the pages of a part resident; what they hold stays. ResourceExhausted: no room.
  absl::Status Populate(uint64_t offset, uint64_t bytes) const;
  // Gives the memory of the whole pages in a part back; they are zero, and not resident.
  void Punch(uint64_t offset, uint64_t bytes) const;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  template <typename T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

  // A new O_RDONLY descriptor of the file at `path`, to hand out.
  static absl::StatusOr<contract::UniqueFd> OpenReadOnly(const std::string& path);

 private:
  Segment(std::byte* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace shardd::store

#endif  // SHARDD_SERVER_STORE_SEGMENT_H_

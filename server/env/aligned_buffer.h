// Memory that files opened with `direct` can take.
#ifndef SHARDD_SERVER_ENV_ALIGNED_BUFFER_H_
#define SHARDD_SERVER_ENV_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "server/env/file_system.h"

namespace shardd::env {

constexpr size_t RoundUpToPage(size_t bytes) {
  return (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}

// Movable; empty by default. Its size is rounded up to kDirectAlignment and zeroed.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kDirectAlignment, RoundUpToPage(bytes)))),
        bytes_(RoundUpToPage(bytes)) {
    if (data_ != nullptr) std::memset(data_.get(), 0, bytes_);
  }
  std::byte* data() const { return data_.get(); }
  size_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_ALIGNED_BUFFER_H_

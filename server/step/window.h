// A memfd of the daemon through which one session reads fp32 state.
#ifndef SHARDD_SERVER_STEP_WINDOW_H_
#define SHARDD_SERVER_STEP_WINDOW_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "proto/contract/fd_passing.h"

namespace shardd::step {

inline constexpr uint64_t kWindowBytes = 4 << 20;

// One thread.
class Window {
 public:
  static absl::StatusOr<std::unique_ptr<Window>> Create();
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  float* data() const { return data_; }
  uint64_t bytes() const { return kWindowBytes; }
  // A new read-only descriptor to hand out.
  absl::StatusOr<contract::UniqueFd> OpenReadOnly() const;

 private:
  Window() = default;
  contract::UniqueFd fd_;
  float* data_ = nullptr;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_WINDOW_H_

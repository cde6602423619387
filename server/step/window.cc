#include "server/step/window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace shardd::step {

absl::StatusOr<std::unique_ptr<Window>> Window::Create() {
  std::unique_ptr<Window> window(new Window());
  window->fd_ = contract::UniqueFd(memfd_create("shardd-window", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!window->fd_) return contract::ErrnoStatus(errno, "cannot make a window");
  if (ftruncate(window->fd_.get(), kWindowBytes) != 0) {
    return contract::ErrnoStatus(errno, "cannot size a window");
  }
  void* data =
      mmap(nullptr, kWindowBytes, PROT_READ | PROT_WRITE, MAP_SHARED, window->fd_.get(), 0);
  if (data == MAP_FAILED) return contract::ErrnoStatus(errno, "cannot map a window");
  window->data_ = static_cast<float*>(data);
  // The reader can neither shrink it under us nor, after this, map it for writing.
  if (fcntl(window->fd_.get(), F_ADD_SEALS,
            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    return contract::ErrnoStatus(errno, "cannot seal a window");
  }
  return window;
}

Window::~Window() {
  if (data_ != nullptr) munmap(data_, kWindowBytes);
}

absl::StatusOr<contract::UniqueFd> Window::OpenReadOnly() const {
  const std::string path = absl::StrCat("/proc/self/fd/", fd_.get());
  contract::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return contract::ErrnoStatus(errno, "cannot open a window read-only");
  return fd;
}

}  // namespace shardd::step

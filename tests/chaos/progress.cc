#include "tests/chaos/progress.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace shardd::test {

void UnmapProgress::operator()(Progress* progress) const { munmap(progress, sizeof(Progress)); }

SharedProgress MapProgress(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* page = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, sizeof(Progress)) == 0) {
    page = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (page == MAP_FAILED) {
    std::perror(path.c_str());
    std::abort();
  }
  close(fd);
  return SharedProgress(static_cast<Progress*>(page));
}

}  // namespace shardd::test

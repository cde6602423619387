// Times that a rank of bench/run recovery shares with the benchmark, of the monotonic clock.
#ifndef SHARDD_BENCH_RESTART_PAGE_H_
#define SHARDD_BENCH_RESTART_PAGE_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace shardd::bench {

struct RestartTimes {
  std::atomic<double> started;    // the process began
  std::atomic<double> opened;     // Open returned: the group has formed
  std::atomic<double> regrouped;  // a verb last said so
  std::atomic<double> decided_at;
  std::atomic<uint64_t> decided;  // steps
};

// Maps the page at a path, made if it is missing.
class RestartPage {
 public:
  explicit RestartPage(const std::string& path) {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void* page = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, sizeof(RestartTimes)) == 0) {
      page = mmap(nullptr, sizeof(RestartTimes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (page == MAP_FAILED) {
      std::perror(path.c_str());
      std::exit(1);
    }
    close(fd);
    times_ = static_cast<RestartTimes*>(page);
  }
  ~RestartPage() { munmap(times_, sizeof(RestartTimes)); }
  RestartPage(const RestartPage&) = delete;
  RestartTimes* operator->() const { return times_; }

 private:
  RestartTimes* times_;
};

}  // namespace shardd::bench

#endif  // SHARDD_BENCH_RESTART_PAGE_H_

// Plain sequential reads and writes, as references for what goes through a disk.
#ifndef SHARDD_BENCH_DISK_H_
#define SHARDD_BENCH_DISK_H_

#include <cstdint>
#include <string>
#include <vector>

namespace shardd::bench {

// Writes `bytes` to a file of its own in `directory`, which it made beforehand, around the page
// cache, and fdatasyncs it; seconds of that. Ends the process when it cannot.
class DiskWriter {
 public:
  DiskWriter(const std::string& directory, uint64_t bytes);
  ~DiskWriter();
  DiskWriter(const DiskWriter&) = delete;
  double Seconds();

 private:
  std::string path_;
  uint64_t bytes_;
  int fd_ = -1;
  void* buffer_ = nullptr;
};

// Reads the parts around the page cache, 8 MiB at a time, one after the other; seconds of that.
// Offsets and lengths are multiples of 4096.
struct FilePart {
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};
double ReadSeconds(const std::vector<FilePart>& files);

}  // namespace shardd::bench

#endif  // SHARDD_BENCH_DISK_H_

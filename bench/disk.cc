#include "bench/disk.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bench/measure.h"

namespace shardd::bench {

namespace {

constexpr uint64_t kBlock = 8 << 20;

[[noreturn]] void Die(const std::string& what) {
  std::perror(("bench: " + what).c_str());
  std::exit(1);
}

void* AlignedBlock() {
  void* block = std::aligned_alloc(4096, kBlock);
  if (block == nullptr) Die("memory");
  std::memset(block, 0x3f, kBlock);
  return block;
}

}  // namespace

DiskWriter::DiskWriter(const std::string& directory, uint64_t bytes)
    : path_(directory + "/shardd-bench-write"), bytes_((bytes + kBlock - 1) / kBlock * kBlock) {
  fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd_ < 0) Die("create " + path_);
  if (posix_fallocate(fd_, 0, static_cast<off_t>(bytes_)) != 0) Die("fallocate " + path_);
  if (fcntl(fd_, F_SETFL, O_DIRECT) != 0) Die("O_DIRECT on " + path_);
  buffer_ = AlignedBlock();
  Seconds();  // the extents are written once
}

DiskWriter::~DiskWriter() {
  close(fd_);
  unlink(path_.c_str());
  std::free(buffer_);
}

double DiskWriter::Seconds() {
  const double begun = Now();
  for (uint64_t at = 0; at < bytes_; at += kBlock) {
    if (pwrite(fd_, buffer_, kBlock, static_cast<off_t>(at)) != static_cast<ssize_t>(kBlock)) {
      Die("write " + path_);
    }
  }
  if (fdatasync(fd_) != 0) Die("fdatasync " + path_);
  return Now() - begun;
}

double ReadSeconds(const std::vector<FilePart>& files) {
  void* block = AlignedBlock();
  const double begun = Now();
  for (const FilePart& part : files) {
    const int fd = open(part.path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0) Die("open " + part.path);
    for (uint64_t at = 0; at < part.bytes;) {
      const uint64_t wanted = std::min(kBlock, part.bytes - at);
      const ssize_t n = pread(fd, block, wanted, static_cast<off_t>(part.offset + at));
      if (n <= 0) Die("read " + part.path);
      at += static_cast<uint64_t>(n);
    }
    close(fd);
  }
  const double seconds = Now() - begun;
  std::free(block);
  return seconds;
}

}  // namespace shardd::bench

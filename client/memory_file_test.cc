#include "client/memory_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>

namespace shardd {
namespace {

uint64_t HeldBytes(const MemoryFile& file) {
  struct stat info;
  EXPECT_EQ(fstat(file.fd(), &info), 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

TEST(MemoryFile, HoldsOnlyWhatIsTouchedAndCarriesItsName) {
  MemoryFile file = *MemoryFile::Create("shardd-test-name", 1 << 20, false);
  EXPECT_EQ(file.size(), 1u << 20);
  EXPECT_EQ(HeldBytes(file), 0u);
  std::memset(file.data() + 8192, 1, 4096);
  EXPECT_EQ(HeldBytes(file), 4096u);
  std::ifstream maps("/proc/self/maps");
  const std::string text((std::istreambuf_iterator<char>(maps)), {});
  EXPECT_NE(text.find("/memfd:shardd-test-name"), std::string::npos);
}

TEST(MemoryFile, DiscardGivesWholePagesBack) {
  MemoryFile file = *MemoryFile::Create("x", 5 * 4096, false);
  std::memset(file.data(), 7, file.size());
  file.Discard(100, 3 * 4096 + 100);  // pages 1 and 2 are inside
  EXPECT_EQ(HeldBytes(file), 3u * 4096);
  EXPECT_EQ(file.data()[4095], std::byte{7});
  EXPECT_EQ(file.data()[4096], std::byte{0});
  EXPECT_EQ(file.data()[3 * 4096], std::byte{7});
  file.Discard(10, 4000);  // none inside
  file.Discard(8192, 4096);
  EXPECT_EQ(file.data()[4095], std::byte{7});
  file.Discard(4 * 4096, 100 * 4096);
  EXPECT_EQ(file.data()[4 * 4096], std::byte{0});
}

TEST(MemoryFile, IsNotInheritedByFork) {
  MemoryFile file = *MemoryFile::Create("x", 4096, false);
  file.data()[0] = std::byte{1};
  const pid_t child = fork();
  if (child == 0) {
    unsigned char in_core;
    _exit(mincore(file.data(), 4096, &in_core) != 0 && errno == ENOMEM ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child has the mapping";
}

TEST(ReadOnlyMapping, RefusesAFileThatIsTooShort) {
  MemoryFile file = *MemoryFile::Create("x", 4096, false);
  const absl::Status status =
      ReadOnlyMapping::Map(contract::UniqueFd(dup(file.fd())), 8192, "the segment").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("the segment has 4096 bytes"), std::string::npos);
  EXPECT_FALSE(ReadOnlyMapping::Map(contract::UniqueFd(dup(file.fd())), 0, "x").ok());
  EXPECT_TRUE(ReadOnlyMapping::Map(contract::UniqueFd(dup(file.fd())), 4096, "x").ok());
}

}  // namespace
}  // namespace shardd

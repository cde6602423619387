// A directory of a test's own.
#ifndef SHARDD_TESTS_SUPPORT_TEMP_DIR_H_
#define SHARDD_TESTS_SUPPORT_TEMP_DIR_H_

#include <string>

namespace shardd::test {

// A directory under `parent` ("/tmp", "/dev/shm"), removed with its contents at the end.
class TempDir {
 public:
  explicit TempDir(const std::string& parent = "/tmp");
  ~TempDir();
  TempDir(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace shardd::test

#endif  // SHARDD_TESTS_SUPPORT_TEMP_DIR_H_

#include "tests/support/temp_dir.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace shardd::test {

TempDir::TempDir(const std::string& parent) {
  path_ = parent + "/shardd-test-XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) {
    std::fprintf(stderr, "test set-up: cannot make a directory in %s\n", parent.c_str());
    std::abort();
  }
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace shardd::test

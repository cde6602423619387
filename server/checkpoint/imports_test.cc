#include "server/checkpoint/imports.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace shardd::checkpoint {
namespace {

class ImportsTest : public testing::Test {
 protected:
  ImportsTest() {
    char name[] = "/tmp/shardd-imports-XXXXXX";
    root_ = mkdtemp(name);
  }
  ~ImportsTest() override { std::filesystem::remove_all(root_); }
  std::string root_;
};

TEST_F(ImportsTest, WaitUntilTheyAreTakenAndOutliveTheDaemon) {
  {
    Imports imports(env::PosixFileSystem(), root_ + "/.imports");
    EXPECT_FALSE(imports.Find("gpt")->has_value());
    EXPECT_TRUE(imports.Remove("gpt").ok());
    ASSERT_TRUE(imports.Put("gpt", {"/a", 7, 100}).ok());
    ASSERT_TRUE(imports.Put("gpt", {"/b \"x\"", 8, 200}).ok());  // replaces
  }
  Imports imports(env::PosixFileSystem(), root_ + "/.imports");
  const auto found = imports.Find("gpt");
  ASSERT_TRUE(found.ok() && found->has_value()) << found.status();
  EXPECT_EQ((*found)->path, "/b \"x\"");
  EXPECT_EQ((*found)->uid, 8u);
  EXPECT_EQ((*found)->bytes, 200u);
  EXPECT_FALSE(imports.Find("other")->has_value());
  ASSERT_TRUE(imports.Remove("gpt").ok());
  EXPECT_FALSE(imports.Find("gpt")->has_value());
}

TEST_F(ImportsTest, DamageIsNamed) {
  Imports imports(env::PosixFileSystem(), root_);
  std::ofstream(root_ + "/gpt") << "{";
  EXPECT_TRUE(absl::IsDataLoss(imports.Find("gpt").status()));
}

TEST_F(ImportsTest, DamageOfAnyKindIsNamed) {
  Imports imports(env::PosixFileSystem(), root_);
  for (const char* text : {"{\"path\":\"/a\",\"uid\":\"x\",\"bytes\":1}", "[]",
                           "{\"path\":\"/a\",\"uid\":1}", "{\"path\":3,\"uid\":1,\"bytes\":1}"}) {
    std::ofstream(root_ + "/gpt") << text;
    EXPECT_TRUE(absl::IsDataLoss(imports.Find("gpt").status())) << text;
  }
}

// The daemon may read what its clients may not.
TEST_F(ImportsTest, OnlyWhatTheUserMayReadIsRead) {
  std::filesystem::create_directories(root_ + "/theirs");
  const std::string path = root_ + "/theirs/file";
  std::ofstream(path) << "x";
  const uint32_t me = geteuid(), other = me + 1;
  ASSERT_EQ(chmod((root_ + "/theirs").c_str(), 0755), 0);
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  EXPECT_TRUE(CheckMayRead(root_, path, me).ok());
  const absl::Status refused = CheckMayRead(root_, path, other);
  EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
  EXPECT_NE(refused.message().find(path), std::string::npos) << refused;
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  EXPECT_TRUE(CheckMayRead(root_, path, other).ok());
  ASSERT_EQ(chmod((root_ + "/theirs").c_str(), 0750), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(CheckMayRead(root_, path, other)));
  // Replaced by a link after it was resolved.
  ASSERT_EQ(chmod((root_ + "/theirs").c_str(), 0755), 0);
  std::filesystem::rename(path, root_ + "/moved");
  std::filesystem::create_symlink(root_ + "/moved", path);
  EXPECT_TRUE(absl::IsPermissionDenied(CheckMayRead(root_, path, other)));
}

TEST_F(ImportsTest, OnlyWhatLiesBelowIsResolved) {
  std::filesystem::create_directories(root_ + "/in/sub");
  std::ofstream(root_ + "/in/sub/file") << "x";
  std::ofstream(root_ + "/out") << "x";
  std::filesystem::create_symlink(root_ + "/out", root_ + "/in/link");
  std::filesystem::create_symlink("sub/file", root_ + "/in/inner");
  const std::string in = root_ + "/in";
  EXPECT_EQ(*ResolveBelow(in, "sub/file"), in + "/sub/file");
  EXPECT_EQ(*ResolveBelow(in, in + "/sub/../sub/file"), in + "/sub/file");
  EXPECT_EQ(*ResolveBelow(in, "inner"), in + "/sub/file");
  for (const std::string& path : {std::string("../out"), std::string("link"), root_ + "/out"}) {
    EXPECT_TRUE(absl::IsPermissionDenied(ResolveBelow(in, path).status())) << path;
  }
  EXPECT_TRUE(absl::IsNotFound(ResolveBelow(in, "none").status()));
}

}  // namespace
}  // namespace shardd::checkpoint

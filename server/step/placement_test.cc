#include "server/step/placement.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace shardd::step {
namespace {

contract::Layout Chunks(int64_t chunks) {
  contract::Layout::Options options;
  options.chunk_elements = options.bucket_elements = 4096;
  return *contract::Layout::Create({{"w", {chunks, 4096}, 0}}, options);
}

TEST(Placement, NeighboursOfOneDaemonAreOneRange) {
  const Placement placement = Placement::ForRanks(Chunks(10), {"a", "a", "b", "a"});
  ASSERT_EQ(placement.ranges().size(), 3u);
  EXPECT_EQ(placement.OwnerOf(0), "a");
  EXPECT_EQ(placement.OwnerOf(4), "a");
  EXPECT_EQ(placement.OwnerOf(5), "b");
  EXPECT_EQ(placement.OwnerOf(9), "a");
  EXPECT_EQ(placement.OwnerOf(10), "");
  EXPECT_EQ(CountChunks(placement.ChunksOf("a")), 8u);
  EXPECT_EQ(placement.Daemons(), (std::set<std::string>{"a", "b"}));
}

TEST(Placement, GoesThroughAMessageAndIsChecked) {
  const Placement placement = Placement::ForRanks(Chunks(5), {"a", "b", "c"});
  v1::JobPeers peers;
  placement.ToProto(peers.mutable_owners());
  EXPECT_EQ(*Placement::FromProto(peers.owners(), 5), placement);
  EXPECT_FALSE(Placement::FromProto(peers.owners(), 6).ok());
  EXPECT_FALSE(Placement::FromProto(peers.owners(), 4).ok());
  peers.mutable_owners(1)->set_first_chunk(0);
  EXPECT_FALSE(Placement::FromProto(peers.owners(), 5).ok());
  EXPECT_TRUE(Placement::FromProto({}, 5)->empty());
}

TEST(Placement, Difference) {
  using Ranges = std::vector<contract::Range>;
  EXPECT_EQ(Without({{0, 10}}, {{2, 4}, {6, 7}}), (Ranges{{0, 2}, {4, 6}, {7, 10}}));
  EXPECT_EQ(Without({{0, 4}, {6, 8}}, {{0, 10}}), Ranges{});
  EXPECT_EQ(Without({{3, 5}}, {}), (Ranges{{3, 5}}));
}

TEST(JobPeers, AreStoredWholeOrNotAtAll) {
  std::string path = (std::filesystem::temp_directory_path() / "peers_XXXXXX").string();
  path = mkdtemp(path.data());
  EXPECT_TRUE(absl::IsNotFound(ReadJobPeers(path).status()));
  v1::JobPeers peers;
  peers.set_coordinator("a");
  peers.set_epoch(3);
  ASSERT_TRUE(WriteJobPeers(path, peers).ok());
  EXPECT_EQ(ReadJobPeers(path)->epoch(), 3u);
  std::ofstream(path + "/peers") << "\xff\xff";
  EXPECT_TRUE(absl::IsDataLoss(ReadJobPeers(path).status()));
  std::filesystem::remove_all(path);
  EXPECT_FALSE(WriteJobPeers(path, peers).ok());
}

}  // namespace
}  // namespace shardd::step

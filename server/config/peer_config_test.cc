#include "server/config/peer_config.h"

#include <gtest/gtest.h>

namespace shardd::config {
namespace {

TEST(CheckPeerConfig, NamesWhatIsWrong) {
  v1::DaemonConfig::Peer config;
  config.set_name("a b");
  EXPECT_NE(CheckPeerConfig(config).message().find("peer.name is 'a b'"), std::string::npos);
  config.set_name("a");
  config.set_listen("somewhere");
  EXPECT_NE(CheckPeerConfig(config).message().find("peer.listen"), std::string::npos);
  config.set_listen("[::1]:0");
  EXPECT_TRUE(CheckPeerConfig(config).ok());
  config.add_peers()->set_name("a");
  EXPECT_NE(CheckPeerConfig(config).message().find("peer.peers[0].name 'a' is there twice"),
            std::string::npos);
  config.mutable_peers(0)->set_name("b");
  EXPECT_NE(CheckPeerConfig(config).message().find("peer.peers[0].address"), std::string::npos);
}

}  // namespace
}  // namespace shardd::config

// The configuration of a daemon that speaks to others: its checks.
#ifndef SHARDD_SERVER_CONFIG_PEER_CONFIG_H_
#define SHARDD_SERVER_CONFIG_PEER_CONFIG_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/daemon_config.pb.h"

namespace shardd::config {

// Splits HOST:PORT ("[::1]:80" too). InvalidArgument says what is wrong.
struct HostPort {
  std::string host, port;
};
absl::StatusOr<HostPort> SplitHostPort(const std::string& address);

// InvalidArgument: what is wrong with a section that gives a name, listen or peers.
absl::Status CheckPeerConfig(const v1::DaemonConfig::Peer& config);

}  // namespace shardd::config

#endif  // SHARDD_SERVER_CONFIG_PEER_CONFIG_H_

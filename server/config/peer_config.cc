#include "server/config/peer_config.h"

#include <cctype>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace shardd::config {

namespace {

absl::Status CheckName(const char* key, const std::string& name) {
  bool good = !name.empty() && name.size() <= 63 && name.front() != '-';
  for (char c : name) good = good && (std::isalnum(static_cast<unsigned char>(c)) || c == '-');
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(key, " is '", name, "'; a name has 1 to 63 letters, digits and '-'"));
}

}  // namespace

absl::StatusOr<HostPort> SplitHostPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(absl::string_view(address).substr(colon + 1), &port) || port < 0 ||
      port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", address, "' is no HOST:PORT, such as 10.0.0.7:7700"));
  }
  HostPort parts{address.substr(0, colon), address.substr(colon + 1)};
  if (parts.host.size() > 2 && parts.host.front() == '[' && parts.host.back() == ']') {
    parts.host = parts.host.substr(1, parts.host.size() - 2);
  }
  return parts;
}

absl::Status CheckPeerConfig(const v1::DaemonConfig::Peer& config) {
  if (absl::Status s = CheckName("peer.name", config.name()); !s.ok()) return s;
  if (absl::Status s = SplitHostPort(config.listen()).status(); !s.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("peer.listen: ", s.message()));
  }
  std::set<std::string> names = {config.name()};
  for (int i = 0; i < config.peers_size(); ++i) {
    const std::string key = absl::StrCat("peer.peers[", i, "]");
    const auto& daemon = config.peers(i);
    if (absl::Status s = CheckName((key + ".name").c_str(), daemon.name()); !s.ok()) return s;
    if (!names.insert(daemon.name()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(key, ".name '", daemon.name(), "' is there twice"));
    }
    if (absl::Status s = SplitHostPort(daemon.address()).status(); !s.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(key, ".address: ", s.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd::config

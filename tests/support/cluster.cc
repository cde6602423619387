#include "tests/support/cluster.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>

#include "server/env/faulty_file_system.h"

namespace shardd::test {

Cluster::Cluster(size_t daemons, const std::vector<std::string>& extra,
                 const std::vector<std::string>& flags)
    : extra_(extra), flags_(flags) {
  std::string command = Runfile("deploy/certs") + " " + certificates_.path();
  for (size_t i = 0; i < daemons; ++i) command += " " + Name(i);
  for (const std::string& name : extra) command += " " + name;
  if (std::system((command + " >/dev/null").c_str()) != 0) std::abort();
  for (size_t i = 0; i < daemons + extra.size(); ++i) {
    networks_.push_back(std::make_unique<TcpProxy>());
  }
  for (size_t i = 0; i < daemons; ++i) states_.push_back(std::make_unique<TempDir>("/dev/shm"));
  daemons_.resize(daemons);
  ports_.resize(daemons);
  for (size_t i = 0; i < daemons; ++i) Start(i);
  if (extra.empty()) AwaitLinks();
}

void Cluster::Start(size_t i) {
  DaemonProcess::Options options;
  options.state_directory = state_directory(i);
  options.socket = states_[i]->path() + "/run/d.sock";
  const std::string certificate = certificates_.path() + "/" + Name(i);
  options.flags = {"--peer.name=" + Name(i), "--peer.listen=127.0.0.1:0",
                   "--peer.ca=" + certificates_.path() + "/ca.pem",
                   "--peer.certificate=" + certificate + ".pem",
                   "--peer.key=" + certificate + ".key"};
  size_t n = 0;
  for (size_t peer = 0; peer < networks_.size(); ++peer) {
    if (peer == i) continue;
    const std::string at = "--peer.peers[" + std::to_string(n++) + "].";
    const std::string name = peer < daemons_.size() ? Name(peer) : extra_[peer - daemons_.size()];
    options.flags.push_back(at + "name=" + name);
    options.flags.push_back(at + "address=127.0.0.1:" + std::to_string(networks_[peer]->port()));
  }
  const std::vector<std::string>& own = own_flags_[i];
  options.flags.insert(options.flags.end(), flags_.begin(), flags_.end());
  options.flags.insert(options.flags.end(), own.begin(), own.end());
  for (std::string& flag : options.flags) {
    const size_t at = flag.find("{own}");
    if (at != std::string::npos) flag.replace(at, 5, own_directory(i));
  }
  daemons_[i] = std::make_unique<DaemonProcess>(options);
  ports_[i] = static_cast<uint16_t>(daemons_[i]->Info().peer_port());
  networks_[i]->SetTarget(ports_[i]);
}

void Cluster::Kill(size_t i) {
  kill(daemons_[i]->pid(), SIGKILL);
  AwaitDeath(i);
}

void Cluster::LoseMachine(size_t i, const std::string& directory, uint64_t seed) {
  std::filesystem::remove_all(state_directory(i));
  const absl::Status dropped = env::DropUnsynced(own_directory(i) + "/" + directory, seed);
  EXPECT_TRUE(dropped.ok()) << dropped;
}

void Cluster::LoseMachineAndDisk(size_t i) {
  for (const auto& entry : std::filesystem::directory_iterator(own_directory(i))) {
    std::filesystem::remove_all(entry.path());
  }
}

void Cluster::AwaitDeath(size_t i) {
  daemons_[i]->AwaitDeath();
  networks_[i]->SetTarget(0);
  networks_[i]->BreakConnections();
}

void Cluster::Partition(size_t i) {
  // Of two daemons both directions; of more, what leads to this one and what it dials.
  for (size_t j = 0; j < networks_.size(); ++j) {
    if (j == i || daemons_.size() == 2) networks_[j]->Cut();
  }
}

void Cluster::Heal(size_t) {
  for (auto& network : networks_) network->Mend();
}

void Cluster::AwaitLinks() {
  for (const auto& daemon : daemons_) {
    for (bool all = false; !all;) {
      all = true;
      const v1::ServerInfoReply info = daemon->Info();
      for (const v1::PeerStatus& peer : info.peers()) all = all && peer.connected();
    }
  }
}

Processes StartRanks(Cluster* cluster, const std::vector<size_t>& where,
                     std::vector<std::string> flags) {
  Processes ranks;
  for (uint32_t r = 0; r < where.size(); ++r) {
    ranks.push_back(std::make_unique<RankProcess>((*cluster)[where[r]].socket(), r,
                                                  static_cast<uint32_t>(where.size()), flags));
  }
  return ranks;
}

std::string FinishRanks(Processes* ranks) {
  std::string digest;
  for (auto& rank : *ranks) {
    const std::string done = rank->AwaitLine("done");
    EXPECT_NE(done, "");
    EXPECT_EQ(rank->Wait(), 0);
    if (digest.empty()) digest = done;
    EXPECT_EQ(done, digest);
  }
  return digest;
}

void KillRanks(Processes* ranks) {
  for (auto& rank : *ranks) {
    rank->Signal(SIGKILL);
    rank->Wait();
  }
  ranks->clear();
}

}  // namespace shardd::test

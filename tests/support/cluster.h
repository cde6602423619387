// Several daemons that know each other, with certificates and a network of the test's own.
#ifndef SHARDD_TESTS_SUPPORT_CLUSTER_H_
#define SHARDD_TESTS_SUPPORT_CLUSTER_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"
#include "tests/support/tcp_proxy.h"
#include "tests/support/temp_dir.h"

namespace shardd::test {

class Cluster {
 public:
  // Daemons "a", "b", ... ; `extra` names are configured as peers and have certificates, but are
  // not started. In `flags`, {own} stands for the daemon's own directory.
  explicit Cluster(size_t daemons, const std::vector<std::string>& extra = {},
                   const std::vector<std::string>& flags = {});

  DaemonProcess& operator[](size_t i) { return *daemons_[i]; }
  size_t size() const { return daemons_.size(); }
  static std::string Name(size_t i) { return std::string(1, static_cast<char>('a' + i)); }
  const std::string& certificates() const { return certificates_.path(); }
  TcpProxy& network(size_t i) { return *networks_[i]; }  // what leads to daemon i
  std::string own_directory(size_t i) const { return states_[i]->path(); }
  std::string state_directory(size_t i) const { return states_[i]->path() + "/state"; }
  uint16_t port(size_t i) const { return ports_[i]; }

  // SIGKILL, SIGTERM and a new process on the same state; the last waits until it is ready.
  void Kill(size_t i);
  void AwaitDeath(size_t i);
  void Start(size_t i);
  // Flags that daemon i has besides, from its next start on.
  void SetFlags(size_t i, std::vector<std::string> flags) { own_flags_[i] = std::move(flags); }
  // After its death: its state directory is gone, and what its disk (`directory`, of its own) had
  // not been told to keep; it runs with --file_faults=unsynced. `seed` as DropUnsynced's.
  void LoseMachine(size_t i, const std::string& directory, uint64_t seed = 0);
  // After its death: all that its machine had is gone, disks too.
  void LoseMachineAndDisk(size_t i);
  // Cuts daemon i off from all others, and back.
  void Partition(size_t i);
  void Heal(size_t i);
  // Waits until every daemon's links to all others stand.
  void AwaitLinks();

 private:
  TempDir certificates_{"/tmp"};
  std::vector<std::string> extra_, flags_;
  std::map<size_t, std::vector<std::string>> own_flags_;
  std::vector<std::unique_ptr<TempDir>> states_;
  std::vector<std::unique_ptr<TcpProxy>> networks_;
  std::vector<uint16_t> ports_;
  std::vector<std::unique_ptr<DaemonProcess>> daemons_;
};

using Processes = std::vector<std::unique_ptr<RankProcess>>;

// Toy ranks, rank r at daemon where[r].
Processes StartRanks(Cluster* cluster, const std::vector<size_t>& where,
                     std::vector<std::string> flags = {"--job=toy"});
// Lets all finish; they must agree, and their state is returned as a digest.
std::string FinishRanks(Processes* ranks);
// Ends them whatever they do.
void KillRanks(Processes* ranks);

}  // namespace shardd::test

#endif  // SHARDD_TESTS_SUPPORT_CLUSTER_H_

// One job from its first step to its last, with daemons and ranks that die on the way.
#ifndef SHARDD_TESTS_CHAOS_ROUND_H_
#define SHARDD_TESTS_CHAOS_ROUND_H_

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/chaos/process.h"
#include "tests/chaos/progress.h"
#include "tests/support/temp_dir.h"

namespace shardd::test {

// Where the programs are.
struct Programs {
  std::string shardd, shardctl, rank, certs;
};

struct RoundOptions {
  Programs programs;
  uint32_t daemons = 1;
  uint32_t ranks = 3;
  uint32_t slots = 4;
  uint32_t steps = 300;
  uint32_t stage = 1;
  bool private_weights = false;
  bool journal = false;  // durability = node, and machines are lost too
  bool keep = false;     // leave the directories for a look
};

// What was done to a run, and how it came out of it.
struct Tally {
  struct Kills {
    uint64_t uniform = 0;  // at a moment drawn uniformly
    uint64_t aimed = 0;    // at a failpoint
  };
  std::map<std::string, Kills> kills;  // by phase
  uint64_t in_step = 0;                // of the uniform ones
  uint64_t machines_lost = 0;
  uint64_t rank_freezes = 0, daemon_freezes = 0;
  std::vector<double> recovery_seconds;  // from an event to the next committed step
  uint64_t rounds = 0, steps = 0, regroups = 0;

  uint64_t Total() const;
  uint64_t Uniform() const;
};

// Of a daemon in a job.
enum class Role { kAny, kCoordinator, kOther };

class Round {
 public:
  Round(const RoundOptions& options, uint64_t seed);
  ~Round();

  // Runs to the end. With `tally`, kills and freezes until `until`. Returns the digest of the
  // final state; "" with the reason in `failure`.
  std::string Run(Tally* tally, absl::Time until, std::string* failure);

 private:
  struct Node {
    std::string name, socket, state, journal, log;
    int port = 0;
    Process process;
    absl::Time thaw = absl::InfiniteFuture();  // frozen until then
  };
  struct Rank {
    Process process;
    SharedProgress progress;
    std::string log;
    Node* node = nullptr;
    bool finished = false;
    absl::Time thaw = absl::InfiniteFuture();
    uint32_t starts = 0;
  };

  void StartDaemon(Node* node, const std::string& failpoint);
  bool AwaitReady(Node* node);
  void StartRank(uint32_t rank);
  void Thaw();
  std::string Poll();  // the failure, if there is one
  uint64_t Decided() const;
  void Event(Tally* tally);
  void KillRank(Tally* tally);
  void KillDaemon(Tally* tally);
  Node* NodeOf(Role role);
  void AimAtDaemon(Tally* tally);
  void LoseMachine(Tally* tally);
  void Freeze(Tally* tally);
  void Bury(Node* node, Tally* tally, bool aimed);
  void Count(Tally* tally, const std::string& phase, bool in_step, bool aimed);
  double Draw(double low, double high);
  uint32_t Pick(uint32_t count);
  std::string Tail() const;

  const RoundOptions options_;
  std::mt19937_64 random_;
  TempDir shm_{"/dev/shm"};
  TempDir disk_{"/tmp"};
  std::vector<Node> nodes_;
  std::vector<Rank> ranks_;
  std::string failure_;
};

}  // namespace shardd::test

#endif  // SHARDD_TESTS_CHAOS_ROUND_H_

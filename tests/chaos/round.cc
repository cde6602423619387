#include "tests/chaos/round.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/env/faulty_file_system.h"
#include "server/step/placement.h"
#include "tests/chaos/post_mortem.h"

namespace shardd::test {

namespace {

constexpr char kJob[] = "chaos";
constexpr absl::Duration kLook = absl::Milliseconds(2);
// Nothing that is waited for takes this long.
constexpr absl::Duration kStuck = absl::Seconds(90);

// Where an aimed kill meets a daemon, and which one comes there. The pass at which it dies is
// drawn.
struct Aim {
  const char* failpoint;
  uint32_t passes;
  Role role = Role::kAny;
};
constexpr Aim kAims[] = {
    {"step.publish.after_descriptor", 60},
    {"step.reduce.after", 20},
    {"step.decide.before", 3, Role::kCoordinator},
    {"step.decide.after_record", 3, Role::kCoordinator},
    {"step.update.before", 3},
    {"step.update.after_chunk", 60},
    {"step.update.after", 3},
    // From here on of jobs that span daemons alone.
    {"peer.decision.before_send", 3, Role::kCoordinator},
    {"peer.prepared", 3, Role::kOther},
    {"peer.decision.received", 3, Role::kOther},
};
constexpr uint32_t kAimsOfOneDaemon = 7;

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

}  // namespace

uint64_t Tally::Total() const {
  uint64_t total = 0;
  for (const auto& [phase, count] : kills) total += count.uniform + count.aimed;
  return total;
}

uint64_t Tally::Uniform() const {
  uint64_t total = 0;
  for (const auto& [phase, count] : kills) total += count.uniform;
  return total;
}

Round::Round(const RoundOptions& options, uint64_t seed) : options_(options), random_(seed) {
  nodes_.resize(options_.daemons);
  std::vector<std::string> certs = {options_.programs.certs, disk_.path() + "/certs"};
  for (uint32_t n = 0; n < options_.daemons; ++n) {
    Node& node = nodes_[n];
    node.name = absl::StrCat("node-", n);
    node.socket = absl::StrCat(disk_.path(), "/", node.name, ".sock");
    node.state = absl::StrCat(shm_.path(), "/", node.name);
    node.journal = absl::StrCat(disk_.path(), "/", node.name, ".journal");
    node.log = absl::StrCat(disk_.path(), "/", node.name, ".log");
    node.port = options_.daemons > 1 ? FreePort() : 0;
    certs.push_back(node.name);
  }
  if (options_.daemons > 1 && RunToEnd(certs, disk_.path() + "/certs.log") != 0) {
    failure_ = "deploy/certs failed: " + ReadText(disk_.path() + "/certs.log");
  }
  ranks_.resize(options_.ranks);
  for (uint32_t r = 0; r < options_.ranks; ++r) {
    ranks_[r].progress = MapProgress(absl::StrCat(shm_.path(), "/rank-", r));
    ranks_[r].log = absl::StrCat(disk_.path(), "/rank-", r, ".log");
    ranks_[r].node = &nodes_[r * options_.daemons / options_.ranks];
  }
}

Round::~Round() {
  if (!options_.keep) return;
  const std::string kept = absl::StrCat("/tmp/chaos-", getpid());
  std::error_code ignored;
  std::filesystem::copy(disk_.path(), kept, std::filesystem::copy_options::recursive, ignored);
  std::fprintf(stderr, "logs are in %s\n", kept.c_str());
}

double Round::Draw(double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random_);
}

uint32_t Round::Pick(uint32_t count) {
  return std::uniform_int_distribution<uint32_t>(0, count - 1)(random_);
}

void Round::StartDaemon(Node* node, const std::string& failpoint) {
  std::vector<std::string> arguments = {
      options_.programs.shardd, "--listen.socket=" + node->socket,
      "--store.directory=" + node->state,
      "--spill.directory=" + absl::StrCat(disk_.path(), "/", node->name, ".spill"),
      "--failpoints=true"};
  if (options_.journal) {
    arguments.push_back("--journal.directory=" + node->journal);
    arguments.push_back("--file_faults=unsynced");
  }
  if (!failpoint.empty()) arguments.push_back(absl::StrCat("--arm_failpoint=", failpoint, ":kill"));
  if (options_.daemons > 1) {
    const std::string certs = disk_.path() + "/certs/";
    arguments.push_back("--peer.name=" + node->name);
    arguments.push_back(absl::StrCat("--peer.listen=127.0.0.1:", node->port));
    arguments.push_back(absl::StrCat("--peer.ca=", certs, "ca.pem"));
    arguments.push_back(absl::StrCat("--peer.certificate=", certs, node->name, ".pem"));
    arguments.push_back(absl::StrCat("--peer.key=", certs, node->name, ".key"));
    uint32_t index = 0;
    for (const Node& other : nodes_) {
      if (&other == node) continue;
      arguments.push_back(absl::StrCat("--peer.peers[", index, "].name=", other.name));
      arguments.push_back(absl::StrCat("--peer.peers[", index, "].address=127.0.0.1:", other.port));
      ++index;
    }
  }
  node->process = Process(arguments, node->log);
  node->thaw = absl::InfiniteFuture();
}

// The socket is there once it serves; it is removed by the one that follows a dead one.
bool Round::AwaitReady(Node* node) {
  const absl::Time deadline = absl::Now() + kStuck;
  int status = 0;
  while (absl::Now() < deadline) {
    if (node->process.Ended(&status)) return false;
    if (RunToEnd({options_.programs.shardctl, "jobs", "--address=" + node->socket}, "/dev/null") ==
        0) {
      return true;
    }
    absl::SleepFor(kLook);
  }
  failure_ = absl::StrCat(node->name, " does not serve");
  return false;
}

void Round::StartRank(uint32_t index) {
  Rank& rank = ranks_[index];
  rank.progress->phase = static_cast<uint32_t>(RankPhase::kStarting);
  rank.process =
      Process({options_.programs.rank, "--socket=" + rank.node->socket,
               absl::StrCat("--rank=", index), absl::StrCat("--world=", options_.ranks),
               absl::StrCat("--job=", kJob), absl::StrCat("--steps=", options_.steps),
               absl::StrCat("--slots=", options_.slots), absl::StrCat("--stage=", options_.stage),
               absl::StrCat("--private=", options_.private_weights ? 1 : 0),
               absl::StrCat("--restarted=", rank.starts > 0 ? 1 : 0),
               absl::StrCat("--progress=", shm_.path(), "/rank-", index)},
              rank.log);
  rank.thaw = absl::InfiniteFuture();
  ++rank.starts;
}

uint64_t Round::Decided() const {
  uint64_t decided = 0;
  for (const Rank& rank : ranks_) decided = std::max(decided, rank.progress->decided.load());
  return decided;
}

std::string Round::Tail() const {
  std::string text;
  const auto add = [&](const std::string& name, const std::string& path) {
    const std::string all = ReadText(path);
    absl::StrAppend(&text, "--- ", name, "\n",
                    all.size() > 3000 ? all.substr(all.size() - 3000) : all);
  };
  for (const Node& node : nodes_) add(node.name, node.log);
  for (size_t r = 0; r < ranks_.size(); ++r) add(absl::StrCat("rank ", r), ranks_[r].log);
  return text;
}

// Whoever has been frozen for long enough goes on.
void Round::Thaw() {
  const absl::Time now = absl::Now();
  for (Rank& rank : ranks_) {
    if (now < rank.thaw) continue;
    rank.process.Signal(SIGCONT);
    rank.thaw = absl::InfiniteFuture();
  }
  for (Node& node : nodes_) {
    if (now < node.thaw) continue;
    node.process.Signal(SIGCONT);
    node.thaw = absl::InfiniteFuture();
  }
}

// Notices who has ended.
std::string Round::Poll() {
  Thaw();
  int status = 0;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (!rank.process.running() || !rank.process.Ended(&status)) continue;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      return absl::StrCat("rank ", r, " ended with status ", status, "\n", Tail());
    }
    rank.finished = true;
  }
  for (Node& node : nodes_) {
    if (node.process.running() && node.process.Ended(&status)) {
      return absl::StrCat(node.name, " ended by itself with status ", status, "\n", Tail());
    }
  }
  return failure_.empty() ? "" : absl::StrCat(failure_, "\n", Tail());
}

void Round::Count(Tally* tally, const std::string& phase, bool in_step, bool aimed) {
  if (aimed) {
    ++tally->kills[phase].aimed;
    return;
  }
  ++tally->kills[phase].uniform;
  tally->in_step += in_step ? 1 : 0;
}

void Round::KillRank(Tally* tally) {
  const uint32_t index = Pick(options_.ranks);
  Rank& rank = ranks_[index];
  if (rank.finished || !rank.process.running()) return;
  rank.process.Signal(SIGKILL);
  rank.process.Wait();
  const auto phase = static_cast<RankPhase>(rank.progress->phase.load());
  Count(tally, kRankPhaseNames[static_cast<size_t>(phase)], IsInStep(phase), false);
  StartRank(index);
}

// It is dead: says where it was, and starts it again; sometimes that one is killed while it takes
// up what was left.
void Round::Bury(Node* node, Tally* tally, bool aimed) {
  const DaemonPhase phase = FindDaemonPhase(node->state, kJob, node->name);
  Count(tally, kDaemonPhaseNames[static_cast<size_t>(phase)], phase != DaemonPhase::kStarting,
        aimed);
  for (int again = Pick(4) == 0 ? 2 : 0; again > 0; --again) {
    StartDaemon(node, "");
    absl::SleepFor(absl::Seconds(Draw(0.001, 0.04)));
    node->process.Signal(SIGKILL);
    node->process.Wait();
    Count(tally, kDaemonPhaseNames[static_cast<size_t>(DaemonPhase::kStarting)], false, false);
  }
  StartDaemon(node, "");
  if (!AwaitReady(node) && failure_.empty()) {
    failure_ = absl::StrCat(node->name, " ended while it took up what was left");
  }
}

void Round::KillDaemon(Tally* tally) {
  Node& node = nodes_[Pick(options_.daemons)];
  node.process.Signal(SIGKILL);
  node.process.Wait();
  Bury(&node, tally, false);
}

// A daemon that comes to `aim`; nullptr while nobody coordinates.
Round::Node* Round::NodeOf(Role role) {
  if (options_.daemons == 1) return &nodes_[0];
  Node* drawn = &nodes_[Pick(options_.daemons)];
  if (role == Role::kAny) return drawn;
  const auto peers = step::ReadJobPeers(absl::StrCat(drawn->state, "/jobs/", kJob));
  if (!peers.ok()) return nullptr;
  Node* other = nullptr;
  for (Node& node : nodes_) {
    const bool coordinates = node.name == peers->coordinator();
    if (coordinates == (role == Role::kCoordinator)) other = &node;
  }
  return other;
}

void Round::AimAtDaemon(Tally* tally) {
  const Aim& aim = kAims[Pick(options_.daemons == 1 ? kAimsOfOneDaemon : std::size(kAims))];
  Node* const found = NodeOf(aim.role);
  if (found == nullptr) return;
  Node& node = *found;
  node.process.Signal(SIGCONT);  // it has to listen
  if (RunToEnd({options_.programs.shardctl, "failpoint", "arm", aim.failpoint, "--action=kill",
                absl::StrCat("--skip=", Pick(aim.passes)), "--address=" + node.socket},
               disk_.path() + "/shardctl.log") != 0) {
    failure_ = "cannot arm a failpoint: " + ReadText(disk_.path() + "/shardctl.log");
    return;
  }
  const absl::Time deadline = absl::Now() + kStuck;
  int status = 0;
  while (!node.process.Ended(&status)) {
    Thaw();
    for (const Rank& rank : ranks_) {
      // The last steps may not come to the failpoint any more.
      if (rank.progress->done.load() != 0) {
        node.process.Signal(SIGKILL);
        node.process.Wait();
        return Bury(&node, tally, false);
      }
    }
    if (absl::Now() > deadline) {
      failure_ = absl::StrCat(node.name, " did not come to ", aim.failpoint);
      return;
    }
    absl::SleepFor(kLook);
  }
  Bury(&node, tally, true);
}

// The node's memory goes with it, and what its disk was not told to keep.
void Round::LoseMachine(Tally* tally) {
  Node& node = nodes_[Pick(options_.daemons)];
  node.process.Signal(SIGKILL);
  node.process.Wait();
  const DaemonPhase phase = FindDaemonPhase(node.state, kJob, node.name);
  Count(tally, kDaemonPhaseNames[static_cast<size_t>(phase)], phase != DaemonPhase::kStarting,
        false);
  ++tally->machines_lost;
  std::filesystem::remove_all(node.state);
  for (Rank& rank : ranks_) {
    // Its trainers died with the machine.
    if (rank.node != &node || rank.finished) continue;
    rank.process.Signal(SIGKILL);
    rank.process.Wait();
  }
  if (const absl::Status dropped = env::DropUnsynced(node.journal); !dropped.ok()) {
    failure_ = dropped.ToString();
    return;
  }
  StartDaemon(&node, "");
  if (!AwaitReady(&node) && failure_.empty()) failure_ = "no recovery from the journal";
  for (uint32_t r = 0; r < options_.ranks; ++r) {
    if (ranks_[r].node == &node && !ranks_[r].finished) StartRank(r);
  }
}

void Round::Freeze(Tally* tally) {
  const absl::Time thaw = absl::Now() + absl::Seconds(Draw(0.05, 2.5));
  if (Pick(3) == 0) {
    Node& node = nodes_[Pick(options_.daemons)];
    node.process.Signal(SIGSTOP);
    node.thaw = thaw;
    ++tally->daemon_freezes;
    return;
  }
  Rank& rank = ranks_[Pick(options_.ranks)];
  if (rank.finished) return;
  rank.process.Signal(SIGSTOP);
  rank.thaw = thaw;
  ++tally->rank_freezes;
}

void Round::Event(Tally* tally) {
  const uint32_t dice = Pick(100);
  if (dice < 40) return KillRank(tally);
  if (dice < 70) return KillDaemon(tally);
  if (dice < 80) return AimAtDaemon(tally);
  if (dice < 87) return Freeze(tally);
  if (options_.journal && dice < 97) return LoseMachine(tally);
  KillRank(tally);
  KillDaemon(tally);
}

std::string Round::Run(Tally* tally, absl::Time until, std::string* failure) {
  for (Node& node : nodes_) StartDaemon(&node, "");
  for (Node& node : nodes_) {
    if (!AwaitReady(&node) && failure_.empty()) failure_ = node.name + " did not start";
  }
  for (uint32_t r = 0; r < options_.ranks; ++r) StartRank(r);
  uint64_t seen = 0;                        // of the committed steps
  absl::Time progress = absl::Now();        // when one came last
  absl::Time event = absl::InfinitePast();  // the last one not recovered from
  absl::Time next = progress + absl::Seconds(Draw(0, 0.4));
  while (std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.finished; })) {
    *failure = Poll();
    const absl::Time now = absl::Now();
    if (failure->empty() && now - progress > kStuck) {
      *failure = absl::StrCat("no step after ", seen, "\n", Tail());
    }
    if (!failure->empty()) return "";
    const uint64_t decided = Decided();
    if (decided > seen) {
      seen = decided;
      progress = now;
      if (event != absl::InfinitePast()) {
        tally->recovery_seconds.push_back(absl::ToDoubleSeconds(now - event));
        event = absl::InfinitePast();
        next = now + absl::Seconds(Draw(0, 0.4));
      }
    }
    if (tally != nullptr && now < until && now >= next) {
      // Every fifth time another one follows while this one is being recovered from.
      next = Pick(5) == 0 ? now + absl::Seconds(Draw(0, 0.05)) : absl::InfiniteFuture();
      if (event == absl::InfinitePast()) event = now;
      Event(tally);
      // A freeze of somebody whom the step does not need at the moment shows nowhere.
      if (next == absl::InfiniteFuture() && Decided() > seen) event = now;
    }
    absl::SleepFor(kLook);
  }
  for (Node& node : nodes_) {
    node.process.Signal(SIGCONT);
    node.process.Signal(SIGTERM);
    const int status = node.process.Wait();
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      *failure = absl::StrCat(node.name, " ended with status ", status, "\n", Tail());
      return "";
    }
  }
  const uint64_t digest = ranks_[0].progress->digest.load();
  for (const Rank& rank : ranks_) {
    if (rank.progress->digest.load() != digest) *failure = "ranks read different bits";
    if (tally != nullptr) tally->regroups += rank.progress->regroups.load();
  }
  if (tally != nullptr) {
    ++tally->rounds;
    tally->steps += options_.steps;
  }
  return failure->empty() ? absl::StrCat(absl::Hex(digest, absl::kZeroPad16)) : "";
}

}  // namespace shardd::test

// Part of bench/run recovery: from a SIGKILL to the next committed step.
//
// Rows: a trainer killed and started again at once; the daemon killed and started again at once.
// Each is split into what it waits for, and stands beside an undisturbed step, of which at least
// one has to be computed again.
#include <signal.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "bench/restart_page.h"
#include "proto/contract/attach.h"
#include "proto/contract/fd_passing.h"
#include "tests/chaos/process.h"
#include "tests/support/temp_dir.h"

namespace shardd::bench {
namespace {

constexpr uint32_t kWorld = 2;
constexpr double kStuckSeconds = 300;

struct Options {
  bool json = false;
  uint64_t elements = 100'000'000;
  int repeats = 5;
  double patience = 10;
  std::string daemon, rank;
};

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "bench recovery: %s\n", why.c_str());
  std::exit(1);
}

void Await(const std::string& what, const std::function<bool()>& done) {
  const double deadline = Now() + kStuckSeconds;
  while (!done()) {
    if (Now() > deadline) Die("waited too long for " + what);
    const timespec look{0, 200'000};
    nanosleep(&look, nullptr);
  }
}

// A job of two ranks that take steps as fast as they can.
class Running {
 public:
  explicit Running(const Options& options) : options_(options) {
    huge_pages_ =
        mount("tmpfs", memory_.path().c_str(), "tmpfs", 0, "huge=always,mode=0700,size=90%") == 0;
    StartDaemon();
    for (uint32_t r = 0; r < kWorld; ++r) {
      pages_.push_back(std::make_unique<RestartPage>(Page(r)));
      ranks_.emplace_back();
      StartRank(r);
    }
  }
  ~Running() {
    for (test::Process& rank : ranks_) {
      rank.Signal(SIGKILL);
      rank.Wait();
    }
    daemon_.Signal(SIGTERM);
    daemon_.Wait();
    if (huge_pages_) umount2(memory_.path().c_str(), MNT_DETACH);
  }

  // Waits for `steps` more; the seconds that each took.
  double Steps(uint64_t steps) {
    const uint64_t from = Decided();
    const double start = Now();
    Await("steps", [&] { return Decided() >= from + steps; });
    return (Now() - start) / static_cast<double>(steps);
  }

  struct Trainer {
    double gone = 0, start = 0, open = 0, step = 0, total = 0;
  };
  Trainer KillTrainer() {
    const double killed = Now();
    ranks_[1].Signal(SIGKILL);
    ranks_[1].Wait();
    const double gone = Now();
    StartRank(1);
    AwaitStep(killed);
    const RestartPage& page = *pages_[1];
    const double committed = page->decided_at;
    return {gone - killed, page->started - gone, page->opened - page->started,
            committed - page->opened, committed - killed};
  }

  struct Daemon {
    double gone = 0, ready = 0, regroup = 0, step = 0, total = 0;
  };
  Daemon KillDaemon() {
    const double killed = Now();
    daemon_.Signal(SIGKILL);
    daemon_.Wait();
    const double gone = Now();
    StartDaemon();
    const double ready = Now();
    AwaitStep(killed);
    double regrouped = 0, committed = 0;
    for (const auto& page : pages_) {
      regrouped = std::max<double>(regrouped, (*page)->regrouped);
      committed = std::max<double>(committed, (*page)->decided_at);
    }
    return {gone - killed, ready - gone, regrouped - ready, committed - regrouped,
            committed - killed};
  }

 private:
  std::string Page(uint32_t rank) const { return pages_dir_.path() + "/" + std::to_string(rank); }

  uint64_t Decided() const {
    uint64_t most = 0;
    for (const auto& page : pages_) most = std::max<uint64_t>(most, (*page)->decided);
    return most;
  }

  // Until every rank has seen a step that was decided after the kill.
  void AwaitStep(double killed) {
    Await("the next step", [&] {
      return std::all_of(pages_.begin(), pages_.end(), [&](const auto& page) {
        return (*page)->decided_at > killed &&
               ((*page)->regrouped > killed || (*page)->opened > killed);
      });
    });
  }

  void StartDaemon() {
    daemon_ = test::Process({options_.daemon, "--listen.socket=" + socket_,
                             "--store.directory=" + memory_.path() + "/state",
                             "--spill.directory=" + pages_dir_.path() + "/spill"},
                            pages_dir_.path() + "/daemon.log");
    Await("the daemon", [&] {
      return contract::ConnectUnix(socket_ + contract::kAttachSuffix, SOCK_SEQPACKET).ok();
    });
  }

  void StartRank(uint32_t r) {
    ranks_[r] = test::Process({options_.rank, socket_, std::to_string(r), std::to_string(kWorld),
                               std::to_string(options_.elements), Page(r)},
                              "/dev/stderr");
  }

  const Options& options_;
  test::TempDir memory_{"/dev/shm"};
  test::TempDir pages_dir_{"/tmp"};
  const std::string socket_ = pages_dir_.path() + "/d.sock";
  bool huge_pages_ = false;
  test::Process daemon_;
  std::vector<test::Process> ranks_;
  std::vector<std::unique_ptr<RestartPage>> pages_;
};

template <typename T>
double MedianOf(const std::vector<T>& runs, double T::*field) {
  std::vector<double> values;
  for (const T& run : runs) values.push_back(run.*field * 1e3);
  return Median(values);
}

int Bench(const Options& options) {
  const Reporter report(options.json);
  Running job(options);
  job.Steps(3);
  std::vector<double> steps;
  std::vector<Running::Trainer> trainers;
  std::vector<Running::Daemon> daemons;
  for (int i = 0; i < options.repeats; ++i) {
    steps.push_back(job.Steps(5) * 1e3);
    trainers.push_back(job.KillTrainer());
    job.Steps(3);
    daemons.push_back(job.KillDaemon());
  }
  const double step = Median(steps);
  using T = Running::Trainer;
  using D = Running::Daemon;
  const auto elements = static_cast<double>(options.elements);
  report.Line("recovery.trainer", {},
              {{"elements", elements},
               {"undisturbed_step_ms", step},
               {"process_gone_ms", MedianOf(trainers, &T::gone)},
               {"process_started_ms", MedianOf(trainers, &T::start)},
               {"open_and_join_ms", MedianOf(trainers, &T::open)},
               {"first_step_ms", MedianOf(trainers, &T::step)},
               {"kill_to_committed_ms", MedianOf(trainers, &T::total)},
               {"in_steps", MedianOf(trainers, &T::total) / step}});
  report.Line("recovery.daemon", {},
              {{"elements", elements},
               {"undisturbed_step_ms", step},
               {"process_gone_ms", MedianOf(daemons, &D::gone)},
               {"taken_up_and_serving_ms", MedianOf(daemons, &D::ready)},
               {"ranks_back_in_a_group_ms", MedianOf(daemons, &D::regroup)},
               {"step_again_ms", MedianOf(daemons, &D::step)},
               {"kill_to_committed_ms", MedianOf(daemons, &D::total)},
               {"in_steps", MedianOf(daemons, &D::total) / step}});
  return 0;
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&](const char* name) -> const char* {
      const std::string prefix = std::string(name) + "=";
      return argument.rfind(prefix, 0) == 0 ? argv[i] + prefix.size() : nullptr;
    };
    if (argument == "--json") {
      options.json = true;
    } else if (const char* v = value("--elements")) {
      options.elements = std::strtoull(v, nullptr, 10);
    } else if (const char* v = value("--repeats")) {
      options.repeats = std::max(1, std::atoi(v));
    } else if (const char* v = value("--patience")) {
      options.patience = std::atof(v);
    } else if (const char* v = value("--daemon")) {
      options.daemon = v;
    } else if (const char* v = value("--rank")) {
      options.rank = v;
    } else {
      std::fprintf(stderr,
                   "bench recovery: unknown flag '%s'; there are: --json --elements=N --repeats=N "
                   "--patience=SECONDS --daemon=PATH --rank=PATH\n",
                   argument.c_str());
      return 2;
    }
  }
  WaitForIdle(options.patience);
  return Bench(options);
}

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) { return shardd::bench::Main(argc, argv); }

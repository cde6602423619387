// bench/run durability: what durability = node adds to a step.
//
// Steps of one job with and one without a journal in turn, with a backward of a given length, and
// in the same breath a plain sequential write of as many bytes as the step logs. What is added
// between EndStep and the decision is what the journal costs; the rest is hidden behind backward.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "bench/bench_daemon.h"
#include "bench/disk.h"
#include "bench/live_job.h"
#include "bench/measure.h"

namespace shardd::bench {
namespace {

struct Options {
  bool json = false;
  uint64_t elements = 100'000'000;
  int pairs = 9;
  double patience = 10;
  double backward_seconds = 1;
  std::string daemon;
  std::string directory = "/var/tmp";
};

// Of one job in turn with the other.
struct Series {
  std::vector<double> publish, decide, update;
  void Add(const LiveJob::Times& t) {
    publish.push_back(t.publish);
    decide.push_back(t.decide);
    update.push_back(t.update);
  }
  double total() const { return Median(publish) + Median(decide) + Median(update); }
};

void Run(const Options& options, const Reporter& report, uint32_t slots, double backward) {
  const std::string journals = options.directory + "/shardd-bench-journal";
  std::filesystem::remove_all(journals);
  {
    BenchDaemon daemon(options.daemon, {"--journal.directory=" + journals});
    const std::string name = "bench" + std::to_string(slots);
    LiveJob::Options job{daemon.socket(), name + "p",           options.elements,
                         slots,           Durability::kProcess, backward};
    LiveJob process(job);
    job.name = name + "n";
    job.durability = Durability::kNode;
    LiveJob node(job);
    const uint64_t log_bytes = options.elements * (slots == 1 ? 2 : 4);
    DiskWriter disk(options.directory, log_bytes);
    for (int i = 0; i < 3; ++i) {  // the first snapshot is complete, and all memory touched
      node.Step();
      process.Step();
    }
    Series without, with;
    std::vector<double> writes;
    double busy = 0;
    for (int i = 0; i < options.pairs; ++i) {
      busy = std::max(busy, WaitForIdle(options.patience));
      writes.push_back(disk.Seconds());
      without.Add(process.Step());
      with.Add(node.Step());
    }
    const double write = Median(writes);
    const double added = with.total() - without.total();
    report.Line("durability.node.step", {{"grad", slots == 1 ? "bf16" : "fp32"}},
                {{"elements", static_cast<double>(options.elements)},
                 {"slots", static_cast<double>(slots)},
                 {"backward_ms", backward * 1e3},
                 {"log_megabytes", static_cast<double>(log_bytes) / 1e6},
                 {"disk_write_ms", write * 1e3},
                 {"disk_write_megabytes_per_second", static_cast<double>(log_bytes) / write / 1e6},
                 {"process_decide_ms", Median(without.decide) * 1e3},
                 {"node_decide_ms", Median(with.decide) * 1e3},
                 {"process_step_ms", without.total() * 1e3},
                 {"node_step_ms", with.total() * 1e3},
                 {"added_ms", added * 1e3},
                 {"added_to_disk_write", added / write},
                 {"hidden", std::clamp(1 - added / write, 0.0, 1.0)},
                 {"others_busy", busy}});
  }
  std::filesystem::remove_all(journals);
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
    } else if (const char* v = value("--pairs")) {
      options.pairs = std::atoi(v);
    } else if (const char* v = value("--patience")) {
      options.patience = std::atof(v);
    } else if (const char* v = value("--backward")) {
      options.backward_seconds = std::atof(v);
    } else if (const char* v = value("--directory")) {
      options.directory = v;
    } else if (const char* v = value("--daemon")) {
      options.daemon = v;
    } else {
      std::fprintf(stderr,
                   "bench durability: unknown flag '%s'; there are: --json --elements=N --pairs=N "
                   "--patience=SECONDS --backward=SECONDS --directory=DIR --daemon=PATH\n",
                   argument.c_str());
      return 2;
    }
  }
  const Reporter report(options.json);
  for (const uint32_t slots : {1u, 2u}) {
    Run(options, report, slots, options.backward_seconds);
    Run(options, report, slots, 0);  // nothing to hide behind
  }
  return 0;
}

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) { return shardd::bench::Main(argc, argv); }

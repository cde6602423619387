// bench/run recovery: how long a job takes to come back.
//
// Rows: the redo of a journal's steps, per step, beside plain O_DIRECT reads of the same bytes.
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench_daemon.h"
#include "bench/disk.h"
#include "bench/live_job.h"
#include "bench/measure.h"
#include "kernels/isa.h"
#include "server/env/failpoints.h"
#include "server/env/thread_pool.h"
#include "server/journal/log_reader.h"
#include "server/journal/manifest.h"
#include "server/step/journal_redo.h"
#include "server/store/state_directory.h"

namespace shardd::bench {
namespace {

struct Options {
  bool json = false;
  uint64_t elements = 100'000'000;
  int pairs = 5;
  int steps = 6;
  double patience = 10;
  size_t threads = 0;
  std::string daemon;
  std::string directory = "/var/tmp";
};

[[noreturn]] void Die(const std::string& what, const absl::Status& status) {
  std::fprintf(stderr, "bench: %s: %s\n", what.c_str(), status.ToString().c_str());
  std::exit(1);
}

// A tmpfs with huge pages where one can be mounted, as the state directory wants.
class StateMount {
 public:
  StateMount() {
    std::string path = "/dev/shm/shardd-bench-redo-XXXXXX";
    if (mkdtemp(path.data()) == nullptr) std::abort();
    path_ = path;
    mounted_ = mount("tmpfs", path_.c_str(), "tmpfs", 0, "huge=always,mode=0700,size=90%") == 0;
  }
  ~StateMount() {
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool mounted_ = false;
};

// Recovers the job of `journal` into fresh segments and gives them up again.
step::RedoReport Redo(const std::string& journal, env::ThreadPool* pool) {
  env::Failpoints failpoints;
  step::RedoEnvironment environment;
  environment.files = env::PosixFileSystem();
  environment.failpoints = &failpoints;
  environment.pool = pool;
  environment.isa = kernels::BestIsa();
  environment.log = [](const std::string&) {};
  auto redo = step::JournalRedo::Open(environment, journal);
  if (!redo.ok()) Die("open the journal", redo.status());
  const StateMount mount;
  auto directory = store::StateDirectory::Open(mount.path() + "/state");
  if (!directory.ok()) Die("state directory", directory.status());
  step::RedoReport report;
  auto segments = store::JobSegments::Create(*directory, (*redo)->layout(), (*redo)->spec(),
                                             [&](store::JobSegments* built) {
                                               auto filled = (*redo)->Fill(built);
                                               if (filled.ok()) report = *filled;
                                               return filled.status();
                                             });
  if (!segments.ok()) Die("recovery", segments.status());
  return report;
}

// Where the gradients that a recovery redoes lie.
std::vector<FilePart> LogParts(const std::string& journal) {
  env::FileSystem* files = env::PosixFileSystem();
  auto manifest = journal::ReadManifest(files, journal);
  if (!manifest.ok()) Die("manifest", manifest.status());
  const uint64_t redo_lsn = manifest->snapshots.back().redo_lsn;
  auto log = journal::ReadLog(
      files, journal, manifest->job,
      {.keep_lsn = redo_lsn, .redo_lsn = redo_lsn, .durable_lsn = manifest->durable_lsn});
  if (!log.ok()) Die("log", log.status());
  std::vector<FilePart> parts;
  for (const journal::RecordPlace& place : log->records) {
    if (place.fields.kind != journal::RecordKind::kGradient) continue;
    const std::string& path = log->files[place.segment]->path();
    const uint64_t bytes = journal::kPageBytes + place.padded_bytes;
    if (!parts.empty() && parts.back().path == path &&
        parts.back().offset + parts.back().bytes == place.offset) {
      parts.back().bytes += bytes;
    } else {
      parts.push_back({path, place.offset, bytes});
    }
  }
  return parts;
}

void BenchRedo(const Options& options, const Reporter& report, uint32_t slots) {
  const std::string journals = options.directory + "/shardd-bench-redo";
  std::filesystem::remove_all(journals);
  {
    // One snapshot, at the beginning.
    BenchDaemon daemon(
        options.daemon,
        {"--journal.directory=" + journals,
         "--journal.log_bytes_max=" +
             std::to_string(options.elements * 4 * static_cast<uint64_t>(options.steps) * 3)});
    LiveJob job({daemon.socket(), "redo", options.elements, slots, Durability::kNode, 0});
    for (int i = 0; i < options.steps; ++i) job.Step();
  }
  const std::string journal = journals + "/redo";
  env::ThreadPool pool(options.threads, [] {
    static thread_local kernels::ScopedFlushToZero flush;
    (void)flush;
  });
  const kernels::ScopedFlushToZero flush;
  const std::vector<FilePart> parts = LogParts(journal);
  std::vector<double> ratios, redo_ms, read_ms, load_ms;
  step::RedoReport last;
  double busy = 0;
  for (int i = 0; i < options.pairs; ++i) {
    busy = std::max(busy, WaitForIdle(options.patience));
    const double before = ReadSeconds(parts);
    last = Redo(journal, &pool);
    const double read = (before + ReadSeconds(parts)) / 2;
    const auto steps = static_cast<double>(std::max<uint64_t>(last.redone_steps, 1));
    ratios.push_back(read / last.log_seconds);
    redo_ms.push_back(last.log_seconds * 1e3 / steps);
    read_ms.push_back(read * 1e3 / steps);
    load_ms.push_back(last.snapshot_seconds * 1e3);
  }
  report.Line("recovery.journal.redo", {{"grad", slots == 1 ? "bf16" : "fp32"}},
              {{"elements", static_cast<double>(options.elements)},
               {"threads", static_cast<double>(options.threads)},
               {"steps", static_cast<double>(last.redone_steps)},
               {"log_megabytes", static_cast<double>(last.log_bytes) / 1e6},
               {"redo_ms_per_step", Median(redo_ms)},
               {"direct_read_ms_per_step", Median(read_ms)},
               {"ratio_to_direct_read", Median(ratios)},
               {"snapshot_load_ms", Median(load_ms)},
               {"snapshot_megabytes", static_cast<double>(last.snapshot_bytes) / 1e6},
               {"others_busy", busy}});
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
    } else if (const char* v = value("--steps")) {
      options.steps = std::atoi(v);
    } else if (const char* v = value("--patience")) {
      options.patience = std::atof(v);
    } else if (const char* v = value("--threads")) {
      options.threads = static_cast<size_t>(std::atoi(v));
    } else if (const char* v = value("--directory")) {
      options.directory = v;
    } else if (const char* v = value("--daemon")) {
      options.daemon = v;
    } else {
      std::fprintf(stderr,
                   "bench recovery: unknown flag '%s'; there are: --json --elements=N --pairs=N "
                   "--steps=N --patience=SECONDS --threads=N --directory=DIR --daemon=PATH\n",
                   argument.c_str());
      return 2;
    }
  }
  if (options.threads == 0) {
    cpu_set_t set;
    options.threads =
        sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<size_t>(CPU_COUNT(&set)) : 1;
  }
  const Reporter report(options.json);
  for (const uint32_t slots : {1u, 2u}) BenchRedo(options, report, slots);
  return 0;
}

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) { return shardd::bench::Main(argc, argv); }

// bench/run checkpoint: what a save costs the training that goes on, and how fast it writes.
//
// Rows: a throttled save while steps are taken: for how long updates waited on it and copied for
// it, beside the time of those steps, and the memory that the daemon took above its steady state
// beside its pool. A full-speed save of a job that stands still, beside plain sequential writes
// of as many bytes in blocks of the same size, with the same syncs.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/bench_daemon.h"
#include "bench/measure.h"
#include "client/cli/admin_channel.h"
#include "client/client.h"

namespace shardd::bench {
namespace {

constexpr uint64_t kBlockBytes = 65536 * 4;  // one array of a chunk: what a save writes at once
constexpr char kJob[] = "bench";

struct Options {
  bool json = false;
  uint64_t elements = 100'000'000;
  int pairs = 5;
  double patience = 10;
  double rate = 100e6;  // bytes a second of the throttled save
  std::string daemon;
  std::string directory = "/var/tmp";
};

[[noreturn]] void Die(const std::string& what, const absl::Status& status) {
  std::fprintf(stderr, "bench checkpoint: %s: %s\n", what.c_str(), status.ToString().c_str());
  std::exit(1);
}

void Check(const std::string& what, const absl::Status& status) {
  if (!status.ok()) Die(what, status);
}

// A GPT's layers' worth of parameters, trained by one rank with bf16 gradients.
class LiveJob {
 public:
  LiveJob(const std::string& socket, uint64_t elements) {
    JobOptions job;
    job.name = kJob;
    job.step_timeout = absl::Seconds(60);
    SessionOptions options;
    options.address = socket;
    options.log = [](const std::string&) {};
    constexpr uint64_t kLayer = 1 << 20;
    std::vector<ParameterSpec> parameters;
    for (uint64_t at = 0; at < elements; at += kLayer) {
      ParameterSpec spec;
      spec.name = "p" + std::to_string(parameters.size());
      spec.shape = {static_cast<int64_t>(std::min(kLayer, elements - at))};
      parameters.push_back(spec);
    }
    auto session = Session::Open(options, job, parameters);
    if (!session.ok()) Die("Open", session.status());
    session_ = *std::move(session);
    for (size_t p = 0; p < parameters.size(); ++p) {
      Check("Upload",
            session_->Upload(p, 0, std::vector<float>(session_->parameter_elements(p), 0.5f)));
    }
    Check("FinishUpload", session_->FinishUpload());
  }
  ~LiveJob() { session_->Close().IgnoreError(); }

  // One step, until the last weights are there. Seconds.
  double Step() {
    const double start = Now();
    for (size_t p = session_->num_parameters(); p-- > 0;) {
      absl::StatusOr<void*> grad = session_->AcquireGrad(p, 0);
      Check("AcquireGrad", grad.status());
      std::memset(*grad, 0x3f, session_->parameter_elements(p) * 2);
      Check("ReadyGrad", session_->ReadyGrad(p, 0));
    }
    StepReport report;
    report.slots.resize(1);
    Check("EndStep", session_->EndStep(report));
    Check("WaitDecision", session_->WaitDecision().status());
    for (size_t p = 0; p < session_->num_parameters(); ++p) {
      Check("WaitWeights", session_->WaitWeights(p).status());
    }
    return Now() - start;
  }
  Session* session() { return session_.get(); }

 private:
  std::unique_ptr<Session> session_;
};

// What the daemon says of itself, and what the system says of the daemon.
class Probe {
 public:
  explicit Probe(const BenchDaemon& daemon) : pid_(daemon.pid()) {
    auto channel = cli::AdminChannel::Connect(daemon.socket(), absl::Seconds(10));
    Check("attach", channel.status());
    channel_ = *std::move(channel);
  }
  v1::JobStatus Job() {
    v1::ListJobsRequest request;
    request.set_name(kJob);
    auto reply = channel_->Call(&v1::Admin::StubInterface::ListJobs, request);
    Check("ListJobs", reply.status());
    return reply->jobs(0);
  }
  v1::CheckpointProgress Save() {
    v1::SaveCheckpointRequest request;
    request.set_job(kJob);
    v1::CheckpointProgress last;
    Check("SaveCheckpoint",
          channel_->Stream(&v1::Admin::StubInterface::SaveCheckpoint, request,
                           [&](const v1::CheckpointProgress& progress) { last = progress; }));
    return last;
  }
  // What the daemon's budget is charged with.
  double PlannedBytes() {
    auto reply = channel_->Call(&v1::Admin::StubInterface::ServerInfo, v1::ServerInfoRequest());
    Check("ServerInfo", reply.status());
    return static_cast<double>(reply->planned_bytes());
  }
  // Memory of the daemon's own that is no segment.
  double AnonymousBytes() const {
    std::ifstream file("/proc/" + std::to_string(pid_) + "/status");
    std::string line;
    while (std::getline(file, line)) {
      if (line.rfind("RssAnon:", 0) == 0) return std::atof(line.c_str() + 8) * 1024;
    }
    return 0;
  }

 private:
  const pid_t pid_;
  std::unique_ptr<cli::AdminChannel> channel_;
};

void BenchThrottled(const Options& options, const Reporter& report, LiveJob* job, Probe* probe) {
  const double busy = WaitForIdle(options.patience);
  std::vector<double> before;
  for (int i = 0; i < 20; ++i) before.push_back(job->Step());
  const v1::JobStatus at_start = probe->Job();
  const double steady = probe->AnonymousBytes();
  const double planned = probe->PlannedBytes();
  SaveOptions save;
  save.rate_bytes_per_second = static_cast<uint64_t>(options.rate);
  save.wait = false;
  const double start = Now();
  const absl::StatusOr<SavedCheckpoint> saved = job->session()->SaveCheckpoint(save);
  Check("SaveCheckpoint", saved.status());
  std::vector<double> during;
  double most = steady, pool = 0;
  v1::JobStatus status;
  do {
    during.push_back(job->Step());
    most = std::max(most, probe->AnonymousBytes());
    pool = std::max(pool, probe->PlannedBytes() - planned);
    status = probe->Job();
  } while (status.checkpoint_path().empty() && status.checkpoint_failure().empty());
  const double seconds = Now() - start;
  if (!status.checkpoint_failure().empty()) {
    Die("the save", absl::InternalError(status.checkpoint_failure()));
  }
  double steps_seconds = 0;
  for (double s : during) steps_seconds += s;
  const double stall = status.checkpoint_stall_seconds() - at_start.checkpoint_stall_seconds();
  const double copy = status.checkpoint_copy_seconds() - at_start.checkpoint_copy_seconds();
  report.Line("checkpoint.throttled", {{"elements", std::to_string(options.elements)}},
              {{"save_seconds", seconds},
               {"rate_mb_per_second", options.rate / 1e6},
               {"steps", static_cast<double>(during.size())},
               {"step_ms_before", Median(before) * 1e3},
               {"step_ms_during", Median(during) * 1e3},
               {"stall_ms", stall * 1e3},
               {"copy_ms", copy * 1e3},
               {"waited_share", (stall + copy) / steps_seconds},
               {"memory_above_steady_mb", (most - steady) / 1e6},
               {"pool_mb", pool / 1e6},
               {"busy", busy}});
}

// As many bytes in three files, one after the other, each synced.
double PlainWrites(const std::string& directory, uint64_t bytes) {
  const std::vector<char> block(kBlockBytes, 'x');
  const double start = Now();
  for (int f = 0; f < 3; ++f) {
    const std::string path = directory + "/plain-" + std::to_string(f);
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) Die(path, absl::ErrnoToStatus(errno, "cannot create"));
    for (uint64_t at = 0; at < bytes / 3; at += block.size()) {
      if (write(fd, block.data(), block.size()) != static_cast<ssize_t>(block.size())) {
        Die(path, absl::ErrnoToStatus(errno, "cannot write"));
      }
    }
    if (fdatasync(fd) != 0) Die(path, absl::ErrnoToStatus(errno, "cannot sync"));
    close(fd);
  }
  const double seconds = Now() - start;
  for (int f = 0; f < 3; ++f) unlink((directory + "/plain-" + std::to_string(f)).c_str());
  return static_cast<double>(bytes) / seconds;
}

void BenchFullSpeed(const Options& options, const std::string& directory, const Reporter& report,
                    LiveJob* job, Probe* probe) {
  const uint64_t bytes = options.elements * 12;
  const std::string at = directory + "/" + kJob;
  const Pairs pairs = Interleave(
      options.pairs, options.patience, [&] { return PlainWrites(directory, bytes); },
      [&] {
        const double start = Now();
        const v1::CheckpointProgress saved = probe->Save();
        const double seconds = Now() - start;
        std::filesystem::remove_all(at);
        job->Step();  // the next one is of another step
        return static_cast<double>(saved.total_bytes()) / seconds;
      });
  report.Line("checkpoint.full_speed", {{"elements", std::to_string(options.elements)}},
              {{"mb_per_second", pairs.bytes_per_second / 1e6},
               {"plain_mb_per_second", pairs.reference_bytes_per_second / 1e6},
               {"ratio", pairs.ratio},
               {"busy", pairs.busy}});
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
    } else if (const char* v = value("--rate")) {
      options.rate = std::atof(v);
    } else if (const char* v = value("--directory")) {
      options.directory = v;
    } else if (const char* v = value("--daemon")) {
      options.daemon = v;
    } else {
      std::fprintf(stderr,
                   "bench checkpoint: unknown flag '%s'; there are: --json --elements=N --pairs=N "
                   "--rate=BYTES --directory=DIR --patience=SECONDS --daemon=PATH\n",
                   argument.c_str());
      return 2;
    }
  }
  std::string directory = options.directory + "/shardd-bench-XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) {
    Die(options.directory, absl::ErrnoToStatus(errno, "cannot make a directory in it"));
  }
  {
    BenchDaemon daemon(options.daemon, {"--checkpoint.directory=" + directory});
    LiveJob job(daemon.socket(), options.elements);
    Probe probe(daemon);
    const Reporter report(options.json);
    BenchThrottled(options, report, &job, &probe);
    std::filesystem::remove_all(directory + "/" + kJob);
    BenchFullSpeed(options, directory, report, &job, &probe);
  }
  std::filesystem::remove_all(directory);
  return 0;
}

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) { return shardd::bench::Main(argc, argv); }

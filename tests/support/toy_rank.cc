// One rank of a small deterministic training run, as a process that a test can kill.
//
// Prints "step N" when a step's decision is known, "regrouped N" with the step that it
// goes on with, "log TEXT" for what the session logs, "done DIGEST" at the end; "error TEXT" and
// exit 1 when a verb fails for good. Gradients depend on slot, step and element alone, so any run
// of the same job has the same bits.
//
//   --socket --rank --world --job        where, and which rank of what
//   --slots=4 --steps=5                  of the job
//   --heartbeat=1 --join=60 --reconnect=60 --step_timeout=600   in seconds
//   --durability=3                       as the protocol counts: 3 is peer; 0: the daemon's best
//   --daemon_binary=PATH                 of a private daemon: with an empty --socket
//   --stop=uploading                     prints "uploading" and stops itself (SIGSTOP) there
//   --stop=failed                        stops itself when it has failed, its session open
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

struct Flags {
  std::map<std::string, std::string> values;
  const std::string& Get(const std::string& name) const { return values.at(name); }
  uint32_t Int(const std::string& name) const {
    return static_cast<uint32_t>(std::stoul(values.at(name)));
  }
  absl::Duration Seconds(const std::string& name) const {
    return absl::Seconds(std::stod(values.at(name)));
  }
};

float Gradient(uint64_t step, uint32_t slot, size_t parameter, uint64_t element) {
  uint64_t h = step * 0x9E3779B97F4A7C15u ^ (slot + 1) * 0xC2B2AE3D27D4EB4Fu ^
               (parameter + 1) * 0x165667B19E3779F9u ^ (element + 1) * 0x27D4EB2F165667C5u;
  h ^= h >> 31;
  h *= 0xBF58476D1CE4E5B9u;
  h ^= h >> 29;
  return static_cast<float>(static_cast<int64_t>(h >> 40)) / 8388608.0f - 1.0f;
}

void Say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// The blob is the number of the step it belongs to: what was told must fit next_step.
std::string BlobOf(uint64_t step) { return "after step " + std::to_string(step); }

std::vector<ParameterSpec> Parameters() {
  std::vector<ParameterSpec> parameters(3);
  parameters[0].name = "a";
  parameters[0].shape = {5000};
  parameters[1].name = "b";
  parameters[1].shape = {100, 100};
  parameters[2].name = "c";
  parameters[2].shape = {7};
  return parameters;
}

class ToyRank {
 public:
  explicit ToyRank(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    if (absl::Status s = Open(); !s.ok()) return s;
    if (absl::Status s = ThroughRegroups([&] { return Upload(); }); !s.ok()) return s;
    Say("open " + std::to_string(session_->next_step()));
    absl::Status status = ThroughRegroups([&] {
      while (session_->next_step() <= flags_.Int("steps")) {
        if (absl::Status s = Step(); !s.ok()) return s;
      }
      return absl::OkStatus();
    });
    if (status.ok()) status = Conclude();
    return status.ok() ? session_->Close() : status;
  }

 private:
  absl::Status Open() {
    JobOptions job = SmallJob(flags_.Get("job"), flags_.Int("slots"));
    job.groups[0].beta1 = 0.9;
    job.heartbeat = flags_.Seconds("heartbeat");
    job.join_timeout = flags_.Seconds("join");
    job.step_timeout = flags_.Seconds("step_timeout");
    job.durability = static_cast<Durability>(flags_.Int("durability"));
    SessionOptions options =
        RankOptions(flags_.Get("socket"), flags_.Int("rank"), flags_.Int("world"));
    options.reconnect_timeout = flags_.Seconds("reconnect");
    options.daemon_binary = flags_.Get("daemon_binary");
    options.log = [](const std::string& line) { Say("log " + line); };
    auto opened = Session::Open(options, job, Parameters());
    if (!opened.ok()) return opened.status();
    session_ = *std::move(opened);
    return absl::OkStatus();
  }

  // Does `phase` until it succeeds or fails for good.
  absl::Status ThroughRegroups(const std::function<absl::Status()>& phase) {
    while (true) {
      absl::Status status = phase();
      const auto regrouped = GetRegrouped(status);
      if (!regrouped) return status;
      if (regrouped->next_step > 1 && regrouped->blob != BlobOf(regrouped->next_step - 1)) {
        return absl::InternalError("the blob '" + regrouped->blob + "' is not that of step " +
                                   std::to_string(regrouped->next_step - 1));
      }
      Say("regrouped " + std::to_string(regrouped->next_step));
    }
  }

  absl::Status Upload() {
    if (!session_->initialising()) return absl::OkStatus();
    if (flags_.Get("stop") == "uploading" && !stopped_) {
      stopped_ = true;
      Say("uploading");
      raise(SIGSTOP);
    }
    for (size_t p = session_->rank(); p < 3; p += session_->world_size()) {
      const std::vector<float> ones(session_->parameter_elements(p), 1.0f);
      if (absl::Status s = session_->Upload(p, 0, ones); !s.ok()) return s;
    }
    return session_->FinishUpload();
  }

  absl::Status Step() {
    const uint64_t step = session_->next_step();
    StepReport report;
    for (uint32_t slot = session_->slots().lo; slot < session_->slots().hi; ++slot) {
      report.slots.push_back({static_cast<double>(step) + slot, 0});
    }
    report.blob = BlobOf(step);
    const auto decision = TakeStep(
        session_.get(), DType::kFloat32,
        [&](uint32_t slot, size_t p, uint64_t i) { return Gradient(step, slot, p, i); }, report);
    if (decision.ok()) Say("step " + std::to_string(decision->step));
    return decision.status();
  }

  // A digest of all state, so that runs can be compared bit for bit.
  absl::Status Conclude() {
    uint64_t digest = 0xcbf29ce484222325u;
    for (size_t p = 0; p < 3; ++p) {
      for (StateKind kind : {StateKind::kMaster, StateKind::kMoment0, StateKind::kMoment1}) {
        std::vector<float> values(session_->parameter_elements(p));
        if (absl::Status s = session_->ReadState(kind, p, 0, std::span<float>(values)); !s.ok()) {
          return s;
        }
        for (float value : values) {
          uint32_t bits;
          std::memcpy(&bits, &value, sizeof(bits));
          digest = (digest ^ bits) * 0x100000001b3u;
        }
      }
    }
    std::printf("done %016lx\n", digest);
    std::fflush(stdout);
    return absl::OkStatus();
  }

  const Flags& flags_;
  std::unique_ptr<Session> session_;
  bool stopped_ = false;
};

}  // namespace
}  // namespace shardd::test

int main(int argc, char** argv) {
  shardd::test::Flags flags;
  flags.values = {{"slots", "4"},        {"heartbeat", "1"},  {"join", "60"},
                  {"reconnect", "60"},   {"steps", "5"},      {"stop", ""},
                  {"daemon_binary", ""}, {"durability", "0"}, {"step_timeout", "600"}};
  for (int i = 1; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    if (equals == nullptr || std::strncmp(argv[i], "--", 2) != 0) return 2;
    const auto length = static_cast<size_t>(equals - argv[i]) - 2;
    flags.values[std::string(argv[i] + 2, length)] = equals + 1;
  }
  shardd::test::ToyRank rank(flags);
  const absl::Status status = rank.Run();
  if (status.ok()) return 0;
  shardd::test::Say("error " + status.ToString());
  if (flags.Get("stop") == "failed") raise(SIGSTOP);
  return 1;
}

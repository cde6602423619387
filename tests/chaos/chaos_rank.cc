// One rank of the job that the chaos runner kills. Its gradients depend on the weights that it
// reads, so that a wrong bit anywhere reaches the end.
//
//   chaos_rank --socket= --rank= --world= --job= --steps= --slots= --stage= --private=0|1
//              --progress=FILE --restarted=0|1
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "client/client.h"
#include "tests/chaos/progress.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

using Flags = std::map<std::string, std::string>;

constexpr size_t kParameters = 5;
constexpr int64_t kShapes[kParameters] = {60000, 12345, 60000, 7, 60001};

std::vector<ParameterSpec> Parameters() {
  std::vector<ParameterSpec> parameters(kParameters);
  for (size_t p = 0; p < kParameters; ++p) {
    parameters[p].name = "p" + std::to_string(p);
    parameters[p].shape = {kShapes[p]};
  }
  return parameters;
}

float Noise(uint64_t step, uint32_t slot, size_t parameter, uint64_t element) {
  uint64_t h = step * 0x9E3779B97F4A7C15u ^ (slot + 1) * 0xC2B2AE3D27D4EB4Fu ^
               (parameter + 1) * 0x165667B19E3779F9u ^ (element + 1) * 0x27D4EB2F165667C5u;
  h ^= h >> 31;
  h *= 0xBF58476D1CE4E5B9u;
  h ^= h >> 29;
  return static_cast<float>(static_cast<int64_t>(h >> 40)) / 8388608.0f - 1.0f;
}

std::string BlobOf(uint64_t step) { return "after step " + std::to_string(step); }

class ChaosRank {
 public:
  explicit ChaosRank(const Flags& flags)
      : flags_(flags), progress_(MapProgress(flags.at("progress"))) {}

  absl::Status Run() {
    Enter(RankPhase::kStarting);
    if (absl::Status s = Open(); !s.ok()) return s;
    if (absl::Status s = ThroughRegroups([&] { return Upload(); }); !s.ok()) return s;
    absl::Status status = ThroughRegroups([&]() -> absl::Status {
      while (session_->next_step() <= Int("steps")) {
        if (absl::Status s = Step(); !s.ok()) return s;
      }
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    Enter(RankPhase::kConcluding);
    status = ThroughRegroups([&] { return Conclude(); });
    return status.ok() ? session_->Close() : status;
  }

 private:
  uint32_t Int(const std::string& name) const {
    return static_cast<uint32_t>(std::stoul(flags_.at(name)));
  }
  void Enter(RankPhase phase) { progress_->phase = static_cast<uint32_t>(phase); }

  absl::Status Open() {
    JobOptions job = SmallJob(flags_.at("job"), Int("slots"));
    job.groups[0] = ParameterGroup{"all", 1e-3, 0.9, 0.999, 1e-8, 0.01};
    job.stage = static_cast<int>(Int("stage"));
    job.weights = Int("private") != 0 ? WeightsMode::kPrivate : WeightsMode::kShared;
    job.bucket_elements = 4 * 4096;
    job.max_norm = 1.0;
    SessionOptions options = RankOptions(flags_.at("socket"), Int("rank"), Int("world"));
    options.restarted = Int("restarted") != 0;
    options.log = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
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
      progress_->regroups += 1;
      if (regrouped->next_step > 1 && regrouped->blob != BlobOf(regrouped->next_step - 1)) {
        return absl::InternalError("the blob '" + regrouped->blob + "' is not that of step " +
                                   std::to_string(regrouped->next_step - 1));
      }
      // What this rank was told to be committed is never taken back.
      if (regrouped->next_step <= progress_->decided.load()) {
        return absl::InternalError("step " + std::to_string(progress_->decided.load()) +
                                   " was committed, and the group goes on with " +
                                   std::to_string(regrouped->next_step));
      }
    }
  }

  absl::Status Upload() {
    if (!session_->initialising()) return absl::OkStatus();
    for (size_t p = session_->rank(); p < kParameters; p += session_->world_size()) {
      std::vector<float> values(session_->parameter_elements(p));
      for (size_t i = 0; i < values.size(); ++i) values[i] = Noise(0, 0, p, i);
      if (absl::Status s = session_->Upload(p, 0, values); !s.ok()) return s;
    }
    return session_->FinishUpload();
  }

  // All of the model, as a forward would read it.
  absl::Status ReadWeights() {
    for (size_t p = 0; p < kParameters; ++p) {
      const size_t one[] = {p};
      if (absl::Status s = session_->Gather(one); !s.ok()) return s;
      absl::StatusOr<const void*> weights = session_->WaitWeights(p);
      if (!weights.ok()) return weights.status();
      const auto* values = static_cast<const float*>(*weights);
      weights_[p].assign(values, values + session_->parameter_elements(p));
      if (absl::Status s = session_->Release(one); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  absl::Status Publish(uint64_t step) {
    for (uint32_t slot = session_->slots().lo; slot < session_->slots().hi; ++slot) {
      for (size_t p = kParameters; p-- > 0;) {
        absl::StatusOr<void*> buffer = session_->AcquireGrad(p, slot);
        if (!buffer.ok()) return buffer.status();
        auto* out = static_cast<float*>(*buffer);
        for (size_t i = 0; i < weights_[p].size(); ++i) {
          out[i] = 0.1f * weights_[p][i] + Noise(step, slot, p, i);
        }
        if (absl::Status s = session_->ReadyGrad(p, slot); !s.ok()) return s;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Step() {
    const uint64_t step = session_->next_step();
    Enter(RankPhase::kReading);
    if (absl::Status s = ReadWeights(); !s.ok()) return s;
    Enter(RankPhase::kPublishing);
    if (absl::Status s = Publish(step); !s.ok()) return s;
    Enter(RankPhase::kEnding);
    StepReport report;
    for (uint32_t slot = session_->slots().lo; slot < session_->slots().hi; ++slot) {
      report.slots.push_back({static_cast<double>(step) + slot, 0});
    }
    report.blob = BlobOf(step);
    if (absl::Status s = session_->EndStep(report); !s.ok()) return s;
    Enter(RankPhase::kDeciding);
    absl::StatusOr<Decision> decision = session_->WaitDecision();
    if (!decision.ok()) return decision.status();
    progress_->decided = decision->step;
    return absl::OkStatus();
  }

  absl::Status Conclude() {
    uint64_t digest = 0xcbf29ce484222325u;
    for (size_t p = 0; p < kParameters; ++p) {
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
    progress_->digest = digest;
    progress_->done = 1;
    return absl::OkStatus();
  }

  const Flags flags_;
  SharedProgress progress_;
  std::unique_ptr<Session> session_;
  std::vector<float> weights_[kParameters];
};

}  // namespace
}  // namespace shardd::test

int main(int argc, char** argv) {
  shardd::test::Flags flags = {
      {"slots", "4"}, {"stage", "1"}, {"private", "0"}, {"restarted", "0"}};
  for (int i = 1; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    if (equals == nullptr || std::strncmp(argv[i], "--", 2) != 0) return 2;
    flags[std::string(argv[i] + 2, static_cast<size_t>(equals - argv[i]) - 2)] = equals + 1;
  }
  const absl::Status status = shardd::test::ChaosRank(flags).Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "error %s\n", status.ToString().c_str());
  return 1;
}

// One rank of a small deterministic training run, as a process that a test can kill.
//
// Prints "step N" when a step's decision is known, "regrouped N" with the step that it
// goes on with, "done" at the end; "error TEXT" and exit 1 when a verb fails for good.
// Gradients depend on slot, step and element alone, so any run of the same job has the
// same bits.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

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
};

float Gradient(uint64_t step, uint32_t slot, size_t parameter, uint64_t element) {
  uint64_t h = step * 0x9E3779B97F4A7C15u ^ (slot + 1) * 0xC2B2AE3D27D4EB4Fu ^
               (parameter + 1) * 0x165667B19E3779F9u ^ (element + 1) * 0x27D4EB2F165667C5u;
  h ^= h >> 31;
  h *= 0xBF58476D1CE4E5B9u;
  h ^= h >> 29;
  return static_cast<float>(static_cast<int64_t>(h >> 40)) / 8388608.0f - 1.0f;
}

int Fail(const absl::Status& status) {
  std::printf("error %s\n", status.ToString().c_str());
  std::fflush(stdout);
  return 1;
}

// The blob is the number of the step it belongs to: what was told must fit next_step.
std::string BlobOf(uint64_t step) { return "after step " + std::to_string(step); }

int Train(const Flags& flags) {
  JobOptions job = SmallJob(flags.Get("job"), flags.Int("slots"));
  job.groups[0].beta1 = 0.9;
  job.heartbeat = absl::Seconds(std::stod(flags.Get("heartbeat")));
  job.join_timeout = absl::Seconds(std::stod(flags.Get("join")));
  std::vector<ParameterSpec> parameters(3);
  parameters[0].name = "a";
  parameters[0].shape = {5000};
  parameters[1].name = "b";
  parameters[1].shape = {100, 100};
  parameters[2].name = "c";
  parameters[2].shape = {7};
  auto opened = Session::Open(
      RankOptions(flags.Get("socket"), flags.Int("rank"), flags.Int("world")), job, parameters);
  if (!opened.ok()) return Fail(opened.status());
  Session* session = opened->get();
  if (session->initialising()) {
    for (size_t p = session->rank(); p < 3; p += session->world_size()) {
      const std::vector<float> ones(session->parameter_elements(p), 1.0f);
      absl::Status status = session->Upload(p, 0, ones);
      if (!status.ok() && !GetRegrouped(status)) return Fail(status);
    }
  }
  absl::Status status = session->FinishUpload();
  while (GetRegrouped(status)) status = session->FinishUpload();
  if (!status.ok()) return Fail(status);
  std::printf("open %lu\n", session->next_step());
  std::fflush(stdout);
  const uint64_t last = flags.Int("steps");
  while (session->next_step() <= last) {
    const uint64_t step = session->next_step();
    StepReport report;
    for (uint32_t slot = session->slots().lo; slot < session->slots().hi; ++slot) {
      report.slots.push_back({static_cast<double>(step) + slot, 0});
    }
    report.blob = BlobOf(step);
    const auto decision = TakeStep(
        session, DType::kFloat32,
        [&](uint32_t slot, size_t p, uint64_t i) { return Gradient(step, slot, p, i); }, report);
    if (const auto regrouped = GetRegrouped(decision.status())) {
      if (regrouped->next_step > 1 && regrouped->blob != BlobOf(regrouped->next_step - 1)) {
        return Fail(absl::InternalError("the blob '" + regrouped->blob + "' is not that of step " +
                                        std::to_string(regrouped->next_step - 1)));
      }
      std::printf("regrouped %lu\n", regrouped->next_step);
      std::fflush(stdout);
      continue;
    }
    if (!decision.ok()) return Fail(decision.status());
    std::printf("step %lu\n", decision->step);
    std::fflush(stdout);
  }
  // A digest of all state, so that runs can be compared bit for bit.
  uint64_t digest = 0xcbf29ce484222325u;
  for (size_t p = 0; p < 3; ++p) {
    for (StateKind kind : {StateKind::kMaster, StateKind::kMoment0, StateKind::kMoment1}) {
      for (float value : ReadAll(session, kind, p)) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        digest = (digest ^ bits) * 0x100000001b3u;
      }
    }
  }
  std::printf("done %016lx\n", digest);
  std::fflush(stdout);
  status = session->Close();
  return status.ok() ? 0 : Fail(status);
}

}  // namespace
}  // namespace shardd::test

int main(int argc, char** argv) {
  shardd::test::Flags flags;
  flags.values = {{"slots", "4"}, {"heartbeat", "1"}, {"join", "60"}, {"steps", "5"}};
  for (int i = 1; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    if (equals == nullptr || std::strncmp(argv[i], "--", 2) != 0) return 2;
    const auto length = static_cast<size_t>(equals - argv[i]) - 2;
    flags.values[std::string(argv[i] + 2, length)] = equals + 1;
  }
  return shardd::test::Train(flags);
}

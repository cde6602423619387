// A rank that goes through a training step as a trainer of a layered model does, and
// says what it holds: each layer is gathered before it is used, the next one is
// gathered while it is, and it is released afterwards; backward hands over each
// layer's gradients, last parameter first. The gradients' values are made up.
//
// Prints, in the last slot of the last step, per layer and at the end of backward, the
// resident bytes of its named memory from /proc/self/smaps:
//   "sample PHASE weights=N staging=N partial=N ring=N"
// PHASE: forward or backward (while two layers are held), end (of backward, before
// EndStep). "done" at the end; "error TEXT" and exit 1 when a verb fails.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client/client.h"
#include "tests/memory/layered_model.h"

namespace shardd::test {
namespace {

using Flags = std::map<std::string, std::string>;

constexpr uint64_t kUploadElements = uint64_t{1} << 20;

// Resident bytes of the mappings of the memfd called `name`.
std::map<std::string, uint64_t> ResidentBytes() {
  std::map<std::string, uint64_t> resident;
  std::ifstream smaps("/proc/self/smaps");
  std::string line, name;
  while (std::getline(smaps, line)) {
    unsigned long kilobytes = 0;
    if (std::sscanf(line.c_str(), "Rss: %lu kB", &kilobytes) == 1) {
      if (!name.empty()) resident[name] += uint64_t{kilobytes} * 1024;
      continue;
    }
    // A mapping begins with its addresses in small hexadecimal digits, a field with a capital.
    if (line.empty() || std::isupper(static_cast<unsigned char>(line[0]))) continue;
    const std::string prefix = "/memfd:shardd-";
    const size_t at = line.find(prefix);
    name = at == std::string::npos ? "" : line.substr(at + prefix.size());
    name = name.substr(0, name.find(' '));
  }
  return resident;
}

void Sample(const char* phase) {
  std::map<std::string, uint64_t> bytes = ResidentBytes();
  std::printf("sample %s weights=%lu staging=%lu partial=%lu ring=%lu\n", phase, bytes["weights"],
              bytes["staging"], bytes["partial"], bytes["ring"]);
  std::fflush(stdout);
}

class Rank {
 public:
  Rank(Session* session, const LayeredModel& model) : session_(session), model_(model) {}

  absl::Status Upload() {
    const std::vector<float> values(kUploadElements, 0.01f);
    for (size_t p = session_->rank(); p < session_->num_parameters(); p += session_->world_size()) {
      const uint64_t elements = session_->parameter_elements(p);
      for (uint64_t offset = 0; offset < elements; offset += kUploadElements) {
        const auto part = std::span(values).first(std::min(kUploadElements, elements - offset));
        if (absl::Status s = session_->Upload(p, offset, part); !s.ok()) return s;
      }
    }
    return session_->FinishUpload();
  }

  absl::Status Step(bool last_step) {
    const Slots slots = session_->slots();
    StepReport report;
    report.slots.resize(slots.hi - slots.lo);
    for (uint32_t slot = slots.lo; slot < slots.hi; ++slot) {
      samples_ = last_step && slot + 1 == slots.hi;
      if (absl::Status s = Forward(); !s.ok()) return s;
      if (absl::Status s = Backward(slot); !s.ok()) return s;
    }
    if (absl::Status s = session_->EndStep(report); !s.ok()) return s;
    return session_->WaitDecision().status();
  }

 private:
  absl::Status Forward() {
    const auto& layers = model_.layers;
    absl::Status status = session_->Gather(layers[0]);
    for (size_t layer = 0; status.ok() && layer < layers.size(); ++layer) {
      if (layer + 1 < layers.size()) status.Update(session_->Gather(layers[layer + 1]));
      if (status.ok()) status.Update(Read(layers[layer]));
      if (samples_) Sample("forward");
      status.Update(session_->Release(layers[layer]));
    }
    return status;
  }

  absl::Status Backward(uint32_t slot) {
    const auto& layers = model_.layers;
    absl::Status status = session_->Gather(layers.back());
    for (size_t layer = layers.size(); status.ok() && layer-- > 0;) {
      if (layer > 0) status.Update(session_->Gather(layers[layer - 1]));
      if (status.ok()) status.Update(Read(layers[layer]));
      for (size_t i = layers[layer].size(); status.ok() && i-- > 0;) {
        status.Update(GiveGradient(layers[layer][i], slot));
      }
      if (samples_) Sample(layer == 0 ? "end" : "backward");
      status.Update(session_->Release(layers[layer]));
    }
    return status;
  }

  // Reads a byte of each page, as a product with the weights would.
  absl::Status Read(const std::vector<size_t>& parameters) {
    for (size_t p : parameters) {
      const absl::StatusOr<const void*> weights = session_->WaitWeights(p);
      if (!weights.ok()) return weights.status();
      const auto* bytes = static_cast<const volatile unsigned char*>(*weights);
      const uint64_t size = session_->parameter_elements(p) * DTypeBytes(DType::kBFloat16);
      for (uint64_t i = 0; i < size; i += 4096) (void)bytes[i];
    }
    return absl::OkStatus();
  }

  absl::Status GiveGradient(size_t parameter, uint32_t slot) {
    const absl::StatusOr<void*> buffer = session_->AcquireGrad(parameter, slot);
    if (!buffer.ok()) return buffer.status();
    // 0x3C3C is 0.0115 as bf16.
    std::memset(*buffer, 0x3C,
                session_->parameter_elements(parameter) * DTypeBytes(DType::kBFloat16));
    return session_->ReadyGrad(parameter, slot);
  }

  Session* const session_;
  const LayeredModel& model_;
  bool samples_ = false;
};

absl::Status Train(const Flags& flags) {
  const auto number = [&](const char* name) {
    return static_cast<uint32_t>(std::stoul(flags.at(name)));
  };
  JobOptions job = JobOptions::ForDType(DType::kBFloat16);
  job.name = flags.at("job");
  job.slots = number("slots");
  job.stage = static_cast<int>(number("stage"));
  job.weights = flags.at("weights") == "private" ? WeightsMode::kPrivate : WeightsMode::kShared;
  SessionOptions options;
  options.address = flags.at("socket");
  options.rank = number("rank");
  options.world_size = number("world");
  options.log = [](const std::string&) {};
  const LayeredModel model = MakeLayeredModel();
  const auto session = Session::Open(options, job, model.parameters);
  if (!session.ok()) return session.status();
  Rank rank(session->get(), model);
  if (absl::Status s = rank.Upload(); !s.ok()) return s;
  const uint64_t steps = number("steps");
  while ((*session)->next_step() <= steps) {
    if (absl::Status s = rank.Step((*session)->next_step() == steps); !s.ok()) return s;
  }
  return (*session)->Close();
}

}  // namespace
}  // namespace shardd::test

int main(int argc, char** argv) {
  shardd::test::Flags flags;
  for (int i = 1; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    if (equals == nullptr || std::strncmp(argv[i], "--", 2) != 0) return 2;
    const std::string_view flag(argv[i] + 2);
    flags[std::string(flag.substr(0, flag.find('=')))] = equals + 1;
  }
  const absl::Status status = shardd::test::Train(flags);
  if (!status.ok()) {
    std::printf("error %s\n", status.ToString().c_str());
    return 1;
  }
  std::printf("done\n");
  return 0;
}

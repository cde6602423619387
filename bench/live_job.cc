#include "bench/live_job.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "bench/measure.h"

namespace shardd::bench {

namespace {

[[noreturn]] void Die(const std::string& what, const absl::Status& status) {
  std::fprintf(stderr, "bench: %s: %s\n", what.c_str(), status.ToString().c_str());
  std::exit(1);
}

}  // namespace

LiveJob::LiveJob(const Options& options) : options_(options) {
  SessionOptions at;
  at.address = options.socket;
  at.log = [](const std::string&) {};
  JobOptions job;
  job.name = options.name;
  job.slots = options.slots;
  job.max_norm = 1.0;
  job.groups[0].lr = 1e-4;
  job.durability = options.durability;
  std::vector<ParameterSpec> parameters;
  constexpr uint64_t kLayer = 1 << 20;
  for (uint64_t done = 0; done < options.elements; done += kLayer) {
    ParameterSpec spec;
    spec.name = "p" + std::to_string(parameters.size());
    spec.shape = {static_cast<int64_t>(std::min(kLayer, options.elements - done))};
    parameters.push_back(spec);
  }
  auto session = Session::Open(at, job, parameters);
  if (!session.ok()) Die("Open", session.status());
  session_ = *std::move(session);
  if (session_->initialising()) {
    for (size_t p = 0; p < parameters.size(); ++p) {
      const std::vector<float> values(session_->parameter_elements(p), 0.5f);
      if (absl::Status s = session_->Upload(p, 0, values); !s.ok()) Die("Upload", s);
    }
  }
  if (absl::Status s = session_->FinishUpload(); !s.ok()) Die("FinishUpload", s);
}

LiveJob::~LiveJob() { session_->Close().IgnoreError(); }

LiveJob::Times LiveJob::Step() {
  Times times;
  const double start = Now();
  const size_t parts = session_->num_parameters() * options_.slots;
  size_t part = 0;
  for (uint32_t slot = 0; slot < options_.slots; ++slot) {
    for (size_t p = session_->num_parameters(); p-- > 0;) {
      absl::StatusOr<void*> grad = session_->AcquireGrad(p, slot);
      if (!grad.ok()) Die("AcquireGrad", grad.status());
      // bf16 1.0078125 everywhere: what a trainer's last kernel would write.
      std::memset(*grad, 0x3f, session_->parameter_elements(p) * 2);
      ++part;
      const double due = start + options_.backward_seconds * static_cast<double>(part) /
                                     static_cast<double>(parts);
      if (due > Now()) std::this_thread::sleep_for(std::chrono::duration<double>(due - Now()));
      if (absl::Status s = session_->ReadyGrad(p, slot); !s.ok()) Die("ReadyGrad", s);
    }
  }
  const double published = Now();
  StepReport report;
  report.slots.resize(options_.slots);
  if (absl::Status s = session_->EndStep(report); !s.ok()) Die("EndStep", s);
  if (absl::StatusOr<Decision> d = session_->WaitDecision(); !d.ok())
    Die("WaitDecision", d.status());
  const double decided = Now();
  // The update runs in ascending order; all are waited for.
  for (size_t p = 0; p < session_->num_parameters(); ++p) {
    if (auto w = session_->WaitWeights(p); !w.ok()) Die("WaitWeights", w.status());
  }
  times.publish = published - start;
  times.decide = decided - published;
  times.update = Now() - decided;
  return times;
}

}  // namespace shardd::bench

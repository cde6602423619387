// A rank of bench/run recovery: takes steps until it is killed, and leaves the times of what it
// did in a page that outlives it.
//
//   restart_rank SOCKET RANK WORLD ELEMENTS PAGE
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "bench/measure.h"
#include "bench/restart_page.h"
#include "client/client.h"

namespace shardd::bench {
namespace {

[[noreturn]] void Die(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "restart_rank: %s: %s\n", what, status.ToString().c_str());
  std::exit(1);
}

std::unique_ptr<Session> Open(char** argv, uint64_t elements) {
  SessionOptions options;
  options.address = argv[1];
  options.rank = static_cast<uint32_t>(std::atoi(argv[2]));
  options.world_size = static_cast<uint32_t>(std::atoi(argv[3]));
  options.log = [](const std::string&) {};
  JobOptions job;
  job.name = "recovery";
  job.slots = options.world_size;
  std::vector<ParameterSpec> parameters(8);
  for (size_t p = 0; p < parameters.size(); ++p) {
    parameters[p].name = "p" + std::to_string(p);
    parameters[p].shape = {static_cast<int64_t>(elements / parameters.size())};
  }
  auto session = Session::Open(options, job, parameters);
  if (!session.ok()) Die("Open", session.status());
  if ((*session)->initialising()) {
    for (size_t p = options.rank; p < parameters.size(); p += options.world_size) {
      const std::vector<float> ones((*session)->parameter_elements(p), 1.0f);
      if (absl::Status s = (*session)->Upload(p, 0, ones); !s.ok()) Die("Upload", s);
    }
    if (absl::Status s = (*session)->FinishUpload(); !s.ok()) Die("FinishUpload", s);
  }
  return *std::move(session);
}

absl::Status Step(Session* session) {
  for (size_t p = session->num_parameters(); p-- > 0;) {
    absl::StatusOr<void*> grad = session->AcquireGrad(p, session->slots().lo);
    if (!grad.ok()) return grad.status();
    std::memset(*grad, 0x3f, session->parameter_elements(p) * 2);
    if (absl::Status s = session->ReadyGrad(p, session->slots().lo); !s.ok()) return s;
  }
  StepReport report;
  report.slots.resize(1);
  if (absl::Status s = session->EndStep(report); !s.ok()) return s;
  return session->WaitDecision().status();
}

int Main(char** argv) {
  const RestartPage page(argv[5]);
  page->started = Now();
  const std::unique_ptr<Session> session = Open(argv, std::strtoull(argv[4], nullptr, 10));
  page->opened = Now();
  while (true) {
    const absl::Status status = Step(session.get());
    if (GetRegrouped(status)) {
      page->regrouped = Now();
      continue;
    }
    if (!status.ok()) Die("a step", status);
    page->decided_at = Now();
    page->decided += 1;
  }
}

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) { return argc == 6 ? shardd::bench::Main(argv) : 2; }

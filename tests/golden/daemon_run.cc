#include "tests/golden/daemon_run.h"

#include <thread>

#include "absl/strings/str_cat.h"

namespace shardd::golden {

std::string DaemonRun::Name() const {
  return absl::StrCat("ranks=", ranks, " slots=", slots, " stage=", stage,
                      " weights=", weights == WeightsMode::kShared ? "shared" : "private");
}

JobOptions GoldenJob(const std::string& name, const DaemonRun& run, const std::string& optimizer,
                     const kernels::Hyperparameters& hyper) {
  JobOptions job = JobOptions::ForDType(DType::kFloat32);
  job.name = name;
  job.optimizer = optimizer;
  job.groups = {{.name = "all",
                 .lr = hyper.lr,
                 .beta1 = hyper.beta1,
                 .beta2 = hyper.beta2,
                 .eps = hyper.eps,
                 .weight_decay = hyper.weight_decay,
                 .momentum = hyper.momentum,
                 .dampening = hyper.dampening,
                 .nesterov = hyper.nesterov,
                 .lr_decay = hyper.lr_decay,
                 .min_trust = hyper.min_trust,
                 .max_trust = hyper.max_trust}};
  job.slots = run.slots;
  job.stage = run.stage;
  job.weights = run.weights;
  job.chunk_elements = 4096;
  return job;
}

absl::Status RunRanks(const std::string& socket, const JobOptions& job, uint32_t ranks,
                      const std::vector<ParameterSpec>& parameters,
                      const std::function<absl::Status(Session*)>& body) {
  std::vector<absl::Status> statuses(ranks);
  const auto run = [&](uint32_t rank) -> absl::Status {
    SessionOptions options;
    options.address = socket;
    options.rank = rank;
    options.world_size = ranks;
    options.resume = Resume::kNever;
    const auto session = Session::Open(options, job, parameters);
    if (!session.ok()) return session.status();
    if (absl::Status s = body(session->get()); !s.ok()) return s;
    return (*session)->Close();
  };
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { statuses[rank] = run(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  absl::Status first;
  for (const absl::Status& status : statuses) {
    // Ranks that were left alone are told of it: the cause says more.
    if (status.ok() || (!first.ok() && GetRegrouped(status))) continue;
    if (first.ok() || GetRegrouped(first)) first = status;
  }
  return first;
}

absl::StatusOr<Decision> EndGoldenStep(Session* session, const StepReport& report) {
  if (absl::Status s = session->EndStep(report); !s.ok()) return s;
  absl::StatusOr<Decision> decision = session->WaitDecision();
  if (decision.ok() && decision->result != StepResult::kApplied) {
    return absl::InternalError(
        absl::StrCat("step ", decision->step, " was skipped: ", decision->reason));
  }
  return decision;
}

}  // namespace shardd::golden

#include "tests/golden/optimizer_run.h"

#include <bit>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace shardd::golden {
namespace {

constexpr size_t kParameter[] = {0};

absl::Status GiveGradient(Session* session, const OptimizerFile& file, size_t step,
                          uint32_t num_slots) {
  const std::span<const float> golden = file.grad(step);
  for (uint32_t slot = session->slots().lo; slot < session->slots().hi; ++slot) {
    const absl::StatusOr<void*> buffer = session->AcquireGrad(0, slot);
    if (!buffer.ok()) return buffer.status();
    auto* grad = static_cast<float*>(*buffer);
    for (size_t i = 0; i < golden.size(); ++i) {
      const bool mine = (i + step) % num_slots == slot;
      grad[i] = mine ? golden[i] * static_cast<float>(num_slots) : 0.0f;
    }
    if (absl::Status s = session->ReadyGrad(0, slot); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status ReadMasters(Session* session, std::vector<float>* masters) {
  absl::Status status = session->ReadState(StateKind::kMaster, 0, 0, std::span<float>(*masters));
  if (!status.ok()) return status;
  if (absl::Status s = session->Gather(kParameter); !s.ok()) return s;
  const absl::StatusOr<const void*> weights = session->WaitWeights(0);
  if (!weights.ok()) return weights.status();
  const bool equal = std::memcmp(*weights, masters->data(), masters->size() * sizeof(float)) == 0;
  if (absl::Status s = session->Release(kParameter); !s.ok()) return s;
  return equal ? absl::OkStatus()
               : absl::InternalError(absl::StrCat("rank ", session->rank(),
                                                  ": the fp32 working weights of step ",
                                                  session->next_step(), " are not the masters"));
}

}  // namespace

absl::StatusOr<OptimizerResult> RunOptimizer(const std::string& socket, const std::string& job_name,
                                             const OptimizerFile& file, const DaemonRun& run) {
  if (!std::has_single_bit(run.slots)) {
    return absl::InvalidArgumentError(
        absl::StrCat(run.slots, " slots: their mean is exact for powers of two only"));
  }
  OptimizerResult result{
      .optimizer = file.optimizer, .steps = file.steps, .elements = file.elements};
  std::vector<ParameterSpec> parameters(1);
  parameters[0].name = "param";
  parameters[0].shape = file.shape;
  const auto train = [&](Session* session) -> absl::Status {
    if (session->rank() == 0) {
      if (absl::Status s = session->Upload(0, 0, file.param0); !s.ok()) return s;
    }
    if (absl::Status s = session->FinishUpload(); !s.ok()) return s;
    std::vector<float> masters(file.elements);
    for (size_t step = 0; step < file.steps; ++step) {
      if (absl::Status s = GiveGradient(session, file, step, run.slots); !s.ok()) return s;
      StepReport report;
      report.slots.resize(session->slots().hi - session->slots().lo);
      if (const auto decision = EndGoldenStep(session, report); !decision.ok()) {
        return decision.status();
      }
      if (absl::Status s = ReadMasters(session, &masters); !s.ok()) return s;
      if (session->rank() == 0) result.Compare(file, step, masters);
    }
    return absl::OkStatus();
  };
  const JobOptions job = GoldenJob(job_name, run, file.optimizer, file.hyper);
  absl::Status status = RunRanks(socket, job, run.ranks, parameters, train);
  if (!status.ok()) return status;
  return result;
}

}  // namespace shardd::golden

#include "tests/golden/optimizer_golden.h"

#include <cmath>
#include <memory>
#include <vector>

#include "kernels/optimizer.h"
#include "kernels/trust_ratio.h"

namespace shardd::golden {

using kernels::DType;
using kernels::Isa;
using kernels::Optimizer;
using kernels::StepProgress;
using kernels::StepScalars;
using kernels::UpdateRun;

absl::StatusOr<OptimizerResult> CheckOptimizer(const std::string& path, Isa isa) {
  const auto reader = safetensors::Reader::Open(path);
  if (!reader.ok()) return reader.status();
  const absl::StatusOr<OptimizerFile> file = ReadOptimizerFile(**reader);
  if (!file.ok()) return file.status();
  const Optimizer* optimizer = kernels::FindOptimizer(file->optimizer);
  std::vector<float> master = file->param0, weight(file->elements);
  std::vector<float> state[kernels::kMaxStates];
  for (std::vector<float>& values : state) values.resize(file->elements);
  OptimizerResult result{
      .optimizer = file->optimizer, .steps = file->steps, .elements = file->elements};
  StepProgress products;
  for (size_t step = 0; step < file->steps; ++step) {
    StepScalars scalars = optimizer->Step(file->hyper, &products);
    UpdateRun run;
    run.master = master.data();
    for (int s = 0; s < optimizer->num_states(); ++s) run.state[s] = state[s].data();
    run.grad = file->grad(step).data();
    run.weight = weight.data();
    run.count = file->elements;
    run.weight_dtype = DType::kFloat32;
    run.scalars = &scalars;
    if (optimizer->has_trust_ratio()) {
      const kernels::StateArrays arrays = {master.data(), {state[0].data(), state[1].data()}};
      const kernels::TrustSums sums =
          kernels::TrustMeter().Measure(*optimizer, isa, {}, arrays, run);
      optimizer->SetTrust(file->hyper, std::sqrt(sums.parameter), std::sqrt(sums.direction),
                          &scalars);
    }
    optimizer->Update(isa, run);
    result.Compare(*file, step, master);
  }
  return result;
}

}  // namespace shardd::golden

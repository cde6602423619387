#include "tests/golden/optimizer_golden.h"

#include <memory>
#include <vector>

#include "kernels/optimizer.h"

namespace shardd::golden {

using kernels::BetaProducts;
using kernels::DType;
using kernels::Isa;
using kernels::Optimizer;
using kernels::StepScalars;
using kernels::UpdateRun;

absl::StatusOr<OptimizerResult> CheckOptimizer(const std::string& path, Isa isa) {
  const auto reader = safetensors::Reader::Open(path);
  if (!reader.ok()) return reader.status();
  const absl::StatusOr<OptimizerFile> file = ReadOptimizerFile(**reader);
  if (!file.ok()) return file.status();
  const Optimizer* optimizer = kernels::FindOptimizer(file->optimizer);
  std::vector<float> master = file->param0, weight(file->elements);
  std::vector<float> state[2] = {std::vector<float>(file->elements),
                                 std::vector<float>(file->elements)};
  OptimizerResult result{
      .optimizer = file->optimizer, .steps = file->steps, .elements = file->elements};
  BetaProducts products;
  for (size_t step = 0; step < file->steps; ++step) {
    const StepScalars scalars = optimizer->Step(file->hyper, &products);
    UpdateRun run;
    run.master = master.data();
    for (int s = 0; s < optimizer->num_states(); ++s) run.state[s] = state[s].data();
    run.grad = file->grad(step).data();
    run.weight = weight.data();
    run.count = file->elements;
    run.weight_dtype = DType::kFloat32;
    run.scalars = &scalars;
    optimizer->Update(isa, run);
    result.Compare(*file, step, master);
  }
  return result;
}

}  // namespace shardd::golden

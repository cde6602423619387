#include "kernels/trust_ratio.h"

#include "kernels/reduce.h"

namespace shardd::kernels {
namespace {

double SumSquares(Isa isa, const float* values, size_t count, float* copy) {
  ReduceProgram program;
  program.push = {true};
  program.max_depth = 1;
  const ReduceInput input{values, DType::kFloat32};
  BlockStats stats;
  Reduce(isa, program, {&input, 1}, count, copy, DType::kFloat32, &stats);
  return stats.sum_squares;
}

}  // namespace

struct TrustMeter::Scratch {
  alignas(64) float master[kBlockElements];
  alignas(64) float state[kMaxStates][kBlockElements];
  alignas(64) float weight[kBlockElements];
  alignas(64) float copy[kBlockElements];
};

TrustMeter::TrustMeter() : scratch_(new Scratch) {}
TrustMeter::~TrustMeter() = default;

TrustSums TrustMeter::Measure(const Optimizer& optimizer, Isa isa, const StateFormat& format,
                              const StateArrays& arrays, const UpdateRun& run) {
  Scratch& s = *scratch_;
  TrustSums sums;
  if (run.count == 0) return sums;
  UpdateRun on_copies = run;
  ReadMaster(isa, format, arrays, run.count, s.master);
  on_copies.master = s.master;
  sums.parameter = SumSquares(isa, s.master, run.count, s.copy);
  for (size_t i = 0; i < static_cast<size_t>(optimizer.num_states()); ++i) {
    ReadMoment(isa, format, arrays, i, run.count, s.state[i]);
    on_copies.state[i] = s.state[i];
  }
  on_copies.weight = s.weight;
  on_copies.weight_dtype = DType::kFloat32;
  on_copies.undo = nullptr;
  on_copies.nontemporal_weights = false;
  optimizer.Direction(isa, on_copies);
  sums.direction = SumSquares(isa, s.master, run.count, s.copy);
  return sums;
}

}  // namespace shardd::kernels

// Bytes per second of the device kernels beside a device-to-device copy, one JSON
// line a figure, median of nine interleaved pairs. Run by tests/gpu/run.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "kernels/cuda_kernels.h"

namespace shardd::kernels {
namespace {

constexpr size_t kElements = size_t{1} << 28;
constexpr size_t kRunElements = 65536;  // a table of 4096 runs
constexpr int kPairs = 9;

void MustSucceed(const char* error) {
  if (error == nullptr) return;
  std::fprintf(stderr, "cuda_bandwidth: %s\n", error);
  std::exit(1);
}
void MustSucceed(cudaError_t error) {
  MustSucceed(error == cudaSuccess ? nullptr : cudaGetErrorString(error));
}

uint8_t* Allocate(size_t bytes) {
  void* data = nullptr;
  MustSucceed(cudaMalloc(&data, bytes));
  MustSucceed(cudaMemset(data, 0, bytes));
  return static_cast<uint8_t*>(data);
}

double Seconds(const std::function<void()>& work) {
  cudaEvent_t begin, end;
  MustSucceed(cudaEventCreate(&begin));
  MustSucceed(cudaEventCreate(&end));
  MustSucceed(cudaEventRecord(begin));
  work();
  MustSucceed(cudaEventRecord(end));
  MustSucceed(cudaEventSynchronize(end));
  float milliseconds = 0;
  MustSucceed(cudaEventElapsedTime(&milliseconds, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return milliseconds * 1e-3;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// `copy` moves copy_bytes (read + written), `work` bytes.
void Report(const char* figure, double bytes, double copy_bytes, const std::function<void()>& work,
            const std::function<void()>& copy) {
  work();
  copy();
  std::vector<double> rates, ratios;
  for (int pair = 0; pair < kPairs; ++pair) {
    const double copy_rate = copy_bytes / Seconds(copy);
    rates.push_back(bytes / Seconds(work));
    ratios.push_back(rates.back() / copy_rate);
  }
  std::printf("{\"figure\": \"%s\", \"gigabytes_per_second\": %.0f, \"of_device_copy\": %.3f}\n",
              figure, Median(rates) * 1e-9, Median(ratios));
}

void Main() {
  uint8_t* const state = Allocate(kElements * 12);  // master, exp_avg, exp_avg_sq
  uint8_t* const grad = Allocate(kElements * 4);
  uint8_t* const weight = Allocate(kElements * 2);
  std::vector<cuda::DeviceRun> runs;
  for (size_t i = 0; i < kElements; i += kRunElements) {
    cuda::DeviceRun run;
    run.master = reinterpret_cast<float*>(state) + i;
    run.state[0] = reinterpret_cast<float*>(state) + kElements + i;
    run.state[1] = reinterpret_cast<float*>(state) + 2 * kElements + i;
    run.grad = grad + i * 2;
    run.weight = weight + i * 2;
    run.count = kRunElements;
    runs.push_back(run);
  }
  const auto copy = [&] {
    MustSucceed(
        cudaMemcpyAsync(state, state + kElements * 6, kElements * 6, cudaMemcpyDeviceToDevice));
  };
  const double copy_bytes = 2.0 * kElements * 6;

  std::unique_ptr<cuda::UpdateTable> table;
  MustSucceed(cuda::UpdateTable::Create(runs, &table));
  StepProgress products;
  const StepScalars scalars = FindOptimizer("adamw")->Step(Hyperparameters(), &products);
  cuda::UpdateArguments arguments;
  arguments.grad_dtype = DType::kBFloat16;
  arguments.weight_dtype = DType::kBFloat16;
  arguments.scalars = {&scalars, 1};
  Report(
      "gpu adamw, bf16 gradient and weight", 28.0 * kElements, copy_bytes,
      [&] { MustSucceed(table->Update("adamw", arguments, nullptr)); }, copy);

  for (const uint32_t slots : {2u, 4u, 8u, 16u}) {
    const size_t count = kElements * 6 / slots;  // inputs fill `state`
    const size_t reduced = std::min(count, kElements);
    std::vector<SlotRange> nodes;
    std::vector<ReduceInput> inputs;
    for (uint32_t slot = 0; slot < slots; ++slot) {
      nodes.push_back({slot, slot + 1});
      inputs.push_back({state + slot * count * 2, DType::kBFloat16});
    }
    ReduceProgram program;
    if (!SlotTreeProgram(slots, nodes, &program)) std::abort();
    auto* const stats = reinterpret_cast<BlockStats*>(weight);
    char figure[64];
    std::snprintf(figure, sizeof figure, "gpu reduce, %u bf16 slots", slots);
    Report(
        figure, double(reduced) * (2.0 * slots + 4), copy_bytes,
        [&] {
          MustSucceed(
              cuda::Reduce(program, inputs, reduced, grad, DType::kFloat32, stats, nullptr));
        },
        copy);
  }
  Report(
      "gpu cast, fp32 master to bf16 weight", 6.0 * kElements, copy_bytes,
      [&] {
        MustSucceed(cuda::MasterToWeight(reinterpret_cast<const float*>(state), kElements, weight,
                                         DType::kBFloat16, nullptr));
      },
      copy);
}

}  // namespace
}  // namespace shardd::kernels

int main() {
  if (shardd::kernels::cuda::DeviceCount() == 0) {
    std::printf("SKIPPED: no CUDA device here; no device bandwidth was measured.\n");
    return 0;
  }
  shardd::kernels::Main();
  return 0;
}

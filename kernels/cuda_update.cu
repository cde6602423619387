// The optimizers on a device: one launch over a table of runs.
#include <cuda_runtime.h>

#include <vector>

#include "kernels/cuda_kernels.h"
#include "kernels/scalar_lane.h"

#define SHARDD_LANE_FUNCTION __host__ __device__ __forceinline__

namespace shardd::kernels::cuda {
namespace {

#include "kernels/adam-inl.h"
#include "kernels/gradient_descent-inl.h"

constexpr uint32_t kThreads = 256;
// Elements per thread block. Small enough that a few runs fill a device.
constexpr uint32_t kTile = 4096;

struct Tile {
  uint32_t run;
  uint32_t index;  // of kTile elements within the run
};

template <class Formula>
__device__ __forceinline__ void UpdateElement(const Formula& formula, float grad_factor, float grad,
                                              float* master, float* state) {
  constexpr int kStates = Formula::kStates;
  grad = ScalarLane::Mul(grad, grad_factor);
  float m = Flush(*master);
  float flushed[kStates + 1];
#pragma unroll
  for (int s = 0; s < kStates; ++s) flushed[s] = Flush(state[s]);
  formula(grad, &m, flushed);
  *master = CanonicalizeNan(m);
#pragma unroll
  for (int s = 0; s < kStates; ++s) state[s] = CanonicalizeNan(flushed[s]);
}

// Four neighbouring elements, with one wide access to each array.
template <class Formula, DType kGrad, DType kWeight>
__device__ __forceinline__ void UpdateFour(const Formula& formula, float grad_factor,
                                           const DeviceRun& run, uint64_t i) {
  alignas(16) float master[4];
  alignas(16) float state[kMaxStates][4] = {};
  *reinterpret_cast<float4*>(master) = *reinterpret_cast<const float4*>(run.master + i);
#pragma unroll
  for (int s = 0; s < Formula::kStates; ++s) {
    *reinterpret_cast<float4*>(state[s]) = *reinterpret_cast<const float4*>(run.state[s] + i);
  }
  alignas(16) char raw_grad[16];
  alignas(16) char raw_weight[16];
  if constexpr (kGrad == DType::kFloat32) {
    *reinterpret_cast<float4*>(raw_grad) =
        *reinterpret_cast<const float4*>(static_cast<const float*>(run.grad) + i);
  } else {
    *reinterpret_cast<uint2*>(raw_grad) =
        *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(run.grad) + i);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float grad = ScalarLane::LoadAs<kGrad>(raw_grad, k);
    float of_element[kMaxStates] = {state[0][k], state[1][k], state[2][k]};
    UpdateElement(formula, grad_factor, grad, &master[k], of_element);
#pragma unroll
    for (int s = 0; s < Formula::kStates; ++s) state[s][k] = of_element[s];
    ScalarLane::StoreWeight<kWeight, false>(master[k], raw_weight, k);
  }
  *reinterpret_cast<float4*>(run.master + i) = *reinterpret_cast<const float4*>(master);
#pragma unroll
  for (int s = 0; s < Formula::kStates; ++s) {
    *reinterpret_cast<float4*>(run.state[s] + i) = *reinterpret_cast<const float4*>(state[s]);
  }
  if constexpr (kWeight == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(run.weight) + i) =
        *reinterpret_cast<const float4*>(raw_weight);
  } else {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(run.weight) + i) =
        *reinterpret_cast<const uint2*>(raw_weight);
  }
}

template <class Formula, DType kGrad, DType kWeight>
__device__ __forceinline__ void UpdateOne(const Formula& formula, float grad_factor,
                                          const DeviceRun& run, uint64_t i) {
  float master = run.master[i], state[kMaxStates] = {};
  for (int s = 0; s < Formula::kStates; ++s) state[s] = run.state[s][i];
  const float grad = ScalarLane::LoadAs<kGrad>(run.grad, i);
  UpdateElement(formula, grad_factor, grad, &master, state);
  run.master[i] = master;
  for (int s = 0; s < Formula::kStates; ++s) run.state[s][i] = state[s];
  ScalarLane::StoreWeight<kWeight, false>(master, run.weight, i);
}

__device__ __forceinline__ bool WideAccessAllowed(const DeviceRun& run) {
  const uintptr_t all =
      reinterpret_cast<uintptr_t>(run.master) | reinterpret_cast<uintptr_t>(run.state[0]) |
      reinterpret_cast<uintptr_t>(run.state[1]) | reinterpret_cast<uintptr_t>(run.state[2]) |
      reinterpret_cast<uintptr_t>(run.grad) | reinterpret_cast<uintptr_t>(run.weight);
  return all % 16 == 0;
}

template <class Formula, DType kGrad, DType kWeight>
__global__ void __launch_bounds__(kThreads)
    UpdateTiles(const DeviceRun* runs, const Tile* tiles, const StepScalars* scalars,
                float grad_factor) {
  const Tile tile = tiles[blockIdx.x];
  const DeviceRun run = runs[tile.run];
  const Formula formula(reinterpret_cast<const float*>(scalars + run.scalars));
  grad_factor = ScalarLane::Set(grad_factor);
  const uint64_t begin = static_cast<uint64_t>(tile.index) * kTile;
  const uint64_t end = begin + kTile < run.count ? begin + kTile : run.count;
  const uint64_t wide_end = WideAccessAllowed(run) ? begin + (end - begin) / 4 * 4 : begin;
  for (uint64_t i = begin + 4 * threadIdx.x; i < wide_end; i += 4 * kThreads) {
    UpdateFour<Formula, kGrad, kWeight>(formula, grad_factor, run, i);
  }
  for (uint64_t i = wide_end + threadIdx.x; i < end; i += kThreads) {
    UpdateOne<Formula, kGrad, kWeight>(formula, grad_factor, run, i);
  }
}

using UpdateKernel = void (*)(const DeviceRun*, const Tile*, const StepScalars*, float);

template <class Formula, DType kGrad>
UpdateKernel ChooseByWeight(DType weight) {
  switch (weight) {
    case DType::kFloat32:
      return UpdateTiles<Formula, kGrad, DType::kFloat32>;
    case DType::kBFloat16:
      return UpdateTiles<Formula, kGrad, DType::kBFloat16>;
    case DType::kFloat16:
      return UpdateTiles<Formula, kGrad, DType::kFloat16>;
  }
  return nullptr;
}

template <class Formula>
UpdateKernel Choose(DType grad, DType weight) {
  switch (grad) {
    case DType::kFloat32:
      return ChooseByWeight<Formula, DType::kFloat32>(weight);
    case DType::kBFloat16:
      return ChooseByWeight<Formula, DType::kBFloat16>(weight);
    case DType::kFloat16:
      return ChooseByWeight<Formula, DType::kFloat16>(weight);
  }
  return nullptr;
}

UpdateKernel ChooseByName(std::string_view optimizer, DType grad, DType weight) {
  struct Entry {
    std::string_view name;
    UpdateKernel (*choose)(DType grad, DType weight);
  };
  static constexpr Entry kEntries[] = {
      {"adamw", Choose<AdamWFormula<ScalarLane>>},
      {"adamw_amsgrad", Choose<AdamWAmsgradFormula<ScalarLane>>},
      {"adam", Choose<AdamFormula<ScalarLane>>},
      {"adam_amsgrad", Choose<AdamAmsgradFormula<ScalarLane>>},
      {"sgd", Choose<SgdFormula<ScalarLane>>},
      {"adagrad", Choose<AdagradFormula<ScalarLane>>},
      {"rmsprop", Choose<RmsPropFormula<ScalarLane>>},
      {"lion", Choose<LionFormula<ScalarLane>>},
      {"lamb", Choose<LambFormula<ScalarLane>>},
  };
  for (const Entry& entry : kEntries) {
    if (entry.name == optimizer) return entry.choose(grad, weight);
  }
  return nullptr;
}

const char* Result(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class T>
cudaError_t Upload(const std::vector<T>& from, T** to) {
  cudaError_t error = cudaMalloc(reinterpret_cast<void**>(to), from.size() * sizeof(T));
  if (error != cudaSuccess) return error;
  return cudaMemcpy(*to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice);
}

}  // namespace

int DeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

const char* UpdateTable::Create(std::span<const DeviceRun> runs,
                                std::unique_ptr<UpdateTable>* table) {
  std::unique_ptr<UpdateTable> made(new UpdateTable);
  std::vector<Tile> tiles;
  for (size_t r = 0; r < runs.size(); ++r) {
    const uint64_t num_tiles = (runs[r].count + kTile - 1) / kTile;
    for (uint64_t t = 0; t < num_tiles; ++t) {
      tiles.push_back({static_cast<uint32_t>(r), static_cast<uint32_t>(t)});
    }
    if (runs[r].scalars >= made->num_scalars_) made->num_scalars_ = runs[r].scalars + 1;
  }
  if (tiles.size() > 0x7FFFFFFF) return "more elements than one launch can update";
  made->num_tiles_ = tiles.size();
  if (!tiles.empty()) {
    cudaError_t error = Upload(std::vector<DeviceRun>(runs.begin(), runs.end()), &made->runs_);
    if (error == cudaSuccess) error = Upload(tiles, reinterpret_cast<Tile**>(&made->tiles_));
    if (error == cudaSuccess) {
      error = cudaMalloc(reinterpret_cast<void**>(&made->scalars_),
                         made->num_scalars_ * sizeof(StepScalars));
    }
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  *table = std::move(made);
  return nullptr;
}

UpdateTable::~UpdateTable() {
  cudaFree(runs_);
  cudaFree(tiles_);
  cudaFree(scalars_);
}

const char* UpdateTable::Update(std::string_view optimizer, const UpdateArguments& arguments,
                                Stream stream) {
  const UpdateKernel kernel = ChooseByName(optimizer, arguments.grad_dtype, arguments.weight_dtype);
  if (kernel == nullptr) return "no optimizer of that name has a device kernel, or a dtype is none";
  if (num_tiles_ == 0) return nullptr;
  if (arguments.scalars.size() < num_scalars_)
    return "a run names step scalars that were not given";
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  // From pageable memory: the source is copied when the call returns.
  const cudaError_t error =
      cudaMemcpyAsync(scalars_, arguments.scalars.data(), num_scalars_ * sizeof(StepScalars),
                      cudaMemcpyHostToDevice, cuda_stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  kernel<<<static_cast<unsigned>(num_tiles_), kThreads, 0, cuda_stream>>>(
      runs_, static_cast<const Tile*>(tiles_), scalars_, arguments.grad_factor);
  return Result(cudaGetLastError());
}

}  // namespace shardd::kernels::cuda

// The slot-tree reduction on a device. One warp folds one block of 4096 elements:
// its 32 threads are the 32 lanes of the norm.
#include <cuda_runtime.h>

#include "kernels/cuda_kernels.h"
#include "kernels/scalar_lane.h"

namespace shardd::kernels::cuda {
namespace {

constexpr int kMaxInputs = 64;
constexpr int kMaxDepth = 32;
constexpr unsigned kThreads = 256;

// By value in the launch: a program of n inputs has 2n - 1 operations.
struct DeviceProgram {
  const void* data[kMaxInputs];
  DType dtype[kMaxInputs];
  uint64_t push[2];  // bit k: operation k pushes
  int operations;
  int inputs;
};

__device__ __forceinline__ float LoadInput(const void* data, DType dtype, size_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return ScalarLane::LoadAs<DType::kFloat32>(data, i);
    case DType::kBFloat16:
      return ScalarLane::LoadAs<DType::kBFloat16>(data, i);
    case DType::kFloat16:
      return ScalarLane::LoadAs<DType::kFloat16>(data, i);
  }
  return 0.0f;
}

// Any program, by its stack.
struct AnyTree {
  static __device__ float Evaluate(const DeviceProgram& program, size_t i) {
    float stack[kMaxDepth];
    int depth = 0, next = 0;
    for (int k = 0; k < program.operations; ++k) {
      if ((program.push[k / 64] >> (k % 64) & 1) != 0) {
        stack[depth++] = LoadInput(program.data[next], program.dtype[next], i);
        ++next;
      } else {
        --depth;
        stack[depth - 1] = ScalarLane::Add(stack[depth - 1], stack[depth]);
      }
    }
    return stack[0];
  }
};

// kInputs leaves of one dtype, a power of two: in registers.
template <int kInputs, DType kDType>
struct FullTree {
  template <int kFirst, int kCount>
  static __device__ __forceinline__ float Node(const DeviceProgram& program, size_t i) {
    if constexpr (kCount == 1) {
      return ScalarLane::LoadAs<kDType>(program.data[kFirst], i);
    } else {
      return ScalarLane::Add(Node<kFirst, kCount / 2>(program, i),
                             Node<kFirst + kCount / 2, kCount / 2>(program, i));
    }
  }
  static __device__ __forceinline__ float Evaluate(const DeviceProgram& program, size_t i) {
    return Node<0, kInputs>(program, i);
  }
};

template <class Tree, DType kOut>
__global__ void __launch_bounds__(kThreads)
    ReduceBlocks(const __grid_constant__ DeviceProgram program, size_t count, void* out,
                 BlockStats* stats) {
  const unsigned lane = threadIdx.x % 32;
  const size_t block = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const size_t begin = block * kBlockElements;
  if (begin >= count) return;  // the whole warp
  const size_t end = begin + kBlockElements < count ? begin + kBlockElements : count;
  double sum = 0;
  bool finite = true;
#pragma unroll 8
  for (size_t i = begin + lane; i < end; i += 32) {
    const float x = CanonicalizeNan(Tree::Evaluate(program, i));
    ScalarLane::StoreNearest<kOut>(x, out, i);
    const double wide = x;
    sum = __fma_rn(wide, wide, sum);
    finite = finite && (FloatToBits(x) & kExponentMask) != kExponentMask;
  }
  // Neighbours first: the slot tree over 32 lanes. Addition commutes, so every
  // thread holds the bits of its node.
  for (int distance = 1; distance < 32; distance *= 2) {
    sum = __dadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, distance));
  }
  const bool all_finite = __all_sync(0xFFFFFFFFu, finite);
  if (lane == 0 && stats != nullptr) {
    stats[block].sum_squares = sum == sum ? sum : __longlong_as_double(0x7FF8000000000000ll);
    stats[block].nonfinite = all_finite ? 0 : 1;
  }
}

using ReduceKernel = void (*)(DeviceProgram, size_t, void*, BlockStats*);

template <DType kDType>
ReduceKernel ChooseFull(int inputs) {
  switch (inputs) {
    case 2:
      return ReduceBlocks<FullTree<2, kDType>, DType::kFloat32>;
    case 4:
      return ReduceBlocks<FullTree<4, kDType>, DType::kFloat32>;
    case 8:
      return ReduceBlocks<FullTree<8, kDType>, DType::kFloat32>;
    case 16:
      return ReduceBlocks<FullTree<16, kDType>, DType::kFloat32>;
  }
  return nullptr;
}

// The program of a full tree adds as many times after its k-th push as k + 1 has
// factors of two.
bool IsFull(const ReduceProgram& program, size_t inputs) {
  size_t operation = 0;
  for (size_t k = 1; k <= inputs; ++k) {
    if (operation == program.push.size() || !program.push[operation++]) return false;
    for (size_t factor = k; factor % 2 == 0; factor /= 2) {
      if (operation == program.push.size() || program.push[operation++]) return false;
    }
  }
  return operation == program.push.size();
}

ReduceKernel ChooseKernel(const ReduceProgram& program, std::span<const ReduceInput> inputs,
                          DType out_dtype) {
  const DType dtype = inputs[0].dtype;
  if (out_dtype == DType::kBFloat16) return ReduceBlocks<AnyTree, DType::kBFloat16>;
  if (out_dtype == DType::kFloat16) return ReduceBlocks<AnyTree, DType::kFloat16>;
  bool same = true;
  for (const ReduceInput& input : inputs) same = same && input.dtype == dtype;
  ReduceKernel kernel = nullptr;
  if (same && IsFull(program, inputs.size())) {
    const int count = static_cast<int>(inputs.size());
    if (dtype == DType::kFloat32) kernel = ChooseFull<DType::kFloat32>(count);
    if (dtype == DType::kBFloat16) kernel = ChooseFull<DType::kBFloat16>(count);
    if (dtype == DType::kFloat16) kernel = ChooseFull<DType::kFloat16>(count);
  }
  return kernel != nullptr ? kernel : ReduceBlocks<AnyTree, DType::kFloat32>;
}

}  // namespace

const char* Reduce(const ReduceProgram& program, std::span<const ReduceInput> inputs, size_t count,
                   void* out, DType out_dtype, BlockStats* stats, Stream stream) {
  if (inputs.empty() || inputs.size() > kMaxInputs || program.max_depth > kMaxDepth) {
    return "a device reduction takes 1 to 64 inputs and a depth of at most 32";
  }
  if (program.push.size() != 2 * inputs.size() - 1) {
    return "the reduction program is not one of as many inputs as were given";
  }
  if (count == 0) return nullptr;
  DeviceProgram device = {};
  for (size_t k = 0; k < inputs.size(); ++k) {
    device.data[k] = inputs[k].data;
    device.dtype[k] = inputs[k].dtype;
  }
  for (size_t k = 0; k < program.push.size(); ++k) {
    if (program.push[k]) device.push[k / 64] |= uint64_t{1} << (k % 64);
  }
  device.operations = static_cast<int>(program.push.size());
  device.inputs = static_cast<int>(inputs.size());
  const size_t blocks = (count + kBlockElements - 1) / kBlockElements;
  const auto grid = static_cast<unsigned>((blocks * 32 + kThreads - 1) / kThreads);
  ChooseKernel(program, inputs,
               out_dtype)<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(device, count,
                                                                                    out, stats);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace shardd::kernels::cuda

// The casts on a device.
#include <cuda_runtime.h>

#include "kernels/cuda_kernels.h"
#include "kernels/scalar_lane.h"

namespace shardd::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr size_t kMaxBlocks = 16384;  // each thread strides over the rest

template <DType kDType>
struct WeightCast {
  static __device__ __forceinline__ void Apply(const void* in, size_t i, void* out) {
    const float x = CanonicalizeNan(ScalarLane::LoadAs<DType::kFloat32>(in, i));
    ScalarLane::StoreWeight<kDType, false>(x, out, i);
  }
};

template <DType kDType>
struct GradCast {
  static __device__ __forceinline__ void Apply(const void* in, size_t i, void* out) {
    const float x = CanonicalizeNan(ScalarLane::LoadAs<DType::kFloat32>(in, i));
    ScalarLane::StoreNearest<kDType>(x, out, i);
  }
};

template <DType kDType>
struct WideningCast {
  static __device__ __forceinline__ void Apply(const void* in, size_t i, void* out) {
    static_cast<float*>(out)[i] = CanonicalizeNan(ScalarLane::LoadExact<kDType>(in, i));
  }
};

template <class Cast>
__global__ void __launch_bounds__(kThreads) CastElements(const void* in, size_t count, void* out) {
  const size_t stride = static_cast<size_t>(gridDim.x) * kThreads;
  for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    Cast::Apply(in, i, out);
  }
}

template <template <DType> class Cast>
const char* Launch(const void* in, size_t count, void* out, DType dtype, Stream stream) {
  if (count == 0) return nullptr;
  const size_t blocks = (count + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case DType::kFloat32:
      CastElements<Cast<DType::kFloat32>><<<grid, kThreads, 0, cuda_stream>>>(in, count, out);
      break;
    case DType::kBFloat16:
      CastElements<Cast<DType::kBFloat16>><<<grid, kThreads, 0, cuda_stream>>>(in, count, out);
      break;
    case DType::kFloat16:
      CastElements<Cast<DType::kFloat16>><<<grid, kThreads, 0, cuda_stream>>>(in, count, out);
      break;
    default:
      return "the dtype to cast is none";
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* MasterToWeight(const float* master, size_t count, void* weight, DType dtype,
                           Stream stream) {
  return Launch<WeightCast>(master, count, weight, dtype, stream);
}

const char* Fp32ToGrad(const float* in, size_t count, void* out, DType dtype, Stream stream) {
  return Launch<GradCast>(in, count, out, dtype, stream);
}

const char* ToFp32(const void* in, DType dtype, size_t count, float* out, Stream stream) {
  return Launch<WideningCast>(in, count, out, dtype, stream);
}

}  // namespace shardd::kernels::cuda

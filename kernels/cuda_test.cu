// The device kernels give the bits of the scalar kernels. A plain program, so
// that a machine with nothing but nvcc and g++ can run it (tests/gpu/run).
//
//   cuda_test [--require]
//
// Without a CUDA device it says so in one line and ends with 0, or with 1 under
// --require.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cast.h"
#include "kernels/cuda_kernels.h"
#include "kernels/hostile_values.h"
#include "kernels/optimizer.h"
#include "kernels/reduce.h"

namespace shardd::kernels {
namespace {

int failures = 0;
int checks = 0;

void Check(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

// For calls that later ones need.
void MustSucceed(const char* error, const char* what) {
  if (error == nullptr) return;
  std::printf("FAILED: %s: %s\n", what, error);
  std::exit(1);
}
void MustSucceed(cudaError_t error, const char* what) {
  MustSucceed(error == cudaSuccess ? nullptr : cudaGetErrorString(error), what);
}

const char* Name(DType dtype) {
  return dtype == DType::kFloat32 ? "fp32" : dtype == DType::kBFloat16 ? "bf16" : "fp16";
}

// An array in device memory, filled from and copied to the host.
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<uint8_t>& bytes) : size_(bytes.size()) {
    MustSucceed(cudaMalloc(&data_, size_ + 1), "cudaMalloc");
    MustSucceed(cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice), "copy in");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  uint8_t* at(size_t offset) const { return static_cast<uint8_t*>(data_) + offset; }
  std::vector<uint8_t> Bytes() const {
    std::vector<uint8_t> bytes(size_);
    MustSucceed(cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost), "copy out");
    return bytes;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
};

// --- Update ---

struct Extent {
  size_t first, count;
};

// Sizes 1..257 with every alignment, gaps between them, and a large one.
std::vector<Extent> Extents(size_t* total) {
  std::vector<Extent> extents;
  size_t next = 0;
  for (size_t count = 1; count <= 257; ++count) {
    const size_t first = (next + 31) / 32 * 32 + (count % 2 == 0 ? count % 7 : 0);
    extents.push_back({first, count});
    next = first + count + 1;
  }
  const size_t first = (next + 31) / 32 * 32;
  extents.push_back({first, 1'000'003});
  *total = first + 1'000'003 + 8;
  return extents;
}

void TestUpdate(const Optimizer& optimizer, DType grad_dtype, DType weight_dtype) {
  size_t total = 0;
  const std::vector<Extent> extents = Extents(&total);
  constexpr int kGrad = 1 + kMaxStates, kWeight = kGrad + 1;
  std::vector<std::vector<uint8_t>> host;  // master, states, grad, weight
  for (uint32_t k = 0; k < kGrad; ++k) host.push_back(HostileArray(DType::kFloat32, total, 10 + k));
  host.push_back(HostileArray(grad_dtype, total, 9));
  host.emplace_back(total * DTypeSize(weight_dtype), 0xA5);
  std::vector<std::unique_ptr<DeviceArray>> device;
  for (const auto& array : host) device.push_back(std::make_unique<DeviceArray>(array));

  Hyperparameters hyper;
  hyper.weight_decay = 0.1;
  hyper.momentum = 0.9;
  hyper.nesterov = true;
  StepProgress progress;
  const StepScalars scalars[2] = {optimizer.Step(hyper, &progress),
                                  optimizer.Step(hyper, &progress)};

  std::vector<cuda::DeviceRun> runs;
  for (size_t r = 0; r < extents.size(); ++r) {
    const auto [first, count] = extents[r];
    const size_t grad_at = first * DTypeSize(grad_dtype),
                 weight_at = first * DTypeSize(weight_dtype);
    cuda::DeviceRun on_device;
    UpdateRun run;
    on_device.master = reinterpret_cast<float*>(device[0]->at(first * 4));
    run.master = reinterpret_cast<float*>(host[0].data()) + first;
    for (int s = 0; s < optimizer.num_states(); ++s) {
      on_device.state[s] = reinterpret_cast<float*>(device[1 + s]->at(first * 4));
      run.state[s] = reinterpret_cast<float*>(host[1 + s].data()) + first;
    }
    on_device.grad = device[kGrad]->at(grad_at);
    on_device.weight = device[kWeight]->at(weight_at);
    on_device.count = count;
    on_device.scalars = r % 2;
    runs.push_back(on_device);

    run.grad = host[kGrad].data() + grad_at;
    run.weight = host[kWeight].data() + weight_at;
    run.count = count;
    run.grad_dtype = grad_dtype;
    run.weight_dtype = weight_dtype;
    run.grad_factor = 0.37f;
    run.scalars = &scalars[r % 2];
    optimizer.Update(Isa::kScalar, run);
  }

  std::unique_ptr<cuda::UpdateTable> table;
  MustSucceed(cuda::UpdateTable::Create(runs, &table), "UpdateTable::Create");
  cuda::UpdateArguments arguments;
  arguments.grad_dtype = grad_dtype;
  arguments.weight_dtype = weight_dtype;
  arguments.grad_factor = 0.37f;
  arguments.scalars = scalars;
  MustSucceed(table->Update(optimizer.name(), arguments, nullptr), "UpdateTable::Update");
  const char* const arrays[] = {"master", "state 0", "state 1", "state 2", "grad", "weight"};
  for (size_t k = 0; k < host.size(); ++k) {
    Check(device[k]->Bytes() == host[k], std::string(optimizer.name()) + " " + arrays[k] +
                                             ", grad " + Name(grad_dtype) + ", weight " +
                                             Name(weight_dtype));
  }
  Check(table->Update("adamv", arguments, nullptr) != nullptr, "an unknown optimizer is refused");
  arguments.scalars = std::span<const StepScalars>(scalars, 1);
  Check(table->Update(optimizer.name(), arguments, nullptr) != nullptr,
        "missing scalars are refused");
}

// --- Reduce ---

// Folds `leaves` of `count` elements on both; nodes of one slot each.
void TestReduceLeaves(uint32_t slots, const std::vector<DType>& dtypes, size_t count,
                      DType out_dtype) {
  std::vector<SlotRange> nodes;
  std::vector<std::vector<uint8_t>> leaves;
  std::vector<std::unique_ptr<DeviceArray>> device_leaves;
  std::vector<ReduceInput> host_inputs, device_inputs;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    const DType dtype = dtypes[slot % dtypes.size()];
    nodes.push_back({slot, slot + 1});
    leaves.push_back(HostileArray(dtype, count, 100 * slots + slot));
    device_leaves.push_back(std::make_unique<DeviceArray>(leaves.back()));
    device_inputs.push_back({device_leaves.back()->at(0), dtype});
  }
  for (uint32_t slot = 0; slot < slots; ++slot) {
    host_inputs.push_back({leaves[slot].data(), dtypes[slot % dtypes.size()]});
  }
  ReduceProgram program;
  if (!SlotTreeProgram(slots, nodes, &program)) std::abort();
  const size_t blocks = (count + kBlockElements - 1) / kBlockElements;
  std::vector<uint8_t> sum(count * DTypeSize(out_dtype) + 8, 0xA5);
  std::vector<uint8_t> stats_bytes(blocks * sizeof(BlockStats));
  const DeviceArray device_sum(sum), device_stats(stats_bytes);
  std::vector<BlockStats> stats(blocks);
  Reduce(Isa::kScalar, program, host_inputs, count, sum.data(), out_dtype, stats.data());
  MustSucceed(cuda::Reduce(program, device_inputs, count, device_sum.at(0), out_dtype,
                           reinterpret_cast<BlockStats*>(device_stats.at(0)), nullptr),
              "cuda::Reduce");
  const std::string what = std::to_string(slots) + " slots of " + Name(dtypes[0]) + ", " +
                           std::to_string(count) + " elements";
  Check(device_sum.Bytes() == sum, "sum of " + what);
  stats_bytes = device_stats.Bytes();
  bool same = true;
  for (size_t b = 0; b < blocks; ++b) {
    BlockStats device_block;
    std::memcpy(&device_block, &stats_bytes[b * sizeof(BlockStats)], sizeof(BlockStats));
    same = same && device_block.nonfinite == stats[b].nonfinite &&
           std::memcmp(&device_block.sum_squares, &stats[b].sum_squares, 8) == 0;
  }
  Check(same, "norm of " + what);
}

void TestReduce() {
  for (const DType dtype : kAllDTypes) {
    for (uint32_t slots = 1; slots <= 24; ++slots) {
      TestReduceLeaves(slots, {dtype}, 12'321, DType::kFloat32);
    }
    for (const size_t count : {1, 31, 32, 33, 4095, 4096, 4097, 1'000'003}) {
      TestReduceLeaves(4, {dtype}, count, DType::kFloat32);
      TestReduceLeaves(1, {dtype}, count, dtype);
    }
  }
  TestReduceLeaves(8, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, 5000, DType::kFloat32);
  TestReduceLeaves(64, {DType::kBFloat16}, 5000, DType::kFloat32);
  Check(cuda::Reduce(ReduceProgram(), {}, 1, nullptr, DType::kFloat32, nullptr, nullptr) != nullptr,
        "no inputs are refused");
}

// --- Casts ---

void TestCasts() {
  // Every upper half with eight lower halves, those of ties among them.
  std::vector<uint8_t> in(8 * 65536 * sizeof(float));
  const uint32_t low[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x3000};
  for (uint32_t i = 0; i < 8 * 65536; ++i) {
    const uint32_t bits = (i / 8) << 16 | low[i % 8];
    std::memcpy(&in[i * 4], &bits, 4);
  }
  std::vector<uint8_t> all16(65536 * 2);
  for (uint32_t i = 0; i < 65536; ++i) {
    all16[2 * i] = static_cast<uint8_t>(i);
    all16[2 * i + 1] = static_cast<uint8_t>(i >> 8);
  }
  const size_t count = in.size() / 4;
  const DeviceArray device_in(in), device16(all16);
  const float* const host_in = reinterpret_cast<const float*>(in.data());
  const float* const device_floats = reinterpret_cast<const float*>(device_in.at(0));
  for (const DType dtype : kAllDTypes) {
    std::vector<uint8_t> expected(count * DTypeSize(dtype));
    const DeviceArray out(expected);
    MasterToWeight(Isa::kScalar, host_in, count, expected.data(), dtype);
    MustSucceed(cuda::MasterToWeight(device_floats, count, out.at(0), dtype, nullptr), "cast");
    Check(out.Bytes() == expected, std::string("weights in ") + Name(dtype));
    Fp32ToGrad(Isa::kScalar, host_in, count, expected.data(), dtype);
    MustSucceed(cuda::Fp32ToGrad(device_floats, count, out.at(0), dtype, nullptr), "cast");
    Check(out.Bytes() == expected, std::string("gradients in ") + Name(dtype));

    const bool narrow = dtype != DType::kFloat32;
    const size_t n = narrow ? 65536 : count;
    std::vector<uint8_t> wide(n * 4);
    const DeviceArray device_wide(wide);
    ToFp32(Isa::kScalar, narrow ? all16.data() : in.data(), dtype, n,
           reinterpret_cast<float*>(wide.data()));
    MustSucceed(cuda::ToFp32(narrow ? device16.at(0) : device_in.at(0), dtype, n,
                             reinterpret_cast<float*>(device_wide.at(0)), nullptr),
                "cast");
    Check(device_wide.Bytes() == wide, std::string("widened ") + Name(dtype));
  }
}

int Main(bool required) {
  if (cuda::DeviceCount() == 0) {
    std::printf("SKIPPED: no CUDA device here; the GPU kernels were NOT tested.\n");
    return required ? 1 : 0;
  }
  cudaDeviceProp properties;
  MustSucceed(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("device: %s, sm_%d%d\n", properties.name, properties.major, properties.minor);
  for (const DType grad : kAllDTypes) {
    for (const std::string_view name : OptimizerNames()) {
      for (const DType weight : kAllDTypes) TestUpdate(*FindOptimizer(name), grad, weight);
    }
  }
  TestReduce();
  TestCasts();
  MustSucceed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::printf("gpu: %d checks passed, %d failed\n", checks - failures, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace shardd::kernels

int main(int argc, char** argv) {
  return shardd::kernels::Main(argc > 1 && std::strcmp(argv[1], "--require") == 0);
}

// The kernels on a CUDA device: the same formulas, the same bits as the CPU's
// (tests/gpu compares them).
//
// Every pointer to data is a device pointer. Calls are asynchronous on `stream`
// and thread-safe on disjoint outputs. They return null, or what CUDA or the
// arguments had against it (a string that lives for ever).
#ifndef SHARDD_KERNELS_CUDA_KERNELS_H_
#define SHARDD_KERNELS_CUDA_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "kernels/dtype.h"
#include "kernels/optimizer.h"
#include "kernels/reduce.h"

namespace shardd::kernels::cuda {

using Stream = void*;  // a cudaStream_t

// Devices that can be used; 0 where there is no driver.
int DeviceCount();

// One run of elements of one parameter (UpdateRun without what a device lacks:
// state in device memory dies with the device, so there is no undo log).
struct DeviceRun {
  float* master = nullptr;        // [count]
  float* state[kMaxStates] = {};  // [count] each; those the optimizer has
  const void* grad = nullptr;     // [count]
  void* weight = nullptr;         // [count]
  uint64_t count = 0;
  uint32_t scalars = 0;  // which of the step scalars are this run's
};

struct UpdateArguments {
  DType grad_dtype = DType::kFloat32;  // of every run
  DType weight_dtype = DType::kFloat32;
  float grad_factor = 1.0f;
  std::span<const StepScalars> scalars;  // in host memory; copied before the call returns
};

// A table of runs in device memory, so that one launch updates any number of
// chunks and parameters. Belongs to the device that was current at Create.
class UpdateTable {
 public:
  static const char* Create(std::span<const DeviceRun> runs, std::unique_ptr<UpdateTable>* table);
  ~UpdateTable();
  UpdateTable(const UpdateTable&) = delete;
  UpdateTable& operator=(const UpdateTable&) = delete;

  // Updates every run by the optimizer of that name. One update of a table at a
  // time.
  const char* Update(std::string_view optimizer, const UpdateArguments& arguments, Stream stream);

 private:
  UpdateTable() = default;

  DeviceRun* runs_ = nullptr;       // device
  void* tiles_ = nullptr;           // device: which elements of which run a thread block updates
  StepScalars* scalars_ = nullptr;  // device
  size_t num_tiles_ = 0;
  size_t num_scalars_ = 0;
};

// Reduce of reduce.h. At most 64 inputs and a depth of 32; stats, in device
// memory too, may be null.
const char* Reduce(const ReduceProgram& program, std::span<const ReduceInput> inputs, size_t count,
                   void* out, DType out_dtype, BlockStats* stats, Stream stream);

// The casts of cast.h.
const char* MasterToWeight(const float* master, size_t count, void* weight, DType dtype,
                           Stream stream);
const char* Fp32ToGrad(const float* in, size_t count, void* out, DType dtype, Stream stream);
const char* ToFp32(const void* in, DType dtype, size_t count, float* out, Stream stream);

}  // namespace shardd::kernels::cuda

#endif  // SHARDD_KERNELS_CUDA_KERNELS_H_

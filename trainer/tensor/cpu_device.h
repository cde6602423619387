// The CPU as a Device: oneDNN for products, cpu_kernels for the rest, OpenMP for
// threads.
#ifndef SHARDD_TRAINER_TENSOR_CPU_DEVICE_H_
#define SHARDD_TRAINER_TENSOR_CPU_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "trainer/tensor/cpu_gemm.h"
#include "trainer/tensor/device.h"

namespace shardd::tensor {

// All calls come from the thread that made the device. Everything but matrix
// products gives the same bits for any number of threads; products give the same
// bits for a fixed number on one instruction set.
class CpuDevice final : public Device {
 public:
  struct Options {
    // Threads of the calling thread's OpenMP team, itself included; at least 1.
    // Never taken from the machine: it is part of what makes a run repeatable.
    int threads = 1;
  };
  explicit CpuDevice(const Options& options);
  ~CpuDevice() override;

  int threads() const { return threads_; }
  // Whether bf16 products are native (AVX-512 BF16 or AMX) rather than emulated.
  bool native_bf16() const { return gemm_.native_bf16(); }
  // Memory taken from the system, in use or kept for reuse.
  size_t reserved_bytes() const { return reserved_bytes_; }

  void* Allocate(size_t bytes) override;
  void Free(void* data, size_t bytes) override;
  void FromHost(const void* host, size_t bytes, void* data) override;
  void ToHost(const void* data, size_t bytes, void* host) override;
  void Gemm(const GemmArgs& args) override;
  void Fill(float value, int64_t count, float* out) override;
  void Cast(ConstBuffer in, int64_t count, Buffer out) override;
  void Add(ConstBuffer a, ConstBuffer b, int64_t count, Buffer out) override;
  void ColumnSum(ConstBuffer x, int64_t rows, int64_t cols, bool accumulate, float* out) override;
  void LayerNorm(const LayerNormArgs& args, Buffer y) override;
  void LayerNormBackward(const LayerNormArgs& args, ConstBuffer dy, bool accumulate_dx, Buffer dx,
                         bool accumulate_gain, float* d_gain, bool accumulate_bias,
                         float* d_bias) override;
  void Gelu(ConstBuffer x, int64_t count, Buffer y) override;
  void GeluBackward(ConstBuffer x, ConstBuffer dy, int64_t count, Buffer dx) override;
  void CausalAttention(const AttentionArgs& args, Buffer out) override;
  void CausalAttentionBackward(const AttentionArgs& args, ConstBuffer out, ConstBuffer d_out,
                               Buffer d_qkv) override;
  void GatherRows(ConstBuffer table, const int32_t* ids, int64_t rows, int64_t cols,
                  bool accumulate, float* out) override;
  void ScatterAddRows(ConstBuffer dy, const int32_t* ids, int64_t rows, int64_t cols,
                      int64_t vocabulary, bool accumulate, float* grad) override;
  void CrossEntropy(ConstBuffer logits, const int32_t* labels, int64_t rows, int64_t classes,
                    int64_t targets, float* lse, double* loss) override;
  void CrossEntropyBackward(ConstBuffer logits, const int32_t* labels, int64_t rows,
                            int64_t classes, int64_t targets, const float* lse, const float* d_loss,
                            Buffer d_logits) override;

 private:
  // Calls body(begin, end) over [0, count) in pieces of `grain`, which is what
  // fixes the result; threads take pieces.
  void ForPieces(int64_t count, int64_t grain,
                 const std::function<void(int64_t, int64_t)>& body) const;
  // Sums partial rows [parts,cols] into out, in order.
  static void FoldParts(const std::vector<float>& parts, int64_t cols, bool accumulate, float* out);

  const int threads_;
  cpu::GemmRunner gemm_;
  std::unordered_map<size_t, std::vector<void*>> free_;  // by rounded size
  size_t reserved_bytes_ = 0;
};

}  // namespace shardd::tensor

#endif  // SHARDD_TRAINER_TENSOR_CPU_DEVICE_H_

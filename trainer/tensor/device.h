// What an accelerator must provide: memory and the kernels that the ops in ops.h
// are made of. CpuDevice is the one that exists; the interface has no host
// pointers in it but where a comment says so, so that a GPU can stand behind it.
#ifndef SHARDD_TRAINER_TENSOR_DEVICE_H_
#define SHARDD_TRAINER_TENSOR_DEVICE_H_

#include <cstddef>
#include <cstdint>

#include "trainer/tensor/dtype.h"

namespace shardd::tensor {

// Dense row-major device memory.
struct ConstBuffer {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};
struct Buffer {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  operator ConstBuffer() const { return {data, dtype}; }
};

// C[m,n] = op(A)[m,k] · op(B)[k,n] (+ bias) (+ C), row-major. A and B share a
// dtype, fp32 or bf16; C is fp32 or bf16; products are summed in fp32.
struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;
  ConstBuffer a;  // [m,k], or [k,m] when transposed
  ConstBuffer b;  // [k,n], or [n,k] when transposed
  Buffer c;       // [m,n]
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;      // add to what C holds
  const float* bias = nullptr;  // [n], added to every row; not together with accumulate
};

struct LayerNormArgs {
  int64_t rows = 0, cols = 0;
  ConstBuffer x;                // [rows,cols] fp32 or bf16
  const float* gain = nullptr;  // [cols]
  const float* bias = nullptr;  // [cols]; forward only
  float eps = 1e-5f;
  float* mean = nullptr;  // [rows], written by forward, read by backward
  float* rstd = nullptr;  // [rows], likewise
};

// Causal self-attention. qkv is [batch,length,3*heads*head_dim] as GPT-2 has it:
// all queries, all keys, all values of a position; out is [batch,length,
// heads*head_dim]. Scores are scaled by head_dim^-0.5 and computed in fp32.
struct AttentionArgs {
  int64_t batch = 0, length = 0, heads = 0, head_dim = 0;
  ConstBuffer qkv;       // fp32 or bf16
  float* lse = nullptr;  // [batch,heads,length] log-sum-exp: written by forward, read by backward
};

// Kernels of one device. Results depend on the arguments' values and the number
// of threads only, never on addresses. Sizes are trusted: ops.h checks shapes.
// Calls run in order, from one thread; a device that runs them asynchronously
// synchronises in ToHost.
class Device {
 public:
  virtual ~Device() = default;

  // Uninitialised memory, aligned to 64 bytes; null only for zero bytes.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* data, size_t bytes) = 0;
  virtual void FromHost(const void* host, size_t bytes, void* data) = 0;
  virtual void ToHost(const void* data, size_t bytes, void* host) = 0;

  virtual void Gemm(const GemmArgs& args) = 0;
  virtual void Fill(float value, int64_t count, float* out) = 0;
  // fp32, bf16 or fp16 into fp32 or bf16 (to nearest even).
  virtual void Cast(ConstBuffer in, int64_t count, Buffer out) = 0;
  // out = a + b; fp32 or bf16 each; out may be a or b.
  virtual void Add(ConstBuffer a, ConstBuffer b, int64_t count, Buffer out) = 0;
  // out[cols] = (out +) sum over rows of x[rows,cols].
  virtual void ColumnSum(ConstBuffer x, int64_t rows, int64_t cols, bool accumulate,
                         float* out) = 0;

  virtual void LayerNorm(const LayerNormArgs& args, Buffer y) = 0;
  // dx (accumulated if accumulate_dx), and d_gain and d_bias [cols], each
  // accumulated if accumulate_parameters.
  virtual void LayerNormBackward(const LayerNormArgs& args, ConstBuffer dy, bool accumulate_dx,
                                 Buffer dx, bool accumulate_gain, float* d_gain,
                                 bool accumulate_bias, float* d_bias) = 0;

  // The tanh form of GELU.
  virtual void Gelu(ConstBuffer x, int64_t count, Buffer y) = 0;
  virtual void GeluBackward(ConstBuffer x, ConstBuffer dy, int64_t count, Buffer dx) = 0;

  virtual void CausalAttention(const AttentionArgs& args, Buffer out) = 0;
  // `out` is the forward's result; d_qkv is overwritten.
  virtual void CausalAttentionBackward(const AttentionArgs& args, ConstBuffer out,
                                       ConstBuffer d_out, Buffer d_qkv) = 0;

  // out[rows,cols] = (out +) table[ids[row]]; table fp32, bf16 or fp16; out fp32.
  virtual void GatherRows(ConstBuffer table, const int32_t* ids, int64_t rows, int64_t cols,
                          bool accumulate, float* out) = 0;
  // grad[vocabulary,cols] = (grad +) sum of dy[row] over the rows with that id, in
  // ascending row order. dy fp32 or bf16.
  virtual void ScatterAddRows(ConstBuffer dy, const int32_t* ids, int64_t rows, int64_t cols,
                              int64_t vocabulary, bool accumulate, float* grad) = 0;

  // Mean over the `targets` rows whose label is not kIgnoreLabel of -log softmax(
  // logits[rows,classes])[label], into *loss; 0 when there is none. lse [rows] is
  // kept for the backward pass.
  virtual void CrossEntropy(ConstBuffer logits, const int32_t* labels, int64_t rows,
                            int64_t classes, int64_t targets, float* lse, double* loss) = 0;
  virtual void CrossEntropyBackward(ConstBuffer logits, const int32_t* labels, int64_t rows,
                                    int64_t classes, int64_t targets, const float* lse,
                                    const float* d_loss, Buffer d_logits) = 0;
};

// A label that is not predicted.
inline constexpr int32_t kIgnoreLabel = -100;

}  // namespace shardd::tensor

#endif  // SHARDD_TRAINER_TENSOR_DEVICE_H_

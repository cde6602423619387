// Differentiable operations. Shapes are the model's business: a mismatch is a
// programming error and aborts, naming the op. Activations are fp32 or bf16;
// [rows,cols] stands for a tensor of any rank whose last extent is cols.
#ifndef SHARDD_TRAINER_TENSOR_OPS_H_
#define SHARDD_TRAINER_TENSOR_OPS_H_

#include <cstdint>
#include <span>

#include "trainer/tensor/graph.h"
#include "trainer/tensor/tensor.h"

namespace shardd::tensor {

// Token ids or labels on the device, [count].
Tensor FromIds(Graph& graph, std::span<const int32_t> ids);

struct LinearOptions {
  // weight is [out,in] and used transposed, as a tied output matrix is.
  bool transpose_weight = false;
  // fp32 whatever the graph computes in: for what joins the residual stream, and
  // for logits. Otherwise the graph's compute dtype.
  bool fp32_output = false;
};
// y[rows,out] = x[rows,in] · weight[in,out] + bias[out]; bias may be null.
Tensor Linear(Graph& graph, const Tensor& x, const Parameter& weight, const Parameter* bias,
              const LinearOptions& options = {});

// y = (x - mean) / sqrt(variance + eps) * gain + bias over the last dimension; in the
// graph's compute dtype.
Tensor LayerNorm(Graph& graph, const Tensor& x, const Parameter& gain, const Parameter& bias,
                 float eps);

// GELU, tanh form; dtype of x.
Tensor Gelu(Graph& graph, const Tensor& x);

// a + b; fp32 if either is.
Tensor Add(Graph& graph, const Tensor& a, const Tensor& b);

// qkv [batch,length,3*width] to [batch,length,width]; see AttentionArgs.
Tensor CausalAttention(Graph& graph, const Tensor& qkv, int64_t heads);

// Rows of tokens[vocabulary,width] at ids (FromIds, [batch*length]) plus rows of
// positions[context,width] at 0..length-1, as fp32 [batch,length,width].
Tensor TokenAndPositionEmbedding(Graph& graph, const Parameter& tokens, const Parameter& positions,
                                 const Tensor& ids, int64_t batch, int64_t length);

// Mean of -log softmax(logits[rows,classes])[label] over the `targets` labels that
// are not kIgnoreLabel, as an fp64 scalar [1]; 0 when there is none.
Tensor CrossEntropy(Graph& graph, const Tensor& logits, const Tensor& labels, int64_t targets);

// The value of an fp64 scalar; waits for the device.
double ToDouble(Graph& graph, const Tensor& scalar);

}  // namespace shardd::tensor

#endif  // SHARDD_TRAINER_TENSOR_OPS_H_

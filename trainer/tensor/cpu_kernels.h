// Element-wise and row-wise CPU kernels, single-threaded, dispatched to the best
// instruction set at run time. CpuDevice cuts the work into rows and calls them.
// Loads and stores are unaligned throughout, so addresses change no bit. NaN
// propagates.
#ifndef SHARDD_TRAINER_TENSOR_CPU_KERNELS_H_
#define SHARDD_TRAINER_TENSOR_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "trainer/tensor/device.h"

namespace shardd::tensor::cpu {

// See Device for the semantics of those that share its names.
void Cast(ConstBuffer in, size_t count, Buffer out);
// out = a + b.
void Add(ConstBuffer a, ConstBuffer b, size_t count, Buffer out);
// out = scale * in.
void CastScaled(ConstBuffer in, float scale, size_t count, float* out);
// sum[cols] += x[row] for every row, ascending.
void AddRowsInto(ConstBuffer x, size_t rows, size_t cols, float* sum);

void Gelu(ConstBuffer x, size_t count, Buffer y);
void GeluBackward(ConstBuffer x, ConstBuffer dy, size_t count, Buffer dx);

// One row; mean and rstd are written.
void LayerNormRow(ConstBuffer x, const float* gain, const float* bias, float eps, size_t cols,
                  float* mean, float* rstd, Buffer y);
// One row: dx (accumulated on request); d_gain[cols] and d_bias[cols] are added to.
void LayerNormBackwardRow(ConstBuffer x, const float* gain, float mean, float rstd, ConstBuffer dy,
                          size_t cols, bool accumulate_dx, Buffer dx, float* d_gain, float* d_bias);

// Softmax of scores[0..valid) in place, zeros up to `padded`; returns log-sum-exp.
float SoftmaxRow(float* scores, size_t valid, size_t padded);
// scores = exp(scores - lse) over [0..valid), zeros up to `padded`.
void SoftmaxFromLseRow(float* scores, float lse, size_t valid, size_t padded);
// d_scores = p * (d_p - dot), in place of d_p.
void SoftmaxBackwardRow(const float* p, float dot, size_t count, float* d_p);
// Sum of a[i] * b[i].
float Dot(const float* a, const float* b, size_t count);

// Log-sum-exp of one row.
float LogSumExpRow(ConstBuffer x, size_t count);
// d = scale * exp(x - lse).
void CrossEntropyBackwardRow(ConstBuffer x, float lse, float scale, size_t count, Buffer d);

}  // namespace shardd::tensor::cpu

#endif  // SHARDD_TRAINER_TENSOR_CPU_KERNELS_H_

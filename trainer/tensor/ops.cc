#include "trainer/tensor/ops.h"

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

namespace shardd::tensor {
namespace {

void CheckShape(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fatal: %s: shapes do not fit\n", what);
  std::abort();
}

// `x` in `dtype`: itself, or a converted copy.
Tensor As(Graph& graph, const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  Tensor copy = graph.New(x.shape(), dtype);
  graph.device().Cast(x.buffer(), x.elements(), copy.buffer());
  return copy;
}

const float* Fp32Weights(Graph& graph, const Parameter& parameter, Tensor* copy) {
  return static_cast<const float*>(graph.Weights(parameter, DType::kFloat32, copy).data);
}

// Gradients of a Linear with respect to its bias, weight and input, in the order in
// which parameters are registered backwards.
struct LinearBackward {
  Graph* graph;
  Tensor x, y;
  const Parameter* weight;
  const Parameter* bias;
  bool transpose_weight;

  absl::Status operator()() {
    const Tensor dy_given = y.TakeGrad();
    if (!dy_given.defined()) return absl::OkStatus();
    Device& device = graph->device();
    const int64_t rows = x.rows(), in = x.cols(), out = y.cols();
    bool accumulate = false;
    if (bias != nullptr) {
      const absl::StatusOr<float*> d_bias = graph->ParameterGrad(*bias, &accumulate);
      if (!d_bias.ok()) return d_bias.status();
      device.ColumnSum(dy_given.buffer(), rows, out, accumulate, *d_bias);
    }
    const Tensor dy = As(*graph, dy_given, graph->compute());
    const Tensor xc = As(*graph, x, graph->compute());
    const absl::StatusOr<float*> d_weight = graph->ParameterGrad(*weight, &accumulate);
    if (!d_weight.ok()) return d_weight.status();
    device.Gemm({.m = transpose_weight ? out : in,
                 .n = transpose_weight ? in : out,
                 .k = rows,
                 .a = (transpose_weight ? dy : xc).buffer(),
                 .b = (transpose_weight ? xc : dy).buffer(),
                 .c = {*d_weight, DType::kFloat32},
                 .transpose_a = true,
                 .accumulate = accumulate});
    Tensor copy;
    const ConstBuffer w = graph->Weights(*weight, graph->compute(), &copy);
    const Tensor dx = graph->GradTarget(x, &accumulate);
    device.Gemm({.m = rows,
                 .n = in,
                 .k = out,
                 .a = dy.buffer(),
                 .b = w,
                 .c = dx.buffer(),
                 .transpose_b = !transpose_weight,
                 .accumulate = accumulate});
    return absl::OkStatus();
  }
};

}  // namespace

Tensor FromIds(Graph& graph, std::span<const int32_t> ids) {
  Tensor tensor = graph.New({static_cast<int64_t>(ids.size())}, DType::kInt32);
  graph.device().FromHost(ids.data(), ids.size_bytes(), tensor.data());
  return tensor;
}

Tensor Linear(Graph& graph, const Tensor& x, const Parameter& weight, const Parameter* bias,
              const LinearOptions& options) {
  CheckShape(
      weight.shape().size() == 2 && weight.shape()[options.transpose_weight ? 1 : 0] == x.cols(),
      "linear");
  const int64_t out = weight.shape()[options.transpose_weight ? 0 : 1];
  CheckShape(bias == nullptr || bias->elements() == out, "linear bias");
  Shape shape = x.shape();
  shape.back() = out;
  Tensor y = graph.New(shape, options.fp32_output ? DType::kFloat32 : graph.compute());
  Tensor weight_copy, bias_copy;
  graph.device().Gemm({.m = x.rows(),
                       .n = out,
                       .k = x.cols(),
                       .a = As(graph, x, graph.compute()).buffer(),
                       .b = graph.Weights(weight, graph.compute(), &weight_copy),
                       .c = y.buffer(),
                       .transpose_b = options.transpose_weight,
                       .bias = bias ? Fp32Weights(graph, *bias, &bias_copy) : nullptr});
  std::vector<const Parameter*> uses;
  if (bias != nullptr) uses.push_back(bias);
  uses.push_back(&weight);
  graph.Record(std::move(uses),
               LinearBackward{&graph, x, y, &weight, bias, options.transpose_weight});
  return y;
}

Tensor LayerNorm(Graph& graph, const Tensor& x, const Parameter& gain, const Parameter& bias,
                 float eps) {
  CheckShape(gain.elements() == x.cols() && bias.elements() == x.cols(), "layer norm");
  Tensor y = graph.New(x.shape(), graph.compute());
  Tensor mean = graph.New({x.rows()}, DType::kFloat32);
  Tensor rstd = graph.New({x.rows()}, DType::kFloat32);
  Tensor gain_copy, bias_copy;
  LayerNormArgs args = {.rows = x.rows(),
                        .cols = x.cols(),
                        .x = x.buffer(),
                        .gain = Fp32Weights(graph, gain, &gain_copy),
                        .bias = Fp32Weights(graph, bias, &bias_copy),
                        .eps = eps,
                        .mean = mean.fp32(),
                        .rstd = rstd.fp32()};
  graph.device().LayerNorm(args, y.buffer());
  graph.Record(
      {&bias, &gain}, [&graph, x, y, mean, rstd, &gain, &bias, args]() mutable -> absl::Status {
        const Tensor dy = y.TakeGrad();
        if (!dy.defined()) return absl::OkStatus();
        Tensor copy;
        args.gain = Fp32Weights(graph, gain, &copy);
        bool accumulate_dx = false, accumulate_gain = false, accumulate_bias = false;
        const Tensor dx = graph.GradTarget(x, &accumulate_dx);
        const absl::StatusOr<float*> d_bias = graph.ParameterGrad(bias, &accumulate_bias);
        if (!d_bias.ok()) return d_bias.status();
        const absl::StatusOr<float*> d_gain = graph.ParameterGrad(gain, &accumulate_gain);
        if (!d_gain.ok()) return d_gain.status();
        graph.device().LayerNormBackward(args, dy.buffer(), accumulate_dx, dx.buffer(),
                                         accumulate_gain, *d_gain, accumulate_bias, *d_bias);
        return absl::OkStatus();
      });
  return y;
}

Tensor Gelu(Graph& graph, const Tensor& x) {
  Tensor y = graph.New(x.shape(), x.dtype());
  graph.device().Gelu(x.buffer(), x.elements(), y.buffer());
  graph.Record({}, [&graph, x, y]() mutable {
    const Tensor dy = y.TakeGrad();
    if (!dy.defined()) return absl::OkStatus();
    Tensor dx = graph.New(x.shape(), x.dtype());
    graph.device().GeluBackward(x.buffer(), dy.buffer(), x.elements(), dx.buffer());
    graph.AddGrad(x, std::move(dx));
    return absl::OkStatus();
  });
  return y;
}

Tensor Add(Graph& graph, const Tensor& a, const Tensor& b) {
  CheckShape(a.shape() == b.shape(), "add");
  const bool fp32 = a.dtype() == DType::kFloat32 || b.dtype() == DType::kFloat32;
  Tensor y = graph.New(a.shape(), fp32 ? DType::kFloat32 : a.dtype());
  graph.device().Add(a.buffer(), b.buffer(), a.elements(), y.buffer());
  graph.Record({}, [&graph, a, b, y]() mutable {
    const Tensor dy = y.TakeGrad();
    if (!dy.defined()) return absl::OkStatus();
    graph.AddGrad(a, As(graph, dy, a.dtype()));
    graph.AddGrad(b, As(graph, dy, b.dtype()));
    return absl::OkStatus();
  });
  return y;
}

Tensor CausalAttention(Graph& graph, const Tensor& qkv, int64_t heads) {
  const Shape& in = qkv.shape();
  CheckShape(in.size() == 3 && heads > 0 && in[2] % (3 * heads) == 0, "causal attention");
  const int64_t width = in[2] / 3;
  Tensor out = graph.New({in[0], in[1], width}, qkv.dtype());
  Tensor lse = graph.New({in[0], heads, in[1]}, DType::kFloat32);
  const AttentionArgs args = {.batch = in[0],
                              .length = in[1],
                              .heads = heads,
                              .head_dim = width / heads,
                              .qkv = qkv.buffer(),
                              .lse = lse.fp32()};
  graph.device().CausalAttention(args, out.buffer());
  graph.Record({}, [&graph, qkv, out, lse, args]() mutable {
    const Tensor d_out = out.TakeGrad();
    if (!d_out.defined()) return absl::OkStatus();
    Tensor d_qkv = graph.New(qkv.shape(), qkv.dtype());
    graph.device().CausalAttentionBackward(args, out.buffer(), d_out.buffer(), d_qkv.buffer());
    graph.AddGrad(qkv, std::move(d_qkv));
    return absl::OkStatus();
  });
  return out;
}

Tensor TokenAndPositionEmbedding(Graph& graph, const Parameter& tokens, const Parameter& positions,
                                 const Tensor& ids, int64_t batch, int64_t length) {
  CheckShape(tokens.shape().size() == 2 && positions.shape().size() == 2 &&
                 tokens.shape()[1] == positions.shape()[1] && length <= positions.shape()[0] &&
                 ids.elements() == batch * length,
             "embedding");
  const int64_t width = tokens.shape()[1];
  std::vector<int32_t> position_ids(batch * length);
  for (int64_t b = 0; b < batch; ++b) {
    std::iota(position_ids.begin() + b * length, position_ids.begin() + (b + 1) * length, 0);
  }
  const Tensor at = FromIds(graph, position_ids);
  Tensor y = graph.New({batch, length, width}, DType::kFloat32);
  const int64_t rows = batch * length;
  const auto* token_ids = static_cast<const int32_t*>(ids.data());
  const auto* at_ids = static_cast<const int32_t*>(at.data());
  graph.device().GatherRows(tokens.buffer(), token_ids, rows, width, false, y.fp32());
  graph.device().GatherRows(positions.buffer(), at_ids, rows, width, true, y.fp32());
  graph.Record(
      {&positions, &tokens}, [&graph, &tokens, &positions, ids, at, y]() mutable -> absl::Status {
        const Tensor dy = y.TakeGrad();
        if (!dy.defined()) return absl::OkStatus();
        for (const auto& [table, rows_of] :
             {std::pair{&positions, &at}, std::pair{&tokens, &ids}}) {
          bool accumulate = false;
          const absl::StatusOr<float*> grad = graph.ParameterGrad(*table, &accumulate);
          if (!grad.ok()) return grad.status();
          graph.device().ScatterAddRows(dy.buffer(), static_cast<const int32_t*>(rows_of->data()),
                                        dy.rows(), dy.cols(), table->shape()[0], accumulate, *grad);
        }
        return absl::OkStatus();
      });
  return y;
}

Tensor CrossEntropy(Graph& graph, const Tensor& logits, const Tensor& labels, int64_t targets) {
  CheckShape(labels.elements() == logits.rows(), "cross entropy");
  Tensor loss = graph.New({1}, DType::kFloat64);
  Tensor lse = graph.New({logits.rows()}, DType::kFloat32);
  const auto* ids = static_cast<const int32_t*>(labels.data());
  graph.device().CrossEntropy(logits.buffer(), ids, logits.rows(), logits.cols(), targets,
                              lse.fp32(), static_cast<double*>(loss.data()));
  graph.Record({}, [&graph, logits, labels, lse, loss, targets]() mutable {
    const Tensor d_loss = loss.TakeGrad();
    if (!d_loss.defined()) return absl::OkStatus();
    Tensor d_logits = graph.New(logits.shape(), logits.dtype());
    graph.device().CrossEntropyBackward(logits.buffer(), static_cast<const int32_t*>(labels.data()),
                                        logits.rows(), logits.cols(), targets, lse.fp32(),
                                        d_loss.fp32(), d_logits.buffer());
    graph.AddGrad(logits, std::move(d_logits));
    return absl::OkStatus();
  });
  return loss;
}

double ToDouble(Graph& graph, const Tensor& scalar) {
  double value = 0;
  graph.device().ToHost(scalar.data(), sizeof(value), &value);
  return value;
}

}  // namespace shardd::tensor

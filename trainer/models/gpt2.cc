#include "trainer/models/gpt2.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "trainer/random/counter_random.h"
#include "trainer/tensor/ops.h"

namespace shardd::models {

using tensor::Graph;
using tensor::Parameter;
using tensor::Tensor;

absl::Status Gpt2Config::Validate() const {
  const auto positive = [](const char* name, int64_t value) {
    if (value > 0 && value <= (int64_t{1} << 31)) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("gpt2: ", name, " is ", value, "; give a positive number"));
  };
  for (const auto& [name, value] : {std::pair{"vocabulary", vocabulary},
                                    {"context", context},
                                    {"width", width},
                                    {"layers", layers},
                                    {"heads", heads}}) {
    if (absl::Status s = positive(name, value); !s.ok()) return s;
  }
  if (width % heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("gpt2: width ", width, " is no multiple of ",
                                                   heads, " heads; choose another of either"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Gpt2>> Gpt2::Create(const Gpt2Config& config) {
  if (absl::Status s = config.Validate(); !s.ok()) return s;
  return std::unique_ptr<Gpt2>(new Gpt2(config));
}

Gpt2::Gpt2(const Gpt2Config& config) : config_(config) {
  tokens_ = AddParameter("wte.weight", {config.vocabulary, config.width});
  tokens_->AddAlias("lm_head.weight");
  positions_ = AddParameter("wpe.weight", {config.context, config.width});
  for (int64_t i = 0; i < config.layers; ++i) layers_.push_back(AddLayer(i));
  final_gain_ = AddParameter("ln_f.weight", {config.width});
  final_bias_ = AddParameter("ln_f.bias", {config.width});
  embedding_parameters_ = {tokens_, positions_};
  head_parameters_ = {final_gain_, final_bias_, tokens_};
}

Gpt2::Layer Gpt2::AddLayer(int64_t index) {
  const int64_t width = config_.width;
  const auto add = [&](const char* name, tensor::Shape shape) {
    return AddParameter(absl::StrCat("h.", index, ".", name), std::move(shape));
  };
  Layer layer;
  layer.ln_1_gain = add("ln_1.weight", {width});
  layer.ln_1_bias = add("ln_1.bias", {width});
  layer.qkv_weight = add("attn.c_attn.weight", {width, 3 * width});
  layer.qkv_bias = add("attn.c_attn.bias", {3 * width});
  layer.proj_weight = add("attn.c_proj.weight", {width, width});
  layer.proj_bias = add("attn.c_proj.bias", {width});
  layer.ln_2_gain = add("ln_2.weight", {width});
  layer.ln_2_bias = add("ln_2.bias", {width});
  layer.fc_weight = add("mlp.c_fc.weight", {width, 4 * width});
  layer.fc_bias = add("mlp.c_fc.bias", {4 * width});
  layer.mlp_weight = add("mlp.c_proj.weight", {4 * width, width});
  layer.mlp_bias = add("mlp.c_proj.bias", {width});
  layer.all = {layer.ln_1_gain,   layer.ln_1_bias, layer.qkv_weight, layer.qkv_bias,
               layer.proj_weight, layer.proj_bias, layer.ln_2_gain,  layer.ln_2_bias,
               layer.fc_weight,   layer.fc_bias,   layer.mlp_weight, layer.mlp_bias};
  return layer;
}

void Gpt2::Initialise(const Parameter& parameter, uint64_t seed, int64_t first,
                      std::span<float> out) const {
  const std::string& name = parameter.name();
  if (absl::EndsWith(name, ".bias")) return std::fill(out.begin(), out.end(), 0.0f);
  if (absl::StrContains(name, "ln_")) return std::fill(out.begin(), out.end(), 1.0f);
  double std = config_.init_std;
  if (absl::EndsWith(name, "c_proj.weight")) {
    std /= std::sqrt(2.0 * static_cast<double>(config_.layers));
  }
  const random::CounterRandom random(seed, random::StreamOf(name));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<float>(std * random.Normal(static_cast<uint64_t>(first) + i));
  }
}

Tensor Gpt2::Block(Graph& graph, const Layer& layer, const Tensor& x) const {
  const float eps = config_.layer_norm_eps;
  const tensor::LinearOptions residual = {.fp32_output = true};
  Tensor a = LayerNorm(graph, x, *layer.ln_1_gain, *layer.ln_1_bias, eps);
  a = Linear(graph, a, *layer.qkv_weight, layer.qkv_bias);
  a = CausalAttention(graph, a, config_.heads);
  a = Linear(graph, a, *layer.proj_weight, layer.proj_bias, residual);
  const Tensor h = Add(graph, x, a);
  Tensor m = LayerNorm(graph, h, *layer.ln_2_gain, *layer.ln_2_bias, eps);
  m = Linear(graph, m, *layer.fc_weight, layer.fc_bias);
  m = Gelu(graph, m);
  m = Linear(graph, m, *layer.mlp_weight, layer.mlp_bias, residual);
  return Add(graph, h, m);
}

absl::StatusOr<Tensor> Gpt2::Forward(Graph& graph, const Batch& batch) const {
  if (batch.length <= 0 || batch.sequences <= 0 || batch.length > config_.context) {
    return absl::InvalidArgumentError(absl::StrCat("batch: ", batch.sequences, " sequences of ",
                                                   batch.length, " tokens do not fit a context of ",
                                                   config_.context));
  }
  const int64_t count = batch.sequences * batch.length;
  if (absl::Status s = CheckIds("inputs", batch.inputs, count, config_.vocabulary, false);
      !s.ok()) {
    return s;
  }
  if (absl::Status s = CheckIds("labels", batch.labels, count, config_.vocabulary, true); !s.ok()) {
    return s;
  }
  if (absl::Status s = graph.Enter(embedding_parameters_); !s.ok()) return s;
  Tensor x = TokenAndPositionEmbedding(graph, *tokens_, *positions_, FromIds(graph, batch.inputs),
                                       batch.sequences, batch.length);
  graph.Leave(embedding_parameters_);
  for (const Layer& layer : layers_) {
    if (absl::Status s = graph.Enter(layer.all); !s.ok()) return s;
    x = Block(graph, layer, x);
    graph.Leave(layer.all);
  }
  if (absl::Status s = graph.Enter(head_parameters_); !s.ok()) return s;
  x = LayerNorm(graph, x, *final_gain_, *final_bias_, config_.layer_norm_eps);
  const Tensor logits =
      Linear(graph, x, *tokens_, nullptr, {.transpose_weight = true, .fp32_output = true});
  Tensor loss = CrossEntropy(graph, logits, FromIds(graph, batch.labels), batch.targets());
  graph.Leave(head_parameters_);
  return loss;
}

}  // namespace shardd::models

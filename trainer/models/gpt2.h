// GPT-2, with the names and layouts of Hugging Face's checkpoints: linear weights
// are [in,out] ("Conv1D"), the output matrix is the token embedding.
#ifndef SHARDD_TRAINER_MODELS_GPT2_H_
#define SHARDD_TRAINER_MODELS_GPT2_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "trainer/models/model.h"

namespace shardd::models {

struct Gpt2Config {
  int64_t vocabulary = 256;
  int64_t context = 256;
  int64_t width = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  float layer_norm_eps = 1e-5f;
  double init_std = 0.02;

  // kInvalidArgument names the field.
  absl::Status Validate() const;
};

class Gpt2 final : public Model {
 public:
  static absl::StatusOr<std::unique_ptr<Gpt2>> Create(const Gpt2Config& config);

  const Gpt2Config& config() const { return config_; }

  // Normal of init_std; residual projections divided by sqrt(2 * layers); gains
  // one, biases zero.
  void Initialise(const tensor::Parameter& parameter, uint64_t seed, int64_t first,
                  std::span<float> out) const override;

  absl::StatusOr<tensor::Tensor> Forward(tensor::Graph& graph, const Batch& batch) const override;

 private:
  struct Layer {
    tensor::Parameter *ln_1_gain, *ln_1_bias, *qkv_weight, *qkv_bias, *proj_weight, *proj_bias;
    tensor::Parameter *ln_2_gain, *ln_2_bias, *fc_weight, *fc_bias, *mlp_weight, *mlp_bias;
    std::vector<tensor::Parameter*> all;
  };

  explicit Gpt2(const Gpt2Config& config);
  Layer AddLayer(int64_t index);
  tensor::Tensor Block(tensor::Graph& graph, const Layer& layer, const tensor::Tensor& x) const;

  const Gpt2Config config_;
  tensor::Parameter* tokens_;
  tensor::Parameter* positions_;
  std::vector<Layer> layers_;
  tensor::Parameter* final_gain_;
  tensor::Parameter* final_bias_;
  std::vector<tensor::Parameter*> embedding_parameters_;
  std::vector<tensor::Parameter*> head_parameters_;
};

}  // namespace shardd::models

#endif  // SHARDD_TRAINER_MODELS_GPT2_H_

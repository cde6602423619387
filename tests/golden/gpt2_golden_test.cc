// GPT-2 against a float64 run of the same model, data and optimizer: gradients of
// the first step, and the losses and gradient norms of all 40.
// generate_model.py makes the file.
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/safetensors/reader.h"
#include "trainer/models/gpt2.h"
#include "trainer/tensor/cpu_device.h"
#include "trainer/tensor/graph.h"
#include "trainer/tensor/ops.h"

namespace shardd {
namespace {

using safetensors::DType;
using safetensors::Reader;
using Gradients = std::map<std::string, std::vector<float>>;

constexpr char kGolden[] = "tests/golden/model_gpt2.safetensors";

class CollectGradients : public tensor::GradientSink {
 public:
  absl::Status Complete(const tensor::Parameter& parameter, const float* grad) override {
    EXPECT_TRUE(
        gradients.emplace(parameter.name(), std::vector<float>(grad, grad + parameter.elements()))
            .second)
        << parameter.name() << " completed twice";
    return absl::OkStatus();
  }
  Gradients gradients;
};

// Master weights and AdamW in fp32, as the metadata says.
class AdamW {
 public:
  AdamW(double lr, double beta1, double beta2, double eps, double weight_decay)
      : lr_(lr), beta1_(beta1), beta2_(beta2), eps_(eps), weight_decay_(weight_decay) {}

  void BeginStep() { ++step_; }
  void Update(const std::string& name, const std::vector<float>& grad, double factor,
              std::vector<float>* weights) {
    auto& [m, v] = moments_[name];
    m.resize(grad.size());
    v.resize(grad.size());
    const double correction1 = 1 - std::pow(beta1_, step_);
    const double correction2 = 1 - std::pow(beta2_, step_);
    for (size_t i = 0; i < grad.size(); ++i) {
      const double g = factor * grad[i];
      m[i] = static_cast<float>(beta1_ * m[i] + (1 - beta1_) * g);
      v[i] = static_cast<float>(beta2_ * v[i] + (1 - beta2_) * g * g);
      const double update = (m[i] / correction1) / (std::sqrt(v[i] / correction2) + eps_);
      (*weights)[i] = static_cast<float>((*weights)[i] * (1 - lr_ * weight_decay_) - lr_ * update);
    }
  }

 private:
  const double lr_, beta1_, beta2_, eps_, weight_decay_;
  int step_ = 0;
  std::map<std::string, std::pair<std::vector<float>, std::vector<float>>> moments_;
};

class Gpt2GoldenTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto reader = Reader::Open(kGolden);
    ASSERT_TRUE(reader.ok()) << reader.status();
    golden_ = *std::move(reader);
    models::Gpt2Config config;
    config.vocabulary = Int("cfg.vocab");
    config.context = Int("cfg.n_ctx");
    config.width = Int("cfg.n_embd");
    config.layers = Int("cfg.n_layer");
    config.heads = Int("cfg.n_head");
    auto model = models::Gpt2::Create(config);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    for (tensor::Parameter* parameter : model_->parameters()) {
      std::vector<float>& weights = weights_[parameter->name()];
      weights = Floats("param." + parameter->name());
      ASSERT_EQ(static_cast<int64_t>(weights.size()), parameter->elements());
      parameter->Bind(weights.data(), tensor::DType::kFloat32);
    }
    inputs_ = *golden_->Values<int32_t>("inputs", DType::kI32);
    labels_ = *golden_->Values<int32_t>("labels", DType::kI32);
  }

  int64_t Int(const std::string& key) const { return std::stoll(golden_->metadata().at(key)); }
  double Double(const std::string& key) const { return std::stod(golden_->metadata().at(key)); }
  std::vector<float> Floats(const std::string& name) const {
    auto values = golden_->Values<float>(name, DType::kF32);
    EXPECT_TRUE(values.ok()) << values.status();
    return values.ok() ? *values : std::vector<float>();
  }

  models::Batch BatchOf(int64_t step) const {
    models::Batch batch;
    batch.sequences = Int("batch");
    batch.length = Int("seq");
    const int64_t count = batch.sequences * batch.length;
    batch.inputs.assign(inputs_.begin() + step * count, inputs_.begin() + (step + 1) * count);
    batch.labels.assign(labels_.begin() + step * count, labels_.begin() + (step + 1) * count);
    return batch;
  }

  double LossAndGradients(tensor::CpuDevice* device, int64_t step, Gradients* gradients) const {
    CollectGradients sink;
    tensor::Graph graph({.device = device, .sink = &sink});
    const auto loss = model_->Forward(graph, BatchOf(step));
    EXPECT_TRUE(loss.ok()) << loss.status();
    const double value = ToDouble(graph, *loss);
    EXPECT_TRUE(graph.Backward(*loss, 1.0).ok());
    EXPECT_EQ(sink.gradients.size(), model_->parameters().size());
    *gradients = std::move(sink.gradients);
    return value;
  }

  // Each gradient of step 1 within 2e-6 of its tensor's largest magnitude plus
  // 1e-6 of the model's.
  void ExpectGoldenGradients(const Gradients& gradients) const {
    double model_max = 0;
    for (const auto& [name, grad] : gradients) {
      for (float g : Floats("grad1." + name)) model_max = std::fmax(model_max, std::fabs(g));
    }
    for (const auto& [name, grad] : gradients) {
      const std::vector<float> want = Floats("grad1." + name);
      ASSERT_EQ(want.size(), grad.size()) << name;
      double tensor_max = 0, worst = 0;
      for (float g : want) tensor_max = std::fmax(tensor_max, std::fabs(g));
      for (size_t i = 0; i < want.size(); ++i) {
        const double error = std::fabs(static_cast<double>(want[i]) - grad[i]);
        if (!(error <= worst)) worst = error;  // a NaN stays
      }
      EXPECT_LE(worst, 2e-6 * tensor_max + 1e-6 * model_max) << name;
    }
  }

  static double Norm(const Gradients& gradients) {
    double sum = 0;
    for (const auto& [name, grad] : gradients) {
      for (float g : grad) sum += static_cast<double>(g) * g;
    }
    return std::sqrt(sum);
  }

  std::unique_ptr<Reader> golden_;
  std::unique_ptr<models::Gpt2> model_;
  std::map<std::string, std::vector<float>> weights_;
  std::vector<int32_t> inputs_, labels_;
};

TEST_F(Gpt2GoldenTest, FirstGradients) {
  for (int threads : {1, 2}) {
    tensor::CpuDevice device({.threads = threads});
    Gradients gradients;
    LossAndGradients(&device, 0, &gradients);
    ExpectGoldenGradients(gradients);
  }
}

TEST_F(Gpt2GoldenTest, FortySteps) {
  tensor::CpuDevice device({.threads = 1});
  const auto losses = *golden_->Values<double>("losses_f64", DType::kF64);
  const auto norms = *golden_->Values<double>("grad_norms_f64", DType::kF64);
  ASSERT_EQ(static_cast<int64_t>(losses.size()), Int("steps"));
  AdamW adamw(Double("opt.lr"), 0.9, 0.95, Double("opt.eps"), Double("opt.weight_decay"));
  ASSERT_EQ(golden_->metadata().at("opt.betas"), "(0.9, 0.95)");
  for (size_t step = 0; step < losses.size(); ++step) {
    Gradients gradients;
    EXPECT_NEAR(LossAndGradients(&device, step, &gradients), losses[step], 5e-5) << step;
    const double norm = Norm(gradients);
    EXPECT_NEAR(norm, norms[step], 1e-4 * norms[step]) << step;
    const double factor = std::fmin(1.0, Double("clip") / (norm + 1e-6));
    adamw.BeginStep();
    for (auto& [name, weights] : weights_) {
      adamw.Update(name, gradients.at(name), factor, &weights);
    }
  }
  const std::vector<float> want = Floats("final.wte.weight");
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(weights_["wte.weight"][i], want[i], 2e-4) << i;
  }
}

}  // namespace
}  // namespace shardd

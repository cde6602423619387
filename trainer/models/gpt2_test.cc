#include "trainer/models/gpt2.h"

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "trainer/tensor/cpu_device.h"
#include "trainer/tensor/ops.h"

namespace shardd::models {
namespace {

using tensor::CpuDevice;
using tensor::DType;
using tensor::Graph;
using tensor::Parameter;
using tensor::ParameterSpan;
using tensor::Tensor;
using ::testing::HasSubstr;

constexpr Gpt2Config kSmall = {
    .vocabulary = 50, .context = 16, .width = 24, .layers = 2, .heads = 3};

std::unique_ptr<Gpt2> MakeModel(const Gpt2Config& config = kSmall) {
  auto model = Gpt2::Create(config);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

Batch MakeBatch(int64_t sequences = 3, int64_t length = 11) {
  Batch batch;
  batch.sequences = sequences;
  batch.length = length;
  for (int64_t i = 0; i < sequences * length; ++i) {
    batch.inputs.push_back(static_cast<int32_t>(i * 7 % 50));
    batch.labels.push_back(i % 5 == 0 ? tensor::kIgnoreLabel : static_cast<int32_t>(i * 3 % 50));
  }
  return batch;
}

// Initial weights of every parameter in `dtype`, `shift` bytes off alignment.
class Weights {
 public:
  Weights(const Gpt2& model, DType dtype, size_t shift, float scale = 1.0f) : dtype_(dtype) {
    CpuDevice device({.threads = 1});
    for (Parameter* parameter : model.parameters()) {
      std::vector<float> values(parameter->elements());
      model.Initialise(*parameter, 3, 0, values);
      for (float& v : values) v *= scale;
      std::vector<char>& memory = memory_[parameter];
      memory.resize(values.size() * tensor::DTypeSize(dtype) + shift);
      data_[parameter] = memory.data() + shift;
      if (dtype == DType::kFloat16) {
        std::vector<_Float16> half(values.begin(), values.end());
        std::memcpy(memory.data() + shift, half.data(), half.size() * 2);
      } else {
        device.Cast({values.data(), DType::kFloat32}, values.size(),
                    {memory.data() + shift, dtype});
      }
      parameter->Bind(data_[parameter], dtype);
    }
  }
  void Bind(Parameter* parameter) { parameter->Bind(data_.at(parameter), dtype_); }

 private:
  const DType dtype_;
  std::map<const Parameter*, std::vector<char>> memory_;
  std::map<const Parameter*, char*> data_;
};

class Collect : public tensor::GradientSink {
 public:
  absl::StatusOr<float*> Destination(const Parameter& parameter) override {
    if (!direct) return nullptr;
    gradients[parameter.name()].assign(parameter.elements(), NAN);
    return gradients[parameter.name()].data();
  }
  absl::Status Complete(const Parameter& parameter, const float* grad) override {
    order.push_back(parameter.name());
    if (parameter.name() == fail_at) return absl::AbortedError("regrouped");
    std::vector<float>& mine = gradients[parameter.name()];
    if (direct) {
      EXPECT_EQ(mine.data(), grad);
    } else {
      mine.assign(grad, grad + parameter.elements());
    }
    return absl::OkStatus();
  }
  bool direct = false;
  std::string fail_at;
  std::vector<std::string> order;
  std::map<std::string, std::vector<float>> gradients;
};

struct Result {
  double loss = 0;
  std::map<std::string, std::vector<float>> gradients;
};

Result RunModel(const Gpt2& model, const Batch& batch, DType compute, int threads = 1,
                bool direct = false, double seed = 1.0) {
  CpuDevice device({.threads = threads});
  Collect sink;
  sink.direct = direct;
  Graph graph({.device = &device, .compute = compute, .sink = &sink});
  const auto loss = model.Forward(graph, batch);
  EXPECT_TRUE(loss.ok()) << loss.status();
  Result result;
  result.loss = ToDouble(graph, *loss);
  EXPECT_TRUE(graph.Backward(*loss, seed).ok());
  result.gradients = std::move(sink.gradients);
  return result;
}

void ExpectSameBits(const Result& a, const Result& b) {
  EXPECT_EQ(std::memcmp(&a.loss, &b.loss, sizeof(double)), 0);
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (const auto& [name, grad] : a.gradients) {
    const auto& other = b.gradients.at(name);
    ASSERT_EQ(grad.size(), other.size());
    EXPECT_EQ(std::memcmp(grad.data(), other.data(), grad.size() * 4), 0) << name;
  }
}

TEST(Gpt2, NamesShapesAndOrder) {
  const auto model = MakeModel();
  std::vector<std::string> names;
  for (Parameter* p : model->parameters()) names.push_back(p->name());
  ASSERT_EQ(names.size(), 2u + 12 * 2 + 2);
  EXPECT_EQ(names[0], "wte.weight");
  EXPECT_EQ(names[1], "wpe.weight");
  EXPECT_EQ(names[4], "h.0.attn.c_attn.weight");
  EXPECT_EQ(model->parameters()[4]->shape(), (tensor::Shape{24, 72}));
  EXPECT_EQ(names.back(), "ln_f.bias");
  EXPECT_THAT(model->parameters()[0]->aliases(), ::testing::ElementsAre("lm_head.weight"));
}

TEST(Gpt2, ConfigurationsThatAreNone) {
  Gpt2Config config = kSmall;
  config.heads = 5;
  EXPECT_THAT(std::string(Gpt2::Create(config).status().message()), HasSubstr("5 heads"));
  config = kSmall;
  config.layers = 0;
  EXPECT_THAT(std::string(Gpt2::Create(config).status().message()), HasSubstr("layers is 0"));
}

TEST(Gpt2, InitialisationIsKeyedByNameAndElement) {
  const auto model = MakeModel({.vocabulary = 256, .context = 64, .width = 64, .layers = 2});
  for (Parameter* p : model->parameters()) {
    std::vector<float> whole(p->elements());
    model->Initialise(*p, 9, 0, whole);
    const int64_t first = p->elements() / 3;
    std::vector<float> part(p->elements() - first);
    model->Initialise(*p, 9, first, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + first)) << p->name();
    double square = 0;
    for (float v : whole) square += v * v;
    const double rms = std::sqrt(square / static_cast<double>(whole.size()));
    double want = 0.02;
    if (p->name().ends_with(".bias")) want = 0;
    if (p->name().find("ln_") != std::string::npos && want > 0) want = 1;
    if (p->name().ends_with("c_proj.weight")) want = 0.02 / 2;
    EXPECT_NEAR(rms, want, 0.05 * want) << p->name();
  }
}

TEST(Gpt2, FirstLossIsThatOfAUniformGuess) {
  const auto model = MakeModel();
  const Weights weights(*model, DType::kFloat32, 0);
  EXPECT_NEAR(RunModel(*model, MakeBatch(), DType::kFloat32).loss, std::log(50.0), 0.05);
}

// In direct mode the sink's memory starts as NaN: whatever is not written shows.
TEST(Gpt2, GradientsGoStraightIntoTheSinksMemory) {
  const auto model = MakeModel();
  const Weights weights(*model, DType::kFloat32, 0);
  const Result copied = RunModel(*model, MakeBatch(), DType::kFloat32);
  ExpectSameBits(copied, RunModel(*model, MakeBatch(), DType::kFloat32, 1, /*direct=*/true));
}

TEST(Gpt2, AddressesAndRepetitionChangeNoBit) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const auto model = MakeModel();
    Result first;
    {
      const Weights weights(*model, dtype, 0);
      first = RunModel(*model, MakeBatch(), dtype);
    }
    for (size_t shift : {4u, 20u, 32u}) {
      const Weights weights(*model, dtype, shift);
      ExpectSameBits(first, RunModel(*model, MakeBatch(), dtype));
    }
  }
}

TEST(Gpt2, TheSeedScalesGradientsExactly) {
  const auto model = MakeModel();
  const Weights weights(*model, DType::kFloat32, 0);
  const Result one = RunModel(*model, MakeBatch(), DType::kFloat32);
  Result scaled = RunModel(*model, MakeBatch(), DType::kFloat32, 1, false, 1024.0);
  for (auto& [name, grad] : scaled.gradients) {
    for (float& g : grad) g /= 1024;
  }
  ExpectSameBits(one, scaled);
}

// bf16 and fp16 weights: near the fp32 result of the same model.
TEST(Gpt2, NarrowWeightsAreClose) {
  const auto model = MakeModel();
  const float scale = 3.0f;
  const auto norm = [](const std::vector<float>& v) {
    double sum = 0;
    for (float x : v) sum += static_cast<double>(x) * x;
    return std::sqrt(sum);
  };
  const Weights exact(*model, DType::kFloat32, 0, scale);
  const Result want = RunModel(*model, MakeBatch(), DType::kFloat32);
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const bool bf16 = dtype == DType::kBFloat16;
    const Weights narrow(*model, dtype, 0, scale);
    const Result got = RunModel(*model, MakeBatch(), bf16 ? DType::kBFloat16 : DType::kFloat32);
    EXPECT_NEAR(got.loss, want.loss, bf16 ? 2e-2 : 2e-3);
    EXPECT_NE(got.loss, want.loss);
    for (const auto& [name, grad] : want.gradients) {
      std::vector<float> difference = grad;
      for (size_t i = 0; i < grad.size(); ++i) difference[i] -= got.gradients.at(name)[i];
      // The gradient of key biases is zero but for rounding; c_attn.bias holds them.
      EXPECT_LE(norm(difference), (bf16 ? 5e-2 : 5e-3) * norm(grad)) << name;
    }
  }
}

// Parameters complete during backward in exactly the reverse of registration.
TEST(Gpt2, CompletesInReverseRegistrationOrder) {
  const auto model = MakeModel();
  const Weights weights(*model, DType::kFloat32, 0);
  CpuDevice device({.threads = 1});
  Collect sink;
  Graph graph({.device = &device, .sink = &sink});
  const auto loss = model->Forward(graph, MakeBatch());
  ASSERT_TRUE(loss.ok());
  EXPECT_TRUE(sink.order.empty());
  ASSERT_TRUE(graph.Backward(*loss, 1.0).ok());
  std::vector<std::string> want;
  for (Parameter* p : model->parameters()) want.insert(want.begin(), p->name());
  EXPECT_EQ(sink.order, want);
}

TEST(Gpt2, AnErrorOfTheSinkEndsBackward) {
  const auto model = MakeModel();
  const Weights weights(*model, DType::kFloat32, 0);
  CpuDevice device({.threads = 1});
  Collect sink;
  sink.fail_at = "h.1.attn.c_proj.weight";
  Graph graph({.device = &device, .sink = &sink});
  const auto loss = model->Forward(graph, MakeBatch());
  ASSERT_TRUE(loss.ok());
  EXPECT_EQ(graph.Backward(*loss, 1.0).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(sink.order.back(), sink.fail_at);
}

// Unbinds what is not gathered, so that any read outside crashes.
class StrictAccess : public tensor::ParameterAccess {
 public:
  explicit StrictAccess(Weights* weights) : weights_(weights) {}
  absl::Status Gather(ParameterSpan parameters) override {
    if (gathers++ == fail_at) return absl::AbortedError("regrouped");
    for (Parameter* p : parameters) {
      if (held[p]++ == 0) weights_->Bind(p);
    }
    int64_t total = 0;
    for (const auto& [p, count] : held) total += count > 0 ? p->elements() : 0;
    most_elements = std::max(most_elements, total);
    return absl::OkStatus();
  }
  void Release(ParameterSpan parameters) override {
    for (Parameter* p : parameters) {
      ASSERT_GT(held[p], 0) << p->name();
      if (--held[p] == 0) p->Bind(nullptr, DType::kFloat32);
    }
  }
  int fail_at = -1;
  int gathers = 0;
  int64_t most_elements = 0;
  std::map<const Parameter*, int> held;

 private:
  Weights* weights_;
};

TEST(Gpt2, WeightsAreReadOnlyWhileGathered) {
  const auto model = MakeModel();
  Weights weights(*model, DType::kFloat32, 0);
  const Result want = RunModel(*model, MakeBatch(), DType::kFloat32);
  for (Parameter* p : model->parameters()) p->Bind(nullptr, DType::kFloat32);
  CpuDevice device({.threads = 1});
  // -1: no failure; then a failure at each gather: everything is given back.
  for (int fail_at = -1; fail_at < 8; ++fail_at) {
    StrictAccess access(&weights);
    access.fail_at = fail_at;
    Collect sink;
    absl::Status status;
    double value = 0;
    {
      Graph graph({.device = &device, .sink = &sink, .access = &access});
      const auto loss = model->Forward(graph, MakeBatch());
      status = loss.status();
      if (loss.ok()) {
        value = ToDouble(graph, *loss);
        status = graph.Backward(*loss, 1.0);
      }
    }
    for (const auto& [p, count] : access.held) EXPECT_EQ(count, 0) << p->name();
    if (fail_at >= 0) {
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << fail_at;
      continue;
    }
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(access.gathers, 8);
    ExpectSameBits(want, {value, sink.gradients});
    int64_t layer = 0, all = 0;
    for (Parameter* p : model->parameters()) {
      all += p->elements();
      if (p->name().starts_with("h.0.")) layer += p->elements();
    }
    EXPECT_LT(access.most_elements, all - layer) << "never two layers at once";
  }
}

TEST(Gpt2, BatchesThatDoNotFit) {
  const auto model = MakeModel();
  const Weights weights(*model, DType::kFloat32, 0);
  CpuDevice device({.threads = 1});
  const auto refused = [&](const Batch& batch, const std::string& message) {
    Graph graph({.device = &device});
    const auto loss = model->Forward(graph, batch);
    EXPECT_EQ(loss.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(loss.status().message()), HasSubstr(message));
  };
  refused(MakeBatch(1, 17), "context of 16");
  Batch batch = MakeBatch();
  batch.inputs[3] = 50;
  refused(batch, "50 among the inputs");
  batch = MakeBatch();
  batch.labels[3] = -1;
  refused(batch, "-1 among the labels");
  batch = MakeBatch();
  batch.labels.pop_back();
  refused(batch, "32 labels");
}

TEST(Gpt2, EvaluationKeepsNothing) {
  const auto model = MakeModel();
  const Weights weights(*model, DType::kFloat32, 0);
  CpuDevice device({.threads = 1});
  Graph graph({.device = &device, .record = false});
  const auto loss = model->Forward(graph, MakeBatch());
  ASSERT_TRUE(loss.ok());
  EXPECT_EQ(ToDouble(graph, *loss), RunModel(*model, MakeBatch(), DType::kFloat32).loss);
  EXPECT_EQ(graph.Backward(*loss, 1.0).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace shardd::models

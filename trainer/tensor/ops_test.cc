// Every op against a double-precision reference: values directly, gradients by
// central differences of the reference.
#include "trainer/tensor/ops.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "trainer/tensor/cpu_device.h"
#include "trainer/tensor/graph.h"

namespace shardd::tensor {
namespace {

using Values = std::vector<double>;
using Inputs = std::vector<Values>;
// Output of the op in double.
using Reference = std::function<Values(const Inputs&)>;

class Collect : public GradientSink {
 public:
  absl::Status Complete(const Parameter& parameter, const float* grad) override {
    EXPECT_EQ(gradients.count(parameter.name()), 0u) << parameter.name();
    gradients[parameter.name()].assign(grad, grad + parameter.elements());
    return absl::OkStatus();
  }
  std::map<std::string, std::vector<float>> gradients;
};

struct InputSpec {
  Shape shape;
  bool parameter = false;
  double scale = 1.0;
  double offset = 0.0;
};

// What the op under test is given: tensors and parameters in the order of the specs.
struct Given {
  std::vector<Tensor> tensors;
  std::vector<Parameter*> parameters;
};
using Op = std::function<Tensor(Graph&, const Given&)>;

float RoundToBf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Runs op and reference and compares; `tolerance` is relative to the largest
// magnitude of what is compared.
class OpCheck {
 public:
  OpCheck(std::vector<InputSpec> specs, DType compute, int threads)
      : specs_(std::move(specs)), compute_(compute), device_({.threads = threads}) {
    std::mt19937_64 random(20240229);
    std::normal_distribution<double> normal;
    for (const InputSpec& spec : specs_) {
      Values values(NumElements(spec.shape));
      // Values that are exact in bf16, so that both sides see the same.
      for (double& v : values) v = RoundToBf16(spec.offset + spec.scale * normal(random));
      inputs_.push_back(std::move(values));
    }
  }

  void Run(const Op& op, const Reference& reference, double tolerance) {
    Collect sink;
    Graph graph({.device = &device_, .compute = compute_, .sink = &sink});
    Given given = Give(graph);
    const Tensor out = op(graph, given);
    const Values want = reference(inputs_);
    ASSERT_EQ(out.elements(), static_cast<int64_t>(want.size()));
    ExpectClose("output", Read(out), want, tolerance);

    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    Values weights(want.size());
    for (double& w : weights) w = RoundToBf16(normal(random));
    const bool scalar = out.dtype() == DType::kFloat64;
    ASSERT_TRUE(
        graph.BackwardFrom(out, Make(weights, out.shape(), scalar ? DType::kFloat32 : out.dtype()))
            .ok());
    size_t tensor = 0;
    for (size_t i = 0; i < specs_.size(); ++i) {
      Values got;
      if (specs_[i].parameter) {
        const auto& grad = sink.gradients["p" + std::to_string(i)];
        got.assign(grad.begin(), grad.end());
      } else {
        const Tensor& x = given.tensors[tensor++];
        ASSERT_TRUE(x.grad().defined()) << "input " << i;
        got = Read(x.grad());
      }
      ExpectClose("gradient of input " + std::to_string(i), got, Differences(reference, weights, i),
                  tolerance);
    }
  }

 private:
  Tensor Make(const Values& values, const Shape& shape, DType dtype) {
    std::vector<float> floats(values.begin(), values.end());
    Tensor tensor(&device_, shape, dtype);
    device_.Cast({floats.data(), DType::kFloat32}, tensor.elements(), tensor.buffer());
    return tensor;
  }

  Values Read(const Tensor& tensor) {
    if (tensor.dtype() == DType::kFloat64) {
      const double* data = static_cast<const double*>(tensor.data());
      return Values(data, data + tensor.elements());
    }
    std::vector<float> floats(tensor.elements());
    device_.Cast(tensor.buffer(), tensor.elements(), {floats.data(), DType::kFloat32});
    return Values(floats.begin(), floats.end());
  }

  Given Give(Graph& graph) {
    Given given;
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (!specs_[i].parameter) {
        given.tensors.push_back(Make(inputs_[i], specs_[i].shape, graph.compute()));
        continue;
      }
      parameters_.push_back(std::make_unique<Parameter>("p" + std::to_string(i), specs_[i].shape));
      held_.push_back(Make(inputs_[i], specs_[i].shape, graph.compute()));
      parameters_.back()->Bind(held_.back().data(), graph.compute());
      given.parameters.push_back(parameters_.back().get());
    }
    return given;
  }

  Values Differences(const Reference& reference, const Values& weights, size_t input) const {
    const auto loss = [&](const Inputs& inputs) {
      const Values out = reference(inputs);
      double sum = 0;
      for (size_t i = 0; i < out.size(); ++i) sum += weights[i] * out[i];
      return sum;
    };
    Inputs inputs = inputs_;
    Values gradient(inputs[input].size());
    const double step = 1e-5;
    for (size_t i = 0; i < gradient.size(); ++i) {
      const double value = inputs[input][i];
      inputs[input][i] = value + step;
      const double above = loss(inputs);
      inputs[input][i] = value - step;
      const double below = loss(inputs);
      inputs[input][i] = value;
      gradient[i] = (above - below) / (2 * step);
    }
    return gradient;
  }

  static void ExpectClose(const std::string& what, const Values& got, const Values& want,
                          double tolerance) {
    ASSERT_EQ(got.size(), want.size()) << what;
    double largest = 0, worst = 0;
    for (double w : want) largest = std::fmax(largest, std::fabs(w));
    for (size_t i = 0; i < want.size(); ++i) {
      const double error = std::fabs(got[i] - want[i]);
      if (!(error <= worst)) worst = error;  // a NaN stays
    }
    EXPECT_LE(worst, tolerance * largest) << what;
  }

  const std::vector<InputSpec> specs_;
  const DType compute_;
  CpuDevice device_;
  Inputs inputs_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<Tensor> held_;
};

// Both compute dtypes; 1 and 2 threads.
void Check(const std::vector<InputSpec>& specs, const Op& op, const Reference& reference) {
  for (int threads : {1, 2}) {
    SCOPED_TRACE(threads);
    OpCheck(specs, DType::kFloat32, threads).Run(op, reference, 5e-6);
  }
  SCOPED_TRACE("bf16");
  OpCheck(specs, DType::kBFloat16, 1).Run(op, reference, 2e-2);
}

// c[m,n] = a[m,k] b[k,n] (+ bias)
Values MatMul(const Values& a, const Values& b, const Values* bias, int64_t k, int64_t n,
              bool transpose_b) {
  const int64_t m = static_cast<int64_t>(a.size()) / k;
  Values c(m * n);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = bias != nullptr ? (*bias)[j] : 0.0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a[i * k + l] * (transpose_b ? b[j * k + l] : b[l * n + j]);
      }
      c[i * n + j] = sum;
    }
  }
  return c;
}

TEST(Ops, Linear) {
  Check(
      {{{3, 5, 7}}, {{7, 11}, true}, {{11}, true}},
      [](Graph& g, const Given& x) {
        return Linear(g, x.tensors[0], *x.parameters[0], x.parameters[1]);
      },
      [](const Inputs& in) { return MatMul(in[0], in[1], &in[2], 7, 11, false); });
}

TEST(Ops, LinearWithTransposedWeightAndFp32Output) {
  Check(
      {{{4, 6}}, {{9, 6}, true}},
      [](Graph& g, const Given& x) {
        return Linear(g, x.tensors[0], *x.parameters[0], nullptr,
                      {.transpose_weight = true, .fp32_output = true});
      },
      [](const Inputs& in) { return MatMul(in[0], in[1], nullptr, 6, 9, true); });
}

TEST(Ops, LayerNorm) {
  // 131 rows: more than two parts of a column sum; 37 columns: vectors and a tail.
  Check(
      {{{131, 37}, false, 2.0, 0.5}, {{37}, true, 0.3, 1.0}, {{37}, true}},
      [](Graph& g, const Given& x) {
        return LayerNorm(g, x.tensors[0], *x.parameters[0], *x.parameters[1], 1e-5f);
      },
      [](const Inputs& in) {
        Values y(in[0].size());
        for (size_t r = 0; r < y.size(); r += 37) {
          double mean = 0, variance = 0;
          for (int i = 0; i < 37; ++i) mean += in[0][r + i] / 37;
          for (int i = 0; i < 37; ++i) variance += std::pow(in[0][r + i] - mean, 2) / 37;
          for (int i = 0; i < 37; ++i) {
            const double hat = (in[0][r + i] - mean) / std::sqrt(variance + 1e-5);
            y[r + i] = hat * in[1][i] + in[2][i];
          }
        }
        return y;
      });
}

TEST(Ops, Gelu) {
  Check(
      {{{5, 67}, false, 3.0}}, [](Graph& g, const Given& x) { return Gelu(g, x.tensors[0]); },
      [](const Inputs& in) {
        Values y;
        for (double x : in[0]) {
          const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
          y.push_back(0.5 * x * (1 + std::tanh(u)));
        }
        return y;
      });
}

// x is used three times: its gradient is accumulated by two different ops.
TEST(Ops, AddAndSharedInputs) {
  Check(
      {{{6, 8}}, {{8}, true, 0.2, 1.0}, {{8}, true}},
      [](Graph& g, const Given& x) {
        const Tensor a = x.tensors[0];
        const Tensor twice = Add(g, a, a);
        const Tensor normal = LayerNorm(g, a, *x.parameters[0], *x.parameters[1], 1e-5f);
        return Add(g, twice, normal);
      },
      [](const Inputs& in) {
        Values y(in[0].size());
        for (size_t r = 0; r < y.size(); r += 8) {
          double mean = 0, variance = 0;
          for (int i = 0; i < 8; ++i) mean += in[0][r + i] / 8;
          for (int i = 0; i < 8; ++i) variance += std::pow(in[0][r + i] - mean, 2) / 8;
          for (int i = 0; i < 8; ++i) {
            const double hat = (in[0][r + i] - mean) / std::sqrt(variance + 1e-5);
            y[r + i] = 2 * in[0][r + i] + hat * in[1][i] + in[2][i];
          }
        }
        return y;
      });
}

// Two uses of one parameter are one gradient.
TEST(Ops, TiedParameter) {
  Check(
      {{{5, 6}}, {{6, 6}, true, 0.5}},
      [](Graph& g, const Given& x) {
        const Tensor y = Linear(g, x.tensors[0], *x.parameters[0], nullptr);
        return Linear(g, y, *x.parameters[0], nullptr, {.transpose_weight = true});
      },
      [](const Inputs& in) {
        return MatMul(MatMul(in[0], in[1], nullptr, 6, 6, false), in[1], nullptr, 6, 6, true);
      });
}

Values ReferenceAttention(const Values& qkv, int64_t batch, int64_t length, int64_t heads,
                          int64_t d) {
  const int64_t width = heads * d;
  Values out(batch * length * width, 0.0);
  const auto at = [&](int64_t b, int64_t t, int64_t part, int64_t h, int64_t i) {
    return qkv[(b * length + t) * 3 * width + part * width + h * d + i];
  };
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < length; ++t) {
        Values p(t + 1);
        double largest = -1e300, sum = 0;
        for (int64_t s = 0; s <= t; ++s) {
          for (int64_t i = 0; i < d; ++i) p[s] += at(b, t, 0, h, i) * at(b, s, 1, h, i);
          p[s] /= std::sqrt(static_cast<double>(d));
          largest = std::max(largest, p[s]);
        }
        for (double& v : p) sum += v = std::exp(v - largest);
        for (int64_t s = 0; s <= t; ++s) {
          for (int64_t i = 0; i < d; ++i) {
            out[(b * length + t) * width + h * d + i] += p[s] / sum * at(b, s, 2, h, i);
          }
        }
      }
    }
  }
  return out;
}

TEST(Ops, CausalAttention) {
  // 70 positions: two blocks of queries.
  for (const auto& [batch, length] : {std::pair<int64_t, int64_t>{2, 5}, {1, 70}, {1, 1}}) {
    SCOPED_TRACE(length);
    Check(
        {{{batch, length, 18}}},
        [](Graph& g, const Given& x) { return CausalAttention(g, x.tensors[0], 2); },
        [batch = batch, length = length](const Inputs& in) {
          return ReferenceAttention(in[0], batch, length, 2, 3);
        });
  }
}

TEST(Ops, Embedding) {
  const std::vector<int32_t> ids = {3, 0, 3, 6, 3, 0};  // repeated, and some absent
  Check(
      {{{7, 5}, true}, {{4, 5}, true}},
      [&](Graph& g, const Given& x) {
        return TokenAndPositionEmbedding(g, *x.parameters[0], *x.parameters[1], FromIds(g, ids), 2,
                                         3);
      },
      [&](const Inputs& in) {
        Values y;
        for (size_t r = 0; r < ids.size(); ++r) {
          for (int i = 0; i < 5; ++i) y.push_back(in[0][ids[r] * 5 + i] + in[1][r % 3 * 5 + i]);
        }
        return y;
      });
}

TEST(Ops, CrossEntropy) {
  const std::vector<int32_t> labels = {2, kIgnoreLabel, 0, 18};
  Check(
      {{{4, 19}, false, 3.0}},
      [&](Graph& g, const Given& x) {
        return CrossEntropy(g, x.tensors[0], FromIds(g, labels), 3);
      },
      [&](const Inputs& in) {
        double loss = 0;
        for (int r = 0; r < 4; ++r) {
          if (labels[r] == kIgnoreLabel) continue;
          double sum = 0;
          for (int i = 0; i < 19; ++i) sum += std::exp(in[0][r * 19 + i]);
          loss += (std::log(sum) - in[0][r * 19 + labels[r]]) / 3;
        }
        return Values{loss};
      });
}

TEST(Ops, CrossEntropyWithoutTargetsIsZero) {
  CpuDevice device({.threads = 1});
  Graph graph({.device = &device});
  Tensor logits(&device, {2, 4}, DType::kFloat32);
  device.Fill(0.5f, 8, logits.fp32());
  const Tensor loss =
      CrossEntropy(graph, logits, FromIds(graph, std::vector<int32_t>(2, kIgnoreLabel)), 0);
  EXPECT_EQ(ToDouble(graph, loss), 0.0);
  ASSERT_TRUE(graph.Backward(loss, 1.0).ok());
  for (int i = 0; i < 8; ++i) EXPECT_EQ(logits.grad().fp32()[i], 0.0f);
}

}  // namespace
}  // namespace shardd::tensor

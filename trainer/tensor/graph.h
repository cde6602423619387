// Reverse-mode differentiation: a tape of one forward pass.
#ifndef SHARDD_TRAINER_TENSOR_GRAPH_H_
#define SHARDD_TRAINER_TENSOR_GRAPH_H_

#include <functional>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "trainer/tensor/device.h"
#include "trainer/tensor/tensor.h"

namespace shardd::tensor {

// Where parameter gradients go, one call for each parameter, in the order in which
// backward completes them.
class GradientSink {
 public:
  virtual ~GradientSink() = default;

  // fp32 memory of parameter.elements() values to build the gradient in, valid
  // until Complete; its contents do not matter. Null: the graph allocates it. An
  // error ends Backward, which returns it.
  virtual absl::StatusOr<float*> Destination(const Parameter& parameter) { return nullptr; }

  // The gradient of `parameter` is complete: every use of it has been
  // differentiated. `grad` (on the device) is Destination's memory, or valid
  // during the call only. An error ends Backward, which returns it.
  virtual absl::Status Complete(const Parameter& parameter, const float* grad) = 0;
};

// Makes working weights present. Ops read a parameter only between Gather and
// Release of it; both are called in forward, and again in backward. A parameter
// may be gathered again while it is held: calls balance.
class ParameterAccess {
 public:
  virtual ~ParameterAccess() = default;
  // Blocks until the parameters' weights of this step are there, and binds them.
  virtual absl::Status Gather(ParameterSpan parameters) = 0;
  virtual void Release(ParameterSpan parameters) = 0;
};

// One forward pass and its backward pass. Ops (ops.h) append records; Backward
// runs them in reverse, freeing activations as it goes. With equal inputs it gives
// equal bits: nothing depends on addresses or time. Not thread-safe.
class Graph {
 public:
  struct Options {
    Device* device = nullptr;
    // What matrix products are computed in, and activations kept in: fp32, or
    // bf16 with fp32 sums and an fp32 residual stream.
    DType compute = DType::kFloat32;
    // False: forward only, nothing is kept.
    bool record = true;
    GradientSink* sink = nullptr;       // needed by Backward if a parameter was used
    ParameterAccess* access = nullptr;  // null: parameters are bound and stay
  };
  explicit Graph(const Options& options);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  Device& device() const { return *options_.device; }
  DType compute() const { return options_.compute; }

  // Brackets the ops that use `parameters`, which must outlive the graph.
  absl::Status Enter(ParameterSpan parameters);
  void Leave(ParameterSpan parameters);

  // Differentiates `output` with all its elements' gradients equal to `seed`
  // (the loss scale, when it is a loss). At most once. The error is that of a
  // sink or a gather; the graph is then of no further use.
  absl::Status Backward(const Tensor& output, double seed);
  // The same with a gradient of output's shape.
  absl::Status BackwardFrom(const Tensor& output, Tensor grad);

  // For ops.

  Tensor New(Shape shape, DType dtype) const { return Tensor(options_.device, shape, dtype); }
  // Appends the differentiation of an op; dropped when nothing is recorded.
  // `uses` are the parameters whose gradients it contributes to.
  void Record(std::vector<const Parameter*> uses, std::function<absl::Status()> backward);
  bool recording() const { return options_.record; }

  // Adds `grad` to x's gradient. The tensors may share memory afterwards.
  void AddGrad(Tensor x, Tensor grad);
  // x's gradient to be written (or, when *accumulate comes back true, added to)
  // in place.
  Tensor GradTarget(Tensor x, bool* accumulate);

  // Memory for a contribution to a parameter's gradient: to be overwritten, or
  // added to when *accumulate comes back true.
  absl::StatusOr<float*> ParameterGrad(const Parameter& parameter, bool* accumulate);

  // The parameter as a device buffer of `dtype`, converted into *copy if needed.
  ConstBuffer Weights(const Parameter& parameter, DType dtype, Tensor* copy) const;

 private:
  struct PendingGrad {
    int uses = 0;           // records still to be differentiated
    float* data = nullptr;  // null until the first contribution
    Tensor owned;           // unless the sink gave the memory
  };
  struct RecordEntry {
    std::vector<const Parameter*> uses;
    std::function<absl::Status()> backward;
  };
  absl::Status FinishUse(const Parameter& parameter);

  const Options options_;
  std::vector<RecordEntry> records_;
  std::unordered_map<const Parameter*, PendingGrad> pending_;
  std::vector<ParameterSpan> held_;  // gathered by backward, not yet released
};

}  // namespace shardd::tensor

#endif  // SHARDD_TRAINER_TENSOR_GRAPH_H_

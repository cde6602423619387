#include "trainer/tensor/graph.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd::tensor {

Graph::Graph(const Options& options) : options_(options) {}

Graph::~Graph() {
  // Reached with entries only after an error between Gather and Release.
  for (ParameterSpan parameters : held_) options_.access->Release(parameters);
}

absl::Status Graph::Enter(ParameterSpan parameters) {
  if (options_.access == nullptr) return absl::OkStatus();
  if (absl::Status s = options_.access->Gather(parameters); !s.ok()) return s;
  held_.push_back(parameters);
  // Reversed: what forward enters, backward leaves.
  Record({}, [this, parameters] {
    options_.access->Release(parameters);
    held_.pop_back();
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

void Graph::Leave(ParameterSpan parameters) {
  if (options_.access == nullptr) return;
  options_.access->Release(parameters);
  held_.pop_back();
  Record({}, [this, parameters] {
    if (absl::Status s = options_.access->Gather(parameters); !s.ok()) return s;
    held_.push_back(parameters);
    return absl::OkStatus();
  });
}

void Graph::Record(std::vector<const Parameter*> uses, std::function<absl::Status()> backward) {
  if (!options_.record) return;
  for (const Parameter* parameter : uses) ++pending_[parameter].uses;
  records_.push_back({std::move(uses), std::move(backward)});
}

absl::Status Graph::Backward(const Tensor& output, double seed) {
  // The gradient of an fp64 scalar is kept in fp32, as every other.
  Tensor grad = New(output.shape(), DType::kFloat32);
  device().Fill(static_cast<float>(seed), grad.elements(), grad.fp32());
  if (output.dtype() == DType::kBFloat16) {
    Tensor narrow = New(output.shape(), DType::kBFloat16);
    device().Cast(grad.buffer(), grad.elements(), narrow.buffer());
    grad = std::move(narrow);
  }
  return BackwardFrom(output, std::move(grad));
}

absl::Status Graph::BackwardFrom(const Tensor& output, Tensor grad) {
  if (!options_.record) {
    return absl::FailedPreconditionError(
        "backward: the graph did not record; make it with Options::record");
  }
  AddGrad(output, std::move(grad));
  while (!records_.empty()) {
    RecordEntry entry = std::move(records_.back());
    records_.pop_back();
    if (absl::Status s = entry.backward(); !s.ok()) return s;
    for (const Parameter* parameter : entry.uses) {
      if (absl::Status s = FinishUse(*parameter); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

absl::Status Graph::FinishUse(const Parameter& parameter) {
  PendingGrad& pending = pending_[&parameter];
  if (--pending.uses > 0 || pending.data == nullptr) return absl::OkStatus();
  if (options_.sink == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("backward: gradient of '", parameter.name(),
                                                      "' has nowhere to go; set Options::sink"));
  }
  absl::Status status = options_.sink->Complete(parameter, pending.data);
  pending_.erase(&parameter);
  return status;
}

void Graph::AddGrad(Tensor x, Tensor grad) {
  if (!x.grad().defined()) {
    x.set_grad(std::move(grad));
    return;
  }
  bool accumulate = false;
  Tensor target = GradTarget(x, &accumulate);
  device().Add(target.buffer(), grad.buffer(), target.elements(), target.buffer());
}

Tensor Graph::GradTarget(Tensor x, bool* accumulate) {
  Tensor current = x.TakeGrad();
  const DType dtype = x.dtype() == DType::kFloat64 ? DType::kFloat32 : x.dtype();
  *accumulate = current.defined();
  if (!current.defined() || !current.unique() || current.dtype() != dtype) {
    // Another tensor's gradient has the same memory: write elsewhere.
    Tensor fresh = New(x.shape(), dtype);
    if (current.defined()) device().Cast(current.buffer(), x.elements(), fresh.buffer());
    current = std::move(fresh);
  }
  x.set_grad(current);
  return current;
}

absl::StatusOr<float*> Graph::ParameterGrad(const Parameter& parameter, bool* accumulate) {
  PendingGrad& pending = pending_[&parameter];
  *accumulate = pending.data != nullptr;
  if (pending.data == nullptr) {
    if (options_.sink != nullptr) {
      const absl::StatusOr<float*> destination = options_.sink->Destination(parameter);
      if (!destination.ok()) return destination;
      pending.data = *destination;
    }
    if (pending.data == nullptr) {
      pending.owned = New(parameter.shape(), DType::kFloat32);
      pending.data = pending.owned.fp32();
    }
  }
  return pending.data;
}

ConstBuffer Graph::Weights(const Parameter& parameter, DType dtype, Tensor* copy) const {
  const ConstBuffer weights = parameter.buffer();
  if (weights.dtype == dtype) return weights;
  *copy = New(parameter.shape(), dtype);
  device().Cast(weights, parameter.elements(), copy->buffer());
  return copy->buffer();
}

}  // namespace shardd::tensor

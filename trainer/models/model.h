// What the training loop knows of a model.
#ifndef SHARDD_TRAINER_MODELS_MODEL_H_
#define SHARDD_TRAINER_MODELS_MODEL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "trainer/tensor/graph.h"
#include "trainer/tensor/tensor.h"

namespace shardd::models {

// One slot's sequences. `labels` has for each position of the predicted sequence
// the token that is due there, or tensor::kIgnoreLabel: shifting is the data's
// business.
struct Batch {
  int64_t sequences = 0;
  int64_t length = 0;
  std::vector<int32_t> inputs;  // [sequences,length]
  std::vector<int32_t> labels;  // [sequences,length]

  // Labels that count.
  int64_t targets() const;
};

class Model {
 public:
  virtual ~Model() = default;

  // In registration order, which is that of first use in forward; each tied
  // parameter once.
  tensor::ParameterSpan parameters() const { return parameter_pointers_; }

  // Writes elements [first, first + out.size()) of the initial value of
  // `parameter`: a function of (seed, name, element), whoever asks.
  virtual void Initialise(const tensor::Parameter& parameter, uint64_t seed, int64_t first,
                          std::span<float> out) const = 0;

  // The mean loss over the batch's targets, as an fp64 scalar [1]. The model must
  // outlive the graph. Errors: kInvalidArgument for a batch that does not fit the
  // model, and those of the graph's ParameterAccess.
  virtual absl::StatusOr<tensor::Tensor> Forward(tensor::Graph& graph,
                                                 const Batch& batch) const = 0;

 protected:
  // For constructors of models.
  tensor::Parameter* AddParameter(std::string name, tensor::Shape shape);

 private:
  std::vector<std::unique_ptr<tensor::Parameter>> parameters_;
  std::vector<tensor::Parameter*> parameter_pointers_;
};

// kInvalidArgument unless ids are in [0, vocabulary) or, as labels, ignored.
absl::Status CheckIds(std::string_view what, std::span<const int32_t> ids, int64_t count,
                      int64_t vocabulary, bool allow_ignored);

}  // namespace shardd::models

#endif  // SHARDD_TRAINER_MODELS_MODEL_H_

// Golden files of models (generate_model.py says what is in one).
#ifndef SHARDD_TESTS_GOLDEN_MODEL_FILE_H_
#define SHARDD_TESTS_GOLDEN_MODEL_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "proto/safetensors/reader.h"
#include "trainer/models/model.h"

namespace shardd::golden {

struct ModelFile {
  std::string name;  // "gpt2"
  std::unique_ptr<models::Model> model;
  kernels::Hyperparameters hyper;
  double clip = 0;  // largest global norm; 0: no clipping
  int64_t steps = 0, batch = 0, length = 0;
  std::vector<int32_t> inputs, labels;   // [steps,batch,length]
  std::vector<double> losses, norms;     // [steps], before each update
  std::vector<std::string> final_names;  // parameters whose last value is there
  const safetensors::Reader* reader = nullptr;

  // Sequences first .. end-1 of a step (counted from 0).
  models::Batch BatchOf(int64_t step, int64_t first, int64_t end) const;
  // "param.", "grad1." or "final." of a parameter: [elements].
  absl::StatusOr<std::vector<float>> Tensor(const std::string& prefix,
                                            const std::string& parameter) const;
};

// Checks that param.* and grad1.* are those of the model, shapes included. `reader`
// outlives the result. kUnimplemented: a model that does not exist; the message names
// those that do. kInvalidArgument: something is missing, or shapes do not agree.
absl::StatusOr<ModelFile> ReadModelFile(const safetensors::Reader& reader);

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_MODEL_FILE_H_

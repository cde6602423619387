#include "trainer/models/model.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd::models {

int64_t Batch::targets() const {
  int64_t count = 0;
  for (int32_t label : labels) count += label != tensor::kIgnoreLabel;
  return count;
}

tensor::Parameter* Model::AddParameter(std::string name, tensor::Shape shape) {
  parameters_.push_back(std::make_unique<tensor::Parameter>(std::move(name), std::move(shape)));
  parameter_pointers_.push_back(parameters_.back().get());
  return parameters_.back().get();
}

absl::Status CheckIds(std::string_view what, std::span<const int32_t> ids, int64_t count,
                      int64_t vocabulary, bool allow_ignored) {
  if (static_cast<int64_t>(ids.size()) != count) {
    return absl::InvalidArgumentError(absl::StrCat("batch: ", ids.size(), " ", std::string(what),
                                                   " where sequences x length is ", count));
  }
  for (int32_t id : ids) {
    if (id >= 0 && id < vocabulary) continue;
    if (allow_ignored && id == tensor::kIgnoreLabel) continue;
    return absl::InvalidArgumentError(absl::StrCat("batch: ", id, " among the ", std::string(what),
                                                   " is outside the vocabulary of ", vocabulary));
  }
  return absl::OkStatus();
}

}  // namespace shardd::models

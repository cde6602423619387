#include "trainer/data/batches.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "trainer/random/counter_random.h"

namespace shardd::data {
namespace {

using Json = nlohmann::json;

constexpr int kPositionVersion = 1;

}  // namespace

absl::StatusOr<TrainingBatches> TrainingBatches::Create(const ByteText* text,
                                                        const Options& options) {
  if (options.context <= 0 || options.sequences <= 0 || options.slots == 0) {
    return absl::InvalidArgumentError("data: context, sequences and slots must be positive");
  }
  if (text->bytes().size() < static_cast<uint64_t>(options.context) + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("data: ", text->bytes().size(), " bytes of text do not fill a context of ",
                     options.context, "; give more text or a smaller context"));
  }
  return TrainingBatches(text, options);
}

TrainingBatches::TrainingBatches(const ByteText* text, const Options& options)
    : text_(text), options_(options) {
  const uint64_t context = static_cast<uint64_t>(options.context);
  // One window less than fits, so that every offset below `context` is possible.
  windows_ = std::max<uint64_t>(1, (text->bytes().size() - context) / context);
}

uint64_t TrainingBatches::StartOf(uint64_t sample) const {
  const uint64_t context = static_cast<uint64_t>(options_.context);
  const uint64_t epoch = sample / windows_;
  const uint64_t slack = text_->bytes().size() - windows_ * context;  // at least 1
  const random::CounterRandom offsets(options_.seed, random::StreamOf("data offset"));
  const uint64_t offset = offsets.Below(epoch, std::min(slack, context));
  const random::Permutation order(options_.seed, random::StreamOf("data order") + epoch, windows_);
  return order(sample % windows_) * context + offset;
}

models::Batch TrainingBatches::ForSlot(uint32_t slot) const {
  models::Batch batch;
  batch.sequences = options_.sequences;
  batch.length = options_.context;
  const uint64_t first = next_sample_ + static_cast<uint64_t>(slot) * options_.sequences;
  for (int64_t i = 0; i < options_.sequences; ++i) {
    const auto begin = text_->bytes().begin() + StartOf(first + i);
    std::copy_n(begin, options_.context, std::back_inserter(batch.inputs));
    std::copy_n(begin + 1, options_.context, std::back_inserter(batch.labels));
  }
  return batch;
}

std::string TrainingBatches::Serialise() const {
  return Json({{"version", kPositionVersion},
               {"text", text_->fingerprint()},
               {"seed", options_.seed},
               {"context", options_.context},
               {"next_sample", next_sample_}})
      .dump();
}

absl::Status TrainingBatches::Restore(std::string_view serialised) {
  const Json json = Json::parse(serialised, nullptr, /*allow_exceptions=*/false);
  const auto is_number = [&](const char* key) {
    return json.contains(key) && json[key].is_number_unsigned();
  };
  if (!json.is_object() || !is_number("version") || json["version"] != kPositionVersion ||
      !is_number("text") || !is_number("seed") || !is_number("context") ||
      !is_number("next_sample")) {
    return absl::DataLossError("data: the stored position is none of this version");
  }
  const std::pair<const char*, uint64_t> fixed[] = {
      {"text", text_->fingerprint()},
      {"seed", options_.seed},
      {"context", static_cast<uint64_t>(options_.context)}};
  for (const auto& [key, value] : fixed) {
    if (json[key].get<uint64_t>() == value) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "data: the run was started with another ", key, " (", json[key].get<uint64_t>(), ", now ",
        value, "); start it with the same data, --seed and --context, or as a new job"));
  }
  next_sample_ = json["next_sample"].get<uint64_t>();
  return absl::OkStatus();
}

std::vector<models::Batch> EvaluationBatches(const ByteText& text, int64_t context,
                                             int64_t sequences) {
  const auto& bytes = text.bytes();
  const int64_t size = static_cast<int64_t>(bytes.size());
  const int64_t stride = std::max<int64_t>(1, context / 2);
  std::vector<models::Batch> batches;
  int64_t predicted = 1;  // bytes before this one have been counted
  for (int64_t start = 0; predicted < size; start += stride) {
    if (batches.empty() || batches.back().sequences == sequences) {
      batches.emplace_back();
      batches.back().length = context;
    }
    models::Batch& batch = batches.back();
    ++batch.sequences;
    for (int64_t t = start; t < start + context; ++t) {
      batch.inputs.push_back(t < size ? bytes[t] : kFileSeparator);
      const bool counts = t + 1 >= predicted && t + 1 < size;
      batch.labels.push_back(counts ? bytes[t + 1] : tensor::kIgnoreLabel);
    }
    predicted = start + context + 1;
  }
  return batches;
}

}  // namespace shardd::data

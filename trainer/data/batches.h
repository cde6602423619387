// Cuts a text into batches, for training and for evaluation.
#ifndef SHARDD_TRAINER_DATA_BATCHES_H_
#define SHARDD_TRAINER_DATA_BATCHES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "trainer/data/byte_text.h"
#include "trainer/models/model.h"

namespace shardd::data {

// The training batches of a run. In each epoch the text is cut into windows of
// `context` bytes from an offset of that epoch's own, and the windows are read in
// an order of that epoch's own, both keyed by the seed. A step takes the next
// slots * sequences windows; slot s the s-th run of `sequences` of them. So what a
// slot reads depends on (seed, step, slot) and on nothing else: not on the rank
// that computes it, nor on how many there are.
class TrainingBatches {
 public:
  struct Options {
    uint64_t seed = 0;
    int64_t context = 256;
    int64_t sequences = 8;  // per slot
    uint32_t slots = 1;
  };
  // `text` must outlive the object. kInvalidArgument if it is shorter than one
  // window and a byte.
  static absl::StatusOr<TrainingBatches> Create(const ByteText* text, const Options& options);

  // The batch of `slot` at the current position; bytes are predicted from the
  // bytes before them in the window.
  models::Batch ForSlot(uint32_t slot) const;

  // To the first step, and to the next.
  void Reset() { next_sample_ = 0; }
  void Advance() { next_sample_ += samples_per_step(); }

  // Windows read since the start, and passes over the text that they make.
  uint64_t next_sample() const { return next_sample_; }
  double epochs() const {
    return static_cast<double>(next_sample_) / static_cast<double>(windows_);
  }

  // The position as text, for the trainer's blob; and back. Restore refuses
  // (kFailedPrecondition, naming what differs) a position of another text, seed or
  // context, and kDataLoss what is no position.
  std::string Serialise() const;
  absl::Status Restore(std::string_view serialised);

 private:
  TrainingBatches(const ByteText* text, const Options& options);
  uint64_t samples_per_step() const {
    return options_.slots * static_cast<uint64_t>(options_.sequences);
  }
  // Where in the text a sample begins.
  uint64_t StartOf(uint64_t sample) const;

  const ByteText* text_;
  Options options_;
  uint64_t windows_;  // of an epoch
  uint64_t next_sample_ = 0;
};

// The whole text for evaluation: windows of `context` bytes that overlap by half,
// of which the second half counts, so that every byte but the first is predicted
// once, with at least half a context before it wherever there is one. At most
// `sequences` windows a batch. Deterministic.
std::vector<models::Batch> EvaluationBatches(const ByteText& text, int64_t context,
                                             int64_t sequences);

}  // namespace shardd::data

#endif  // SHARDD_TRAINER_DATA_BATCHES_H_

// Writes the board of a job's weights segment (docs/formats/segments.md): what
// workers wait for.
#ifndef SHARDD_SERVER_STEP_BOARD_H_
#define SHARDD_SERVER_STEP_BOARD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "proto/contract/segments.h"

namespace shardd::step {

// What workers learn of a decision.
struct DecisionNews {
  uint64_t committed_step = 0;
  uint64_t applied = 0;
  uint32_t result = 0;
  double loss = 0;
  double grad_norm = 0;
  double loss_scale = 1;
  double clip_factor = 1;
  std::string skip_reason;
  std::vector<double> lr;  // of each group
};

// One writer, but Wake may be called from any thread.
class BoardWriter {
 public:
  explicit BoardWriter(contract::Board* board) : board_(board) {}

  // After a daemon's death: ends what it was in the middle of writing.
  void Reset();
  // Tells all sleepers that something they may wait for has changed.
  void Wake();
  void PublishDecision(const DecisionNews& news);
  void SetGeneration(uint64_t generation);
  void SetState(contract::BoardState state);
  void Fail(const std::string& reason);
  void SetSleeping(bool sleeps);

 private:
  contract::Board* board_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_BOARD_H_

// The step between its decision and the moment when anybody may learn of it.
//
// A step is decided in two halves on the job's thread. BeginDecision decides and records the
// decision in the job segment. Then it is made durable at the job's level, which the thread does
// not wait for: it goes on to serve joins, deaths and questions, but reads no gradient.
// FinishDecision tells the ranks and updates. What is recorded is never taken back: a group that
// breaks in between forms again after it, and a daemon that dies in between leaves it to its
// successor.
#ifndef SHARDD_SERVER_STEP_COMMIT_H_
#define SHARDD_SERVER_STEP_COMMIT_H_

#include <cstdint>

#include "server/step/decider.h"

namespace shardd::step {

enum class CommitPhase : uint8_t {
  kNone,      // gradients are coming, or nobody trains
  kRecorded,  // the decision is in the job segment and is being made durable
};

struct PendingCommit {
  CommitPhase phase = CommitPhase::kNone;
  StepOutcome outcome;  // of the step that is pending

  bool pending() const { return phase != CommitPhase::kNone; }
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_COMMIT_H_

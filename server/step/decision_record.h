// What the journal keeps of a decision and of a job's state besides its chunks
// (docs/journal_format.md: DECISION, STATE).
#ifndef SHARDD_SERVER_STEP_DECISION_RECORD_H_
#define SHARDD_SERVER_STEP_DECISION_RECORD_H_

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "proto/contract/segments.h"
#include "server/env/aligned_buffer.h"
#include "server/store/decision_log.h"

namespace shardd::step {

// A payload for the journal: a multiple of a page in memory, `bytes` of it used.
struct EncodedRecord {
  env::AlignedBuffer buffer;
  uint64_t bytes = 0;
};

struct DecisionRecord {
  store::Decision decision;
  contract::StepRecordEntry record{};
  std::vector<contract::ParameterEntry> table;  // of the decision
};

// The table goes as runs of equal entries: parameters of one group mostly have the same.
EncodedRecord EncodeDecision(const store::Decision& decision,
                             const contract::StepRecordEntry& record,
                             std::span<const contract::ParameterEntry> table);
// DataLoss: sizes do not fit each other, `parameters` or `groups`.
absl::StatusOr<DecisionRecord> DecodeDecision(std::span<const std::byte> payload,
                                              uint64_t parameters, uint64_t groups);
// Makes it the current decision of `log`, whose current one is the one before.
void ReplayDecision(DecisionRecord record, store::DecisionLog* log);

// The fields of the header that change outside of decisions.
EncodedRecord EncodeState(const contract::JobHeader& header);
absl::Status ReplayState(std::span<const std::byte> payload, contract::JobHeader* header);

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_DECISION_RECORD_H_

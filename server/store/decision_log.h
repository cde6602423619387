// The recorded decisions of a job: two slots, the per-parameter table's two copies
// and the ring of step records, in the job segment.
//
// One writer. A decision exists once its slot carries a valid checksum; before that
// nothing that a reader takes for current has changed.
#ifndef SHARDD_SERVER_STORE_DECISION_LOG_H_
#define SHARDD_SERVER_STORE_DECISION_LOG_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/contract/segments.h"
#include "server/store/segment.h"

namespace shardd::store {

// A decision without its checksum. `header.presence_words`, `groups`, `blob_bytes`, `reserved`,
// `crc` and `timeline` are filled in by Write.
struct Decision {
  contract::DecisionHeader header{};
  std::vector<uint64_t> presence;  // bit p: parameter p is updated by this step
  std::vector<contract::DecisionGroup> groups;
  std::string blob;
};

// A view; the segment outlives it.
class DecisionLog {
 public:
  explicit DecisionLog(const Segment* job);

  // The current decision; sequence 0 (and defaults) before the first.
  Decision ReadCurrent() const;
  // Where the table of the decision after `sequence` is to be written, and the
  // table that belongs to `sequence`.
  std::span<contract::ParameterEntry> table(uint64_t sequence) const;
  // Puts the record of a step in its place. Counts only with the decision.
  void PutRecord(const contract::StepRecordEntry& record);
  // Records of steps first .. committed that are kept, ascending.
  std::vector<contract::StepRecordEntry> Records(uint64_t first, uint64_t committed) const;
  // Writes `decision` durably at the level of this process: a SIGKILL leaves either
  // the old or the new decision. header.sequence must be the current one + 1, and
  // table(sequence) and the record must have been written. blob <= kMaxBlobBytes.
  void Write(Decision* decision);

 private:
  contract::JobHeader* header() const { return job_->at<contract::JobHeader>(0); }
  std::byte* slot(uint64_t sequence) const;
  bool Valid(const std::byte* slot) const;

  const Segment* job_;
};

}  // namespace shardd::store

#endif  // SHARDD_SERVER_STORE_DECISION_LOG_H_

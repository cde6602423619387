// Tracks which elements of a new job have been uploaded.
#ifndef SHARDD_SERVER_STEP_UPLOAD_H_
#define SHARDD_SERVER_STEP_UPLOAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/contract/layout.h"

namespace shardd::step {

// One thread.
class Upload {
 public:
  // `complete`: the job was initialised before; nothing is tracked.
  Upload(const contract::Layout* layout, bool complete);

  // Whether [begin, begin + count) is a range that an upload may cover: inside
  // one parameter, cut at multiples of 32 elements.
  absl::Status Check(uint64_t begin, uint64_t count) const;
  // Marks a checked range. Ranges may come again.
  void Mark(uint64_t begin, uint64_t count);
  bool complete() const { return missing_ == 0; }
  // A parameter that is not complete, for messages; empty when all are.
  std::string FirstMissing() const;

 private:
  const contract::Layout* layout_;
  std::vector<bool> present_;  // per 32 elements; empty once complete
  uint64_t missing_ = 0;       // groups of 32
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_UPLOAD_H_

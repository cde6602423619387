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
  // `complete`: the job was initialised before; nothing is tracked. `frozen`: bytes of each
  // parameter that is not trained.
  Upload(const contract::Layout* layout, std::vector<uint64_t> frozen, bool complete);

  // Whether [begin, begin + count) is a range that an upload may cover: inside
  // one parameter, cut at multiples of 32 elements.
  absl::Status Check(uint64_t begin, uint64_t count) const;
  // Marks a checked range. Ranges may come again.
  void Mark(uint64_t begin, uint64_t count);
  // The same for bytes [begin, begin + count) of a frozen parameter, cut at multiples of 64.
  absl::Status CheckFrozen(uint32_t index, uint64_t begin, uint64_t count) const;
  void MarkFrozen(uint32_t index, uint64_t begin, uint64_t count);
  bool complete() const { return missing_ == 0; }
  // All is there, as somebody else knows who minds the whole.
  void SetComplete() {
    missing_ = 0;
    Forget();
  }
  bool has_frozen() const { return !frozen_.empty(); }
  // A parameter that is not complete, for messages ("(frozen) 2"); empty when all are.
  std::string FirstMissing() const;

 private:
  void Forget();
  const contract::Layout* layout_;
  std::vector<bool> present_;  // per 32 elements; empty once complete
  const std::vector<uint64_t> frozen_;
  std::vector<std::vector<bool>> frozen_present_;  // per 64 bytes of each; empty once complete
  uint64_t missing_ = 0;                           // groups of 32, and 64 bytes of frozen ones
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_UPLOAD_H_

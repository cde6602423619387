// Which files a checkpoint has, and where in them each piece of each array goes.
#ifndef SHARDD_SERVER_CHECKPOINT_SAVE_PLAN_H_
#define SHARDD_SERVER_CHECKPOINT_SAVE_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/checkpoint/manifest.h"
#include "proto/contract/layout.h"
#include "server/step/state_copy.h"

namespace shardd::checkpoint {

// Immutable but for the checksums, which whoever writes fills in.
class SavePlan {
 public:
  // A member that holds the snapshot's chunks; frozen parameters are the first member's.
  // InvalidArgument: a file's header would be too large.
  static absl::StatusOr<SavePlan> Create(const step::StateSnapshot& snapshot, uint32_t member,
                                         uint64_t file_bytes_max);

  // The place of a parameter's piece in the files of array `array` (0: the master, then the
  // moments).
  struct Place {
    uint32_t file = 0;
    uint32_t tensor = 0;
  };
  Place place(size_t array, uint32_t parameter) const { return places_[array][parameter]; }
  Place frozen_place(uint32_t parameter) const { return frozen_places_[parameter]; }

  std::vector<FileEntry>& files() { return files_; }
  const std::vector<FileEntry>& files() const { return files_; }
  const std::string& header(size_t file) const { return headers_[file]; }
  // Of all files and their headers, without the manifest.
  uint64_t bytes() const;

 private:
  struct Tensor;
  absl::Status AddKind(const std::string& kind, const std::vector<Tensor>& tensors,
                       uint64_t file_bytes_max, std::vector<Place>* places);

  std::vector<FileEntry> files_;
  std::vector<std::string> headers_;        // of each file
  std::vector<std::vector<Place>> places_;  // [arrays][parameters]
  std::vector<Place> frozen_places_;
};

// Names of the arrays' kinds: "model", then the optimizer's states.
std::vector<std::string> ArrayKinds(const v1::JobConfig& config);

}  // namespace shardd::checkpoint

#endif  // SHARDD_SERVER_CHECKPOINT_SAVE_PLAN_H_

// Descriptors of segments that outlive the daemon with its service manager: systemd's
// file-descriptor store (FDSTORE=1, LISTEN_FDS). A second way to keep state: it holds the
// memory of a job even when the files are gone from the state directory.
#ifndef SHARDD_SERVER_STORE_DESCRIPTOR_STORE_H_
#define SHARDD_SERVER_STORE_DESCRIPTOR_STORE_H_

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/contract/fd_passing.h"

namespace shardd::store {

// The files of a job, in the order in which they are opened.
inline constexpr std::array<std::string_view, 4> kSegmentFiles = {"job", "state", "reduced",
                                                                  "weights"};

// The descriptors of one job, by file.
using KeptSegments = std::map<std::string, contract::UniqueFd>;

// Thread-safe.
class DescriptorStore {
 public:
  struct Named {
    std::string name;
    contract::UniqueFd fd;
  };
  struct Options {
    // What the service manager handed over at the start.
    std::vector<Named> kept;
    // Gives the manager a copy of `fd` under `name`, and makes it drop all of a name; both unset:
    // there is no manager, and nothing is kept.
    std::function<absl::Status(const std::string& name, int fd)> keep;
    std::function<void(const std::string& name)> drop;
  };
  explicit DescriptorStore(Options options);

  // Jobs of which anything was handed over and not taken.
  std::vector<std::string> Jobs() const;
  // Takes what was handed over of `job`. NotFound: nothing; DataLoss: not all of its files, which
  // are then still there.
  absl::StatusOr<KeptSegments> Take(const std::string& job);
  // Whether the manager holds `job`'s very files as they lie in `directory`.
  bool HoldsFilesOf(const std::string& job, const std::string& directory) const;
  // Has the files of `job` in `directory` kept. Does nothing without a manager.
  absl::Status Keep(const std::string& job, const std::string& directory);
  // The job was deleted: its memory is not to be held any more.
  void Drop(const std::string& job);

 private:
  const Options options_;
  mutable std::mutex mutex_;
  std::map<std::string, KeptSegments> kept_;  // by job; under mutex_
};

}  // namespace shardd::store

#endif  // SHARDD_SERVER_STORE_DESCRIPTOR_STORE_H_

// Which daemon holds which chunks of a job, and the file in which a daemon stores it.
#ifndef SHARDD_SERVER_STEP_PLACEMENT_H_
#define SHARDD_SERVER_STEP_PLACEMENT_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/contract/layout.h"
#include "proto/peer.pb.h"

namespace shardd::step {

struct OwnedChunks {
  contract::Range chunks;
  std::string daemon;
  bool operator==(const OwnedChunks&) const = default;
};

// Immutable once made.
class Placement {
 public:
  // Nobody holds anything.
  Placement() = default;
  // Every shard lies with the daemon of its rank; `daemons` has one per rank.
  static Placement ForRanks(const contract::Layout& layout,
                            const std::vector<std::string>& daemons);
  // InvalidArgument unless the ranges cover chunks 0 .. num_chunks - 1 in order, or are none.
  static absl::StatusOr<Placement> FromProto(
      const google::protobuf::RepeatedPtrField<v1::PeerMessage::OwnedRange>& ranges,
      uint64_t num_chunks);
  void ToProto(google::protobuf::RepeatedPtrField<v1::PeerMessage::OwnedRange>* ranges) const;

  bool empty() const { return ranges_.empty(); }
  const std::vector<OwnedChunks>& ranges() const { return ranges_; }
  // "" when nobody holds it.
  const std::string& OwnerOf(uint64_t chunk) const;
  std::vector<contract::Range> ChunksOf(const std::string& daemon) const;
  std::set<std::string> Daemons() const;
  bool operator==(const Placement&) const = default;

 private:
  std::vector<OwnedChunks> ranges_;  // ascending, neighbours of different daemons
};

// Chunks of `a` that are not in `b`; both ascending and disjoint.
std::vector<contract::Range> Without(const std::vector<contract::Range>& a,
                                     const std::vector<contract::Range>& b);
uint64_t CountChunks(const std::vector<contract::Range>& ranges);

// Reads and writes jobs/NAME/peers. Written by rename: a crash leaves the old or the new one.
// NotFound: the job is of this daemon alone.
absl::StatusOr<v1::JobPeers> ReadJobPeers(const std::string& job_directory);
absl::Status WriteJobPeers(const std::string& job_directory, const v1::JobPeers& peers);

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_PLACEMENT_H_

#include "server/step/placement.h"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "proto/contract/fd_passing.h"

namespace shardd::step {

Placement Placement::ForRanks(const contract::Layout& layout,
                              const std::vector<std::string>& daemons) {
  Placement placement;
  const auto world = static_cast<uint32_t>(daemons.size());
  for (uint32_t rank = 0; rank < world; ++rank) {
    const contract::Range chunks = layout.shard_chunks(rank, world);
    if (chunks.empty()) continue;
    if (!placement.ranges_.empty() && placement.ranges_.back().daemon == daemons[rank]) {
      placement.ranges_.back().chunks.end = chunks.end;
    } else {
      placement.ranges_.push_back({chunks, daemons[rank]});
    }
  }
  return placement;
}

absl::StatusOr<Placement> Placement::FromProto(
    const google::protobuf::RepeatedPtrField<v1::PeerMessage::OwnedRange>& ranges,
    uint64_t num_chunks) {
  Placement placement;
  uint64_t next = 0;
  for (const auto& range : ranges) {
    if (range.first_chunk() != next || range.chunks() == 0 || range.chunks() > num_chunks - next ||
        range.daemon().empty()) {
      return absl::InvalidArgumentError("owners that do not cover the job's chunks in order");
    }
    next += range.chunks();
    placement.ranges_.push_back({{range.first_chunk(), next}, range.daemon()});
  }
  if (next != num_chunks && !placement.ranges_.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("owners of ", next, " chunks of a job that has ", num_chunks));
  }
  return placement;
}

void Placement::ToProto(
    google::protobuf::RepeatedPtrField<v1::PeerMessage::OwnedRange>* ranges) const {
  ranges->Clear();
  for (const OwnedChunks& owned : ranges_) {
    auto* range = ranges->Add();
    range->set_first_chunk(owned.chunks.begin);
    range->set_chunks(owned.chunks.size());
    range->set_daemon(owned.daemon);
  }
}

const std::string& Placement::OwnerOf(uint64_t chunk) const {
  static const std::string nobody;
  for (const OwnedChunks& owned : ranges_) {
    if (chunk < owned.chunks.end) return chunk >= owned.chunks.begin ? owned.daemon : nobody;
  }
  return nobody;
}

std::vector<contract::Range> Placement::ChunksOf(const std::string& daemon) const {
  std::vector<contract::Range> chunks;
  for (const OwnedChunks& owned : ranges_) {
    if (owned.daemon == daemon) chunks.push_back(owned.chunks);
  }
  return chunks;
}

std::set<std::string> Placement::Daemons() const {
  std::set<std::string> daemons;
  for (const OwnedChunks& owned : ranges_) daemons.insert(owned.daemon);
  return daemons;
}

std::vector<contract::Range> Without(const std::vector<contract::Range>& a,
                                     const std::vector<contract::Range>& b) {
  std::vector<contract::Range> rest;
  for (const contract::Range& range : a) {
    uint64_t at = range.begin;
    for (const contract::Range& hole : b) {
      if (hole.end <= at || hole.begin >= range.end) continue;
      if (hole.begin > at) rest.push_back({at, hole.begin});
      at = hole.end;
    }
    if (at < range.end) rest.push_back({at, range.end});
  }
  return rest;
}

uint64_t CountChunks(const std::vector<contract::Range>& ranges) {
  uint64_t count = 0;
  for (const contract::Range& range : ranges) count += range.size();
  return count;
}

absl::StatusOr<v1::JobPeers> ReadJobPeers(const std::string& job_directory) {
  const std::string path = job_directory + "/peers";
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("there is no ", path));
  std::stringstream text;
  text << file.rdbuf();
  v1::JobPeers peers;
  if (!peers.ParseFromString(text.str()) || peers.coordinator().empty()) {
    return absl::DataLossError(absl::StrCat(path, " is damaged"));
  }
  return peers;
}

absl::Status WriteJobPeers(const std::string& job_directory, const v1::JobPeers& peers) {
  const std::string path = job_directory + "/peers", building = path + ".new";
  {
    std::ofstream file(building, std::ios::binary | std::ios::trunc);
    file << peers.SerializeAsString();
    file.close();
    if (!file) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot write ", building, "; give the state directory more space"));
    }
  }
  if (rename(building.c_str(), path.c_str()) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot rename ", building));
  }
  return absl::OkStatus();
}

}  // namespace shardd::step

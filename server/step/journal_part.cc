#include "server/step/journal_part.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "server/journal/format.h"

namespace shardd::step {

namespace {

constexpr uint64_t kPeersBytesMax = 64 << 20;
constexpr char kNext[] = ".next", kLast[] = ".last";  // of one length

uint32_t Crc(std::string_view text) {
  return journal::PieceCrc(reinterpret_cast<const std::byte*>(text.data()), text.size());
}

std::string Beside(const std::string& directory, const char* what) {
  const std::string parent = env::ParentOf(directory);
  return absl::StrCat(parent, "/.", directory.substr(parent.size() + 1), what);
}

bool Exists(env::FileSystem* files, const std::string& path) {
  return !absl::IsNotFound(files->Stat(path).status());
}

// Everything durable, one after the other.
absl::Status Move(env::FileSystem* files, const std::string& from, const std::string& to) {
  if (absl::Status status = files->Rename(from, to); !status.ok()) return status;
  return files->SyncDirectory(env::ParentOf(to));
}

}  // namespace

std::vector<GradientPart> GradientParts(const contract::Layout& layout,
                                        const std::vector<contract::Range>& chunks) {
  std::vector<GradientPart> parts;
  for (uint64_t b = 0; b < layout.num_buckets(); ++b) {
    const contract::Range bucket = layout.bucket_range(b);
    for (const contract::Range& range : chunks) {
      const contract::Range part{std::max(bucket.begin, range.begin * layout.chunk_elements()),
                                 std::min(bucket.end, range.end * layout.chunk_elements())};
      if (part.begin < part.end) parts.push_back({b, part});
    }
  }
  return parts;
}

std::string EncodeJournalPeers(const v1::JobPeers& peers) {
  const std::string text = peers.SerializeAsString();
  const uint32_t crc = Crc(text);
  return std::string(reinterpret_cast<const char*>(&crc), sizeof(crc)) + text;
}

absl::StatusOr<v1::JobPeers> ReadJournalPeers(env::FileSystem* files,
                                              const std::string& directory) {
  const std::string path = env::JoinPath(directory, journal::kPeersName);
  absl::StatusOr<std::vector<std::byte>> data = env::ReadFile(files, path, kPeersBytesMax);
  if (!data.ok()) return data.status();
  const std::string_view all(reinterpret_cast<const char*>(data->data()), data->size());
  uint32_t crc = 0;
  v1::JobPeers peers;
  bool whole = all.size() > sizeof(crc);
  if (whole) {
    std::memcpy(&crc, all.data(), sizeof(crc));
    const std::string_view text = all.substr(sizeof(crc));
    whole = crc == Crc(text) && peers.ParseFromArray(text.data(), static_cast<int>(text.size())) &&
            !peers.coordinator().empty() && !peers.daemon().empty();
  }
  if (!whole) {
    return absl::DataLossError(absl::StrCat(path, " is damaged: its checksum does not fit"));
  }
  return peers;
}

std::vector<contract::Range> OwnChunks(const v1::JobPeers& peers) {
  std::vector<contract::Range> chunks;
  for (const auto& range : peers.owners()) {
    if (range.daemon() != peers.daemon()) continue;
    chunks.push_back({range.first_chunk(), range.first_chunk() + range.chunks()});
  }
  return chunks;
}

std::string NextJournalPath(const std::string& directory) { return Beside(directory, kNext); }
std::string LastJournalPath(const std::string& directory) { return Beside(directory, kLast); }

absl::Status SwitchJournal(env::FileSystem* files, const std::string& directory) {
  const std::string next = NextJournalPath(directory), last = LastJournalPath(directory);
  const bool had = Exists(files, directory);
  if (had) {
    if (absl::Status status = env::RemoveTree(files, last); !status.ok()) return status;
    if (absl::Status status = Move(files, directory, last); !status.ok()) return status;
  }
  if (absl::Status status = Move(files, next, directory); !status.ok()) {
    if (had && !Exists(files, directory)) (void)Move(files, last, directory);
    return status;
  }
  // What is left of it costs room only, and goes with the next start.
  if (had) (void)env::RemoveTree(files, last);
  return absl::OkStatus();
}

absl::Status FinishJournalSwitches(env::FileSystem* files, const std::string& parent) {
  absl::StatusOr<std::vector<std::string>> names = files->List(parent);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const bool next = name.ends_with(kNext), last = name.ends_with(kLast);
    if (name.front() != '.' || (!next && !last)) continue;
    const std::string job = name.substr(1, name.size() - sizeof(kNext));
    const std::string directory = env::JoinPath(parent, job);
    if (job.empty()) continue;
    absl::Status status;
    if (Exists(files, directory)) {
      if (last) status = env::RemoveTree(files, LastJournalPath(directory));
    } else if (!Exists(files, LastJournalPath(directory))) {
      status = env::RemoveTree(files, NextJournalPath(directory));  // of a job that was deleted
    } else if (Exists(files, NextJournalPath(directory))) {
      status = Move(files, NextJournalPath(directory), directory);
      if (status.ok()) status = env::RemoveTree(files, LastJournalPath(directory));
    } else {
      status = Move(files, LastJournalPath(directory), directory);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace shardd::step

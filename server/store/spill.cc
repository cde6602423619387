#include "server/store/spill.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/store/crc32c.h"

namespace shardd::store {

namespace {

using Bytes = std::span<const std::byte>;
using Json = nlohmann::ordered_json;

constexpr int kSpillFormat = 1;
constexpr uint64_t kManifestBytesMax = 1 << 20;
constexpr size_t kPart = 4 << 20;
// Directories, manifest, and what the file system needs for itself.
constexpr uint64_t kSlack = 1 << 20;

absl::Status Damaged(const std::string& path, const std::string& what) {
  return absl::DataLossError(
      absl::StrCat(path, " ", what,
                   "; the job cannot be taken back from it: restore a checkpoint, or delete it"));
}

struct FileEntry {
  uint64_t bytes = 0;
  uint32_t crc = 0;
};

absl::StatusOr<FileEntry> WriteFile(env::FileSystem* files, const std::string& path, Bytes data) {
  auto file = files->Open(path, {env::OpenMode::kCreate});
  if (!file.ok()) return file.status();
  FileEntry entry{data.size(), 0};
  for (size_t at = 0; at < data.size(); at += kPart) {
    const Bytes part = data.subspan(at, std::min(kPart, data.size() - at));
    if (absl::Status status = (*file)->WriteAt(at, part); !status.ok()) return status;
    entry.crc = Crc32c(part.data(), part.size(), entry.crc);
  }
  if (absl::Status status = (*file)->Sync(); !status.ok()) return status;
  (*file)->DropCache(0, data.size());
  return entry;
}

// Before memory is taken for a file: what its entry says may be a lie.
absl::Status CheckSize(env::FileSystem* files, const std::string& path, const FileEntry& entry) {
  absl::StatusOr<env::FileInfo> info = files->Stat(path);
  if (!info.ok()) return info.status();
  if (info->bytes == entry.bytes) return absl::OkStatus();
  return Damaged(path, absl::StrCat("has ", info->bytes, " bytes instead of ", entry.bytes));
}

// Fills `out`, which must be as long as the file, and checks the sum.
absl::Status ReadChecked(env::FileSystem* files, const std::string& path, const FileEntry& entry,
                         std::span<std::byte> out) {
  auto file = files->Open(path, {env::OpenMode::kRead});
  if (!file.ok()) return file.status();
  absl::StatusOr<uint64_t> size = (*file)->Size();
  if (!size.ok()) return size.status();
  if (*size != entry.bytes || out.size() != entry.bytes) {
    return Damaged(path, absl::StrCat("has ", *size, " bytes instead of ", out.size()));
  }
  uint32_t crc = 0;
  for (size_t at = 0; at < out.size(); at += kPart) {
    const std::span<std::byte> part = out.subspan(at, std::min(kPart, out.size() - at));
    absl::StatusOr<size_t> read = (*file)->ReadAt(at, part);
    if (!read.ok()) return read.status();
    if (*read != part.size()) return Damaged(path, "is cut short");
    crc = Crc32c(part.data(), part.size(), crc);
  }
  (*file)->DropCache(0, out.size());
  if (crc != entry.crc) return Damaged(path, "does not have the checksum of its manifest");
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, FileEntry>> ReadManifest(env::FileSystem* files,
                                                              const std::string& directory) {
  const std::string path = env::JoinPath(directory, "manifest.json");
  absl::StatusOr<std::vector<std::byte>> text = env::ReadFile(files, path, kManifestBytesMax);
  if (!text.ok()) return text.status();
  const auto* begin = reinterpret_cast<const char*>(text->data());
  const Json json = Json::parse(begin, begin + text->size(), nullptr, false);
  if (!json.is_object() || !json.contains("format") || !json["format"].is_number_integer()) {
    return Damaged(path, "is no manifest");
  }
  if (json["format"] != kSpillFormat) {
    return absl::FailedPreconditionError(absl::StrCat(path, " has format ", json["format"].dump(),
                                                      "; this daemon reads ", kSpillFormat,
                                                      ": start the daemon that wrote it"));
  }
  std::map<std::string, FileEntry> entries;
  if (!json.contains("files") || !json["files"].is_object()) return Damaged(path, "names no files");
  for (const auto& [name, entry] : json["files"].items()) {
    if (!entry.is_object() || !entry.contains("bytes") || !entry["bytes"].is_number_unsigned() ||
        !entry.contains("crc32c") || !entry["crc32c"].is_number_unsigned()) {
      return Damaged(path, "has an entry without bytes and crc32c");
    }
    entries[name] = {entry["bytes"].get<uint64_t>(), entry["crc32c"].get<uint32_t>()};
  }
  for (const char* name : {"job", "state", "status"}) {
    if (!entries.contains(name)) return Damaged(path, absl::StrCat("does not name '", name, "'"));
  }
  return entries;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SpillDirectory>> SpillDirectory::Open(env::FileSystem* files,
                                                                     const std::string& path,
                                                                     SpillPoint reach) {
  if (absl::Status status = env::MakeDirectories(files, path); !status.ok()) return status;
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) {
    return contract::ErrnoStatus(errno, absl::StrCat("cannot stat ", path));
  }
  if (info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the directory ", path, " belongs to uid ", info.st_uid,
                     " or can be written by others; choose another spill.directory"));
  }
  contract::UniqueFd lock(
      open((path + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock) return contract::ErrnoStatus(errno, absl::StrCat("cannot open ", path, "/.lock"));
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("another daemon holds the directory ", path,
                     "; give this one a spill.directory of its own"));
  }
  absl::StatusOr<std::vector<std::string>> names = files->List(path);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    // What is not ours does not matter.
    if (!absl::StartsWith(name, ".") || !absl::EndsWith(name, ".new")) continue;
    if (absl::Status status = env::RemoveTree(files, env::JoinPath(path, name)); !status.ok()) {
      return status;
    }
  }
  return std::unique_ptr<SpillDirectory>(
      new SpillDirectory(files, path, std::move(reach), std::move(lock)));
}

absl::StatusOr<v1::JobStatus> SpillDirectory::ReadStatus(const std::string& job) const {
  const std::string directory = env::JoinPath(path_, job);
  auto entries = ReadManifest(files_, directory);
  if (!entries.ok()) return entries.status();
  const FileEntry& entry = entries->at("status");
  if (entry.bytes > (64 << 20)) return Damaged(directory, "has a status of impossible size");
  const std::string path = env::JoinPath(directory, "status");
  if (absl::Status s = CheckSize(files_, path, entry); !s.ok()) return s;
  std::vector<std::byte> bytes(entry.bytes);
  if (absl::Status s = ReadChecked(files_, path, entry, bytes); !s.ok()) return s;
  v1::JobStatus status;
  if (!status.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Damaged(path, "cannot be parsed");
  }
  return status;
}

std::map<std::string, v1::JobStatus> SpillDirectory::Jobs() const {
  std::map<std::string, v1::JobStatus> jobs;
  absl::StatusOr<std::vector<std::string>> names = files_->List(path_);
  if (!names.ok()) return jobs;
  for (const std::string& name : *names) {
    if (absl::StartsWith(name, ".")) continue;
    absl::StatusOr<v1::JobStatus> status = ReadStatus(name);
    if (status.ok()) {
      jobs[name] = *std::move(status);
    } else {
      jobs[name].set_failure(std::string(status.status().message()));
    }
    jobs[name].set_name(name);
    jobs[name].set_state("spilled");
  }
  return jobs;
}

absl::Status SpillDirectory::Spill(const JobSegments& segments, const contract::Layout& layout,
                                   const v1::JobStatus& status) const {
  const std::string job = status.name();
  const std::string building = env::JoinPath(path_, absl::StrCat(".", job, ".new"));
  const std::string target = env::JoinPath(path_, job);
  const Bytes image = segments.job_image();
  const Bytes state = segments.state_image(layout);
  const Bytes weights = segments.weights_image();
  absl::StatusOr<uint64_t> free = files_->FreeBytes(path_);
  if (!free.ok()) return free.status();
  const uint64_t needed = image.size() + state.size() + weights.size() + kSlack;
  if (*free < needed) {
    return absl::ResourceExhaustedError(
        absl::StrCat("spilling job '", job, "' needs ", needed, " bytes of ", path_, ", which has ",
                     *free, " free; make room there, or set spill.directory to a larger disk"));
  }
  const std::string text = status.SerializeAsString();
  const auto write = [&]() -> absl::Status {
    if (absl::Status s = env::RemoveTree(files_, building); !s.ok()) return s;
    if (absl::Status s = files_->MakeDirectory(building); !s.ok()) return s;
    Json manifest = {{"format", kSpillFormat}, {"job", job}, {"files", Json::object()}};
    std::vector<std::pair<const char*, Bytes>> parts = {
        {"job", image}, {"state", state}, {"status", std::as_bytes(std::span(text))}};
    if (!weights.empty()) parts.emplace_back("weights", weights);
    for (const auto& [name, data] : parts) {
      absl::StatusOr<FileEntry> entry = WriteFile(files_, env::JoinPath(building, name), data);
      if (!entry.ok()) return entry.status();
      manifest["files"][name] = {{"bytes", entry->bytes}, {"crc32c", entry->crc}};
    }
    const std::string json = manifest.dump(2) + "\n";
    absl::StatusOr<FileEntry> entry =
        WriteFile(files_, env::JoinPath(building, "manifest.json"), std::as_bytes(std::span(json)));
    if (!entry.ok()) return entry.status();
    if (absl::Status s = files_->SyncDirectory(building); !s.ok()) return s;
    reach_("spill.before_rename");
    // An older spill of this job goes only now: until the rename it is the one that counts.
    if (absl::Status s = env::RemoveTree(files_, target); !s.ok()) return s;
    if (absl::Status s = files_->Rename(building, target); !s.ok()) return s;
    return files_->SyncDirectory(path_);
  };
  const absl::Status written = write();
  if (!written.ok()) env::RemoveTree(files_, building).IgnoreError();
  return written;
}

absl::StatusOr<AdoptedJob> SpillDirectory::Restore(const StateDirectory& directory,
                                                   const std::string& job) const {
  const std::string from = env::JoinPath(path_, job);
  auto entries = ReadManifest(files_, from);
  if (!entries.ok()) return entries.status();
  const FileEntry& image_entry = entries->at("job");
  const std::string image_path = env::JoinPath(from, "job");
  if (absl::Status s = CheckSize(files_, image_path, image_entry); !s.ok()) return s;
  std::vector<std::byte> image(image_entry.bytes);
  if (absl::Status s = ReadChecked(files_, image_path, image_entry, image); !s.ok()) return s;
  const auto read = [&](std::span<std::byte> state, std::span<std::byte> weights) {
    absl::Status status =
        ReadChecked(files_, env::JoinPath(from, "state"), entries->at("state"), state);
    if (status.ok() && !weights.empty()) {
      status =
          entries->contains("weights")
              ? ReadChecked(files_, env::JoinPath(from, "weights"), entries->at("weights"), weights)
              : Damaged(from, "lacks the working weights, which are part of its state");
    }
    if (status.ok()) reach_("unspill.before_initialised");
    return status;
  };
  return JobSegments::CreateFrom(directory, job, image, read);
}

absl::Status SpillDirectory::Remove(const std::string& job) const {
  return env::RemoveTree(files_, env::JoinPath(path_, job));
}

}  // namespace shardd::store

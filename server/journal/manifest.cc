#include "server/journal/manifest.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardd::journal {

namespace {

std::string PathOf(const std::string& directory) { return env::JoinPath(directory, "MANIFEST"); }

// Whether what is said of snapshot `i` can be.
absl::Status CheckSnapshot(const ManifestPage& page, uint64_t i, const std::string& path) {
  const ManifestSnapshot& s = page.snapshot[i];
  const bool ascending =
      i == 0 || (s.number > page.snapshot[i - 1].number && s.step >= page.snapshot[i - 1].step &&
                 s.redo_lsn >= page.snapshot[i - 1].redo_lsn);
  if (ascending && s.slot <= kMaxSlot && s.bytes % kPageBytes == 0 && s.records >= 2 &&
      s.records <= s.bytes / kPageBytes && s.redo_lsn >= 1 && s.redo_lsn - 1 <= page.durable_lsn) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat(path, " says of snapshot ", s.number, " what cannot be: slot ", s.slot, ", ",
                   s.records, " records, ", s.bytes, " bytes, step ", s.step, ", log from ",
                   s.redo_lsn, ", durable up to ", page.durable_lsn));
}

}  // namespace

absl::Status WriteManifest(env::FileSystem* files, const std::string& directory,
                           const Manifest& manifest, const std::function<void()>& before_rename) {
  ManifestPage page{};
  page.magic = kManifestMagic;
  page.version = kJournalVersion;
  page.job_tag = manifest.job.job_tag;
  page.timeline = manifest.job.timeline;
  page.durable_lsn = manifest.durable_lsn;
  page.snapshots = manifest.snapshots.size();
  std::copy(manifest.snapshots.begin(), manifest.snapshots.end(), page.snapshot);
  std::memcpy(page.name, manifest.job.name.data(),
              std::min(manifest.job.name.size(), sizeof(page.name) - 1));
  page.crc = PageCrc(&page, &page.crc);
  const std::string path = PathOf(directory);
  {
    absl::StatusOr<std::unique_ptr<env::File>> file =
        files->Open(path + ".new", {.mode = env::OpenMode::kCreateOrEmpty});
    if (!file.ok()) return file.status();
    const auto bytes = std::as_bytes(std::span(&page, 1));
    if (absl::Status status = (*file)->WriteAt(0, bytes); !status.ok()) return status;
    if (absl::Status status = (*file)->Sync(); !status.ok()) return status;
  }
  before_rename();
  if (absl::Status status = files->Rename(path + ".new", path); !status.ok()) return status;
  return files->SyncDirectory(directory);
}

absl::StatusOr<Manifest> ReadManifest(env::FileSystem* files, const std::string& directory) {
  const std::string path = PathOf(directory);
  absl::StatusOr<std::vector<std::byte>> data = env::ReadFile(files, path, sizeof(ManifestPage));
  if (!data.ok()) return data.status();
  ManifestPage page;
  if (data->size() != sizeof(page)) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", data->size(), " bytes where ", sizeof(page), " are due"));
  }
  std::memcpy(&page, data->data(), sizeof(page));
  if (page.magic != kManifestMagic || page.crc != PageCrc(&page, &page.crc)) {
    return absl::DataLossError(absl::StrCat(path, " is damaged: its checksum does not fit"));
  }
  if (page.version != kJournalVersion) {
    return absl::FailedPreconditionError(absl::StrCat(path, " has format version ", page.version,
                                                      "; this daemon reads ", kJournalVersion,
                                                      ": start the daemon that wrote it"));
  }
  if (page.snapshots > kMaxSnapshots) {
    return absl::DataLossError(absl::StrCat(path, " names ", page.snapshots, " snapshots"));
  }
  for (uint64_t i = 0; i < page.snapshots; ++i) {
    if (absl::Status status = CheckSnapshot(page, i, path); !status.ok()) return status;
  }
  Manifest manifest;
  manifest.job.name.assign(page.name, strnlen(page.name, sizeof(page.name)));
  manifest.job.job_tag = page.job_tag;
  manifest.job.timeline = page.timeline;
  manifest.durable_lsn = page.durable_lsn;
  manifest.snapshots.assign(page.snapshot, page.snapshot + page.snapshots);
  return manifest;
}

}  // namespace shardd::journal

#include "server/store/descriptor_store.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace shardd::store {

namespace {

// "shardd/JOB/FILE"; systemd takes any printable name without a colon.
constexpr std::string_view kPrefix = "shardd/";

std::string NameOf(const std::string& job, std::string_view file) {
  return absl::StrCat(std::string(kPrefix), job, "/", std::string(file));
}

bool SameFile(int fd, const std::string& path) {
  struct stat kept {
  }, lying{};
  return fstat(fd, &kept) == 0 && stat(path.c_str(), &lying) == 0 && kept.st_dev == lying.st_dev &&
         kept.st_ino == lying.st_ino;
}

}  // namespace

DescriptorStore::DescriptorStore(Options options)
    : options_{{}, std::move(options.keep), std::move(options.drop)} {
  for (Named& named : options.kept) {
    if (named.name.rfind(kPrefix, 0) != 0) continue;
    const size_t slash = named.name.find('/', kPrefix.size());
    if (slash == std::string::npos) continue;
    const std::string job = named.name.substr(kPrefix.size(), slash - kPrefix.size());
    kept_[job][named.name.substr(slash + 1)] = std::move(named.fd);
  }
}

std::vector<std::string> DescriptorStore::Jobs() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> jobs;
  for (const auto& [job, files] : kept_) jobs.push_back(job);
  return jobs;
}

absl::StatusOr<KeptSegments> DescriptorStore::Take(const std::string& job) {
  std::lock_guard lock(mutex_);
  const auto it = kept_.find(job);
  if (it == kept_.end()) {
    return absl::NotFoundError(
        absl::StrCat("the service manager holds nothing of job '", job, "'"));
  }
  for (std::string_view file : kSegmentFiles) {
    if (it->second.contains(std::string(file))) continue;
    return absl::DataLossError(absl::StrCat("the service manager holds job '", job,
                                            "' without its segment '", std::string(file), "'"));
  }
  KeptSegments segments = std::move(it->second);
  kept_.erase(it);
  return segments;
}

bool DescriptorStore::HoldsFilesOf(const std::string& job, const std::string& directory) const {
  std::lock_guard lock(mutex_);
  const auto it = kept_.find(job);
  if (it == kept_.end()) return false;
  for (std::string_view file : kSegmentFiles) {
    const auto kept = it->second.find(std::string(file));
    if (kept == it->second.end() ||
        !SameFile(kept->second.get(), absl::StrCat(directory, "/", std::string(file)))) {
      return false;
    }
  }
  return true;
}

absl::Status DescriptorStore::Keep(const std::string& job, const std::string& directory) {
  if (!options_.keep) return absl::OkStatus();
  for (std::string_view file : kSegmentFiles) {
    const std::string path = absl::StrCat(directory, "/", std::string(file));
    const contract::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!fd) return contract::ErrnoStatus(errno, absl::StrCat("cannot open ", path));
    if (absl::Status status = options_.keep(NameOf(job, file), fd.get()); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

void DescriptorStore::Drop(const std::string& job) {
  {
    std::lock_guard lock(mutex_);
    kept_.erase(job);
  }
  if (!options_.drop) return;
  for (std::string_view file : kSegmentFiles) options_.drop(NameOf(job, file));
}

}  // namespace shardd::store

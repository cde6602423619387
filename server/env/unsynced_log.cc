#include "server/env/unsynced_log.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/env/faulty_file_system.h"

namespace shardd::env {

namespace {

namespace fs = std::filesystem;

constexpr char kPrefix[] = ".unsynced-";
constexpr uint64_t kPage = 4096;
constexpr uint64_t kMagic = 0x6465'636e'7973'6e75;

struct ContentRecord {
  uint64_t magic = kMagic;
  uint64_t offset = 0;
  uint64_t bytes = 0;  // of old content that follow
  uint64_t old_size = 0;
};

enum class NameChange : uint64_t { kCreated = 1, kRenamed = 2, kRemoved = 3 };

struct NameRecord {
  uint64_t magic = kMagic;
  NameChange change = NameChange::kCreated;
  uint64_t saved = 0;  // number of the link to what was replaced or removed; 0: none
  char from[512] = {};
  char to[512] = {};
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "the log of unsynced changes failed: %s: %s\n", what.c_str(),
               std::strerror(errno));
  std::abort();
}

std::string NamesLog(const std::string& directory) {
  return JoinPath(directory, absl::StrCat(kPrefix, "names"));
}

std::string SavedLink(const std::string& directory, uint64_t number) {
  return JoinPath(directory, absl::StrCat(kPrefix, "saved-", number));
}

std::string ContentLog(const std::string& directory, uint64_t inode) {
  return JoinPath(directory, absl::StrCat(kPrefix, inode));
}

uint64_t InodeOf(const std::string& path) {
  struct stat info {};
  return lstat(path.c_str(), &info) == 0 ? info.st_ino : 0;
}

void Append(const std::string& path, const void* record, size_t record_bytes, const void* data,
            size_t bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0 && errno == ENOENT) return;  // no such directory: the change fails as well
  if (fd < 0) Die("open " + path);
  std::string all(static_cast<const char*>(record), record_bytes);
  all.append(static_cast<const char*>(data), bytes);
  for (size_t at = 0; at < all.size();) {
    const ssize_t n = write(fd, all.data() + at, all.size() - at);
    if (n < 0) Die("write " + path);
    at += static_cast<size_t>(n);
  }
  close(fd);
}

// A number that no saved link of the directory has.
uint64_t Save(const std::string& path) {
  const std::string directory = ParentOf(path);
  for (uint64_t number = 1;; ++number) {
    if (link(path.c_str(), SavedLink(directory, number).c_str()) == 0) return number;
    if (errno == ENOENT) return 0;
    if (errno != EEXIST) Die("link " + path);
  }
}

void LogName(NameChange change, const std::string& from, const std::string& to, uint64_t saved) {
  NameRecord record;
  record.change = change;
  record.saved = saved;
  if (from.size() >= sizeof(record.from) || to.size() >= sizeof(record.to)) Die("long path " + to);
  std::memcpy(record.from, from.data(), from.size());
  std::memcpy(record.to, to.data(), to.size());
  Append(NamesLog(ParentOf(to)), &record, sizeof(record), nullptr, 0);
}

std::vector<char> ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

bool IsUnsyncedLog(const std::string& name) { return absl::StartsWith(name, kPrefix); }

void LogContent(const std::string& path, uint64_t offset, uint64_t bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) Die("open " + path);
  struct stat info {};
  if (fstat(fd, &info) != 0) Die("stat " + path);
  ContentRecord record;
  record.offset = offset;
  record.old_size = static_cast<uint64_t>(info.st_size);
  record.bytes = offset >= record.old_size ? 0 : std::min(bytes, record.old_size - offset);
  std::vector<char> old(record.bytes);
  for (size_t at = 0; at < old.size();) {
    const ssize_t n = pread(fd, old.data() + at, old.size() - at, static_cast<off_t>(offset + at));
    if (n <= 0) Die("read " + path);
    at += static_cast<size_t>(n);
  }
  close(fd);
  Append(ContentLog(ParentOf(path), info.st_ino), &record, sizeof(record), old.data(), old.size());
}

void ForgetContent(const std::string& path) {
  unlink(ContentLog(ParentOf(path), InodeOf(path)).c_str());
}

void LogCreation(const std::string& path) { LogName(NameChange::kCreated, "", path, 0); }

void LogRename(const std::string& from, const std::string& to) {
  struct stat info {};
  const bool replaces = lstat(to.c_str(), &info) == 0 && !S_ISDIR(info.st_mode);
  LogName(NameChange::kRenamed, from, to, replaces ? Save(to) : 0);
}

void LogRemoval(const std::string& path) {
  struct stat info {};
  const bool directory = lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  LogName(NameChange::kRemoved, directory ? "d" : "", path, directory ? 0 : Save(path));
}

void ForgetNames(const std::string& directory) {
  unlink(NamesLog(directory).c_str());
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename();
    if (!absl::StartsWith(name, absl::StrCat(kPrefix, "saved-"))) continue;
    // The last link of a removed file takes the log of its content along.
    struct stat info {};
    if (lstat(entry.path().c_str(), &info) == 0 && info.st_nlink == 1) {
      unlink(ContentLog(directory, info.st_ino).c_str());
    }
    unlink(entry.path().c_str());
  }
}

namespace {

// Newest first: names, since contents are found by inode whatever the name.
void DropNames(const std::string& directory) {
  const std::vector<char> log = ReadAll(NamesLog(directory));
  for (size_t i = log.size() / sizeof(NameRecord); i-- > 0;) {
    NameRecord record;
    std::memcpy(&record, log.data() + i * sizeof(record), sizeof(record));
    if (record.magic != kMagic) continue;
    const std::string saved = SavedLink(directory, record.saved);
    std::error_code ignored;
    switch (record.change) {
      case NameChange::kCreated:
        fs::remove_all(record.to, ignored);
        break;
      case NameChange::kRenamed: {
        // A change that was logged and then did not happen left `from` in its place.
        if (!fs::exists(record.from)) fs::rename(record.to, record.from, ignored);
        if (record.saved != 0) fs::rename(saved, record.to, ignored);
        break;
      }
      case NameChange::kRemoved:
        if (record.from[0] == 'd') {
          fs::create_directory(record.to, ignored);
        } else if (record.saved != 0) {
          fs::rename(saved, record.to, ignored);
        }
        break;
    }
  }
  ForgetNames(directory);
}

bool Keeps(uint64_t seed, uint64_t inode, uint64_t page) {
  if (seed == 0) return false;
  uint64_t h =
      (seed * 0x9E3779B97F4A7C15u) ^ (inode * 0xC2B2AE3D27D4EB4Fu) ^ (page * 0x165667B19E3779F9u);
  h ^= h >> 29;
  h *= 0xBF58476D1CE4E5B9u;
  return (h >> 33 & 1) != 0;
}

void DropContent(const std::string& log_path, const std::string& path, uint64_t inode,
                 uint64_t seed) {
  const std::vector<char> log = ReadAll(log_path);
  std::vector<size_t> records;
  for (size_t at = 0; at + sizeof(ContentRecord) <= log.size();) {
    ContentRecord record;
    std::memcpy(&record, log.data() + at, sizeof(record));
    if (record.magic != kMagic || record.bytes > log.size() - at - sizeof(record)) break;
    records.push_back(at);
    at += sizeof(record) + record.bytes;
  }
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  std::reverse(records.begin(), records.end());
  for (size_t at : records) {
    ContentRecord record;
    std::memcpy(&record, log.data() + at, sizeof(record));
    const char* old = log.data() + at + sizeof(record);
    for (uint64_t done = 0; done < record.bytes;) {
      const uint64_t offset = record.offset + done;
      const uint64_t part = std::min(record.bytes - done, kPage - offset % kPage);
      if (!Keeps(seed, inode, offset / kPage) &&
          pwrite(fd, old + done, part, static_cast<off_t>(offset)) != static_cast<ssize_t>(part)) {
        Die("write " + path);
      }
      done += part;
    }
    if (seed == 0 && ftruncate(fd, static_cast<off_t>(record.old_size)) != 0) {
      Die("truncate " + path);
    }
  }
  close(fd);
}

}  // namespace

absl::Status DropUnsynced(const std::string& directory, uint64_t seed) {
  if (!fs::is_directory(directory)) {
    return absl::NotFoundError(absl::StrCat("there is no directory ", directory));
  }
  // Parents first: what a parent forgets takes its children along.
  DropNames(directory);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.is_directory() && !entry.is_symlink()) {
      if (absl::Status s = DropUnsynced(entry.path(), seed); !s.ok()) return s;
    } else {
      names.push_back(entry.path());
    }
  }
  std::map<uint64_t, std::string> by_inode;
  for (const std::string& name : names) {
    if (!IsUnsyncedLog(fs::path(name).filename())) by_inode[InodeOf(name)] = name;
  }
  for (const std::string& name : names) {
    const std::string file = fs::path(name).filename();
    if (!IsUnsyncedLog(file)) continue;
    const uint64_t inode = std::strtoull(file.c_str() + sizeof(kPrefix) - 1, nullptr, 10);
    const auto it = by_inode.find(inode);
    if (it != by_inode.end()) DropContent(name, it->second, inode, seed);
    fs::remove(name);
  }
  return absl::OkStatus();
}

}  // namespace shardd::env

#include "trainer/data/byte_text.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardd::data {
namespace {

namespace fs = std::filesystem;

absl::Status PathError(const std::string& path, const std::error_code& error) {
  return absl::ErrnoToStatus(error.value(), absl::StrCat("data: cannot read ", path));
}

// Appends the regular files below `directory`, sorted by path.
absl::Status ListDirectory(const std::string& directory, std::vector<std::string>* files) {
  std::error_code error;
  std::vector<std::string> found;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    if (it->is_symlink(error) || !it->is_regular_file(error)) continue;
    found.push_back(it->path().string());
  }
  if (error) return PathError(directory, error);
  std::sort(found.begin(), found.end());
  files->insert(files->end(), found.begin(), found.end());
  return absl::OkStatus();
}

bool IsExcluded(const std::string& file, const std::vector<std::string>& excluded) {
  return std::any_of(excluded.begin(), excluded.end(), [&](const std::string& other) {
    std::error_code error;
    return fs::equivalent(file, other, error);
  });
}

absl::Status AppendFile(const std::string& path, std::vector<uint8_t>* bytes) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return PathError(path, {errno, std::generic_category()});
  const std::streamoff size = in.tellg();
  in.seekg(0);
  const size_t at = bytes->size();
  bytes->resize(at + static_cast<size_t>(size));
  in.read(reinterpret_cast<char*>(bytes->data() + at), size);
  if (in.gcount() != size) {
    return absl::DataLossError(
        absl::StrCat("data: ", path, " changed while it was read; keep the data unchanged"));
  }
  return absl::OkStatus();
}

uint64_t Fingerprint(const std::vector<uint8_t>& bytes) {
  uint64_t hash = 0xcbf29ce484222325 ^ bytes.size();  // FNV-1a
  for (uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

}  // namespace

absl::StatusOr<ByteText> ByteText::Load(const std::vector<std::string>& paths,
                                        const std::vector<std::string>& excluded) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (error) return PathError(path, error);
    if (status.type() == fs::file_type::directory) {
      if (absl::Status s = ListDirectory(path, &files); !s.ok()) return s;
    } else if (status.type() == fs::file_type::regular) {
      files.push_back(path);
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("data: ", path, " is neither a file nor a directory"));
    }
  }
  ByteText text;
  for (const std::string& file : files) {
    if (IsExcluded(file, excluded)) continue;
    if (!text.files_.empty()) text.bytes_.push_back(kFileSeparator);
    if (absl::Status s = AppendFile(file, &text.bytes_); !s.ok()) return s;
    text.files_.push_back(file);
  }
  if (text.bytes_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("data: no text in ", absl::StrJoin(paths, ", "),
                                                   "; name files or directories with text"));
  }
  text.fingerprint_ = Fingerprint(text.bytes_);
  return text;
}

ByteText ByteText::FromBytes(std::vector<uint8_t> bytes) {
  ByteText text;
  text.bytes_ = std::move(bytes);
  text.fingerprint_ = Fingerprint(text.bytes_);
  return text;
}

}  // namespace shardd::data

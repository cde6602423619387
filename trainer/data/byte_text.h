// Text as bytes: the vocabulary is the 256 byte values.
#ifndef SHARDD_TRAINER_DATA_BYTE_TEXT_H_
#define SHARDD_TRAINER_DATA_BYTE_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardd::data {

inline constexpr int64_t kByteVocabulary = 256;

// Stands between two files.
inline constexpr uint8_t kFileSeparator = 0;

// The bytes of some files, one after the other. Immutable, thread-safe.
class ByteText {
 public:
  // Reads files, and for a directory every regular file below it in the order of
  // their paths (bytewise); symbolic links found in a directory are skipped, so
  // that no text comes twice. A file that `excluded` names (by whatever path) is
  // left out. Errors name the path: kNotFound, kInvalidArgument if nothing is left.
  static absl::StatusOr<ByteText> Load(const std::vector<std::string>& paths,
                                       const std::vector<std::string>& excluded = {});
  // For tests.
  static ByteText FromBytes(std::vector<uint8_t> bytes);

  const std::vector<uint8_t>& bytes() const { return bytes_; }
  const std::vector<std::string>& files() const { return files_; }
  // Hash of the bytes: says whether a run that goes on reads the same text.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::vector<uint8_t> bytes_;
  std::vector<std::string> files_;
  uint64_t fingerprint_ = 0;
};

}  // namespace shardd::data

#endif  // SHARDD_TRAINER_DATA_BYTE_TEXT_H_

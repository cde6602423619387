#include "server/journal/format.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/store/crc32c.h"

namespace shardd::journal {

namespace {

absl::Status CheckCommon(uint64_t magic, uint64_t wanted_magic, uint32_t version, uint32_t crc,
                         uint32_t wanted_crc, uint64_t job_tag, uint64_t timeline,
                         const JobIdentity& job, const std::string& what) {
  if (magic != wanted_magic) {
    return absl::DataLossError(absl::StrCat(what, " is not of a journal"));
  }
  if (crc != wanted_crc) {
    return absl::DataLossError(absl::StrCat(what, " is damaged: its checksum does not fit"));
  }
  if (version != kJournalVersion) {
    return absl::FailedPreconditionError(absl::StrCat(what, " has format version ", version,
                                                      "; this daemon reads ", kJournalVersion,
                                                      ": start the daemon that wrote it"));
  }
  if (job_tag != job.job_tag || timeline != job.timeline) {
    return absl::DataLossError(
        absl::StrCat(what, " belongs to another job or timeline than job '", job.name, "'"));
  }
  return absl::OkStatus();
}

}  // namespace

uint32_t PageCrc(const void* page, const uint32_t* crc) {
  const auto* bytes = static_cast<const std::byte*>(page);
  const auto offset = static_cast<size_t>(reinterpret_cast<const std::byte*>(crc) - bytes);
  const uint32_t zero = 0;
  uint32_t value = store::Crc32c(bytes, offset);
  value = store::Crc32c(&zero, sizeof(zero), value);
  return store::Crc32c(bytes + offset + 4, kPageBytes - offset - 4, value);
}

uint32_t PieceCrc(const std::byte* data, size_t bytes) { return store::Crc32c(data, bytes); }

absl::Status CheckSegmentHeader(const SegmentHeader& h, const JobIdentity& job,
                                const std::string& what) {
  return CheckCommon(h.magic, kSegmentMagic, h.version, h.crc, PageCrc(&h, &h.crc), h.job_tag,
                     h.timeline, job, what);
}

absl::Status CheckRecordHeader(const RecordHeader& h, const JobIdentity& job,
                               const std::string& what) {
  absl::Status status = CheckCommon(h.magic, kRecordMagic, h.version, h.header_crc,
                                    PageCrc(&h, &h.header_crc), h.job_tag, h.timeline, job, what);
  if (!status.ok()) return status;
  const uint64_t padded = h.padded_bytes();
  const uint64_t pieces = h.piece_bytes == 0 ? 0 : (padded + h.piece_bytes - 1) / h.piece_bytes;
  if (h.payload_bytes > uint64_t{1} << 48 || h.pieces > kMaxPieces || h.pieces != pieces ||
      h.piece_bytes % kPageBytes != 0 || (padded > 0 && h.piece_bytes == 0)) {
    return absl::DataLossError(absl::StrCat(what, " says sizes that do not fit"));
  }
  return absl::OkStatus();
}

absl::Status CheckPieces(const RecordHeader& header, size_t first, std::span<const std::byte> data,
                         const std::string& what) {
  for (size_t at = 0, piece = first; at < data.size(); ++piece) {
    const size_t bytes = std::min<size_t>(header.piece_bytes, data.size() - at);
    if (PieceCrc(data.data() + at, bytes) != header.piece_crc[piece]) {
      return absl::DataLossError(absl::StrCat(what, " is damaged: the checksum of its payload's ",
                                              bytes, " bytes at ", piece * header.piece_bytes,
                                              " does not fit"));
    }
    at += bytes;
  }
  return absl::OkStatus();
}

uint64_t PieceBytes(uint64_t payload_bytes, uint64_t unit) {
  const uint64_t units = (payload_bytes + unit - 1) / unit;
  return unit * std::max<uint64_t>(1, (units + kMaxPieces - 1) / kMaxPieces);
}

std::string SegmentName(uint64_t slot) { return absl::StrCat("log-", slot); }
std::string SnapshotName(uint64_t slot) { return absl::StrCat("snapshot-", slot); }

int64_t SlotOf(const std::string& name, const std::string& prefix) {
  uint32_t slot = 0;
  if (!name.starts_with(prefix) || !absl::SimpleAtoi(name.substr(prefix.size()), &slot)) return -1;
  return slot;
}

uint64_t RandomNonce() {
  uint64_t value = 0;
  while (value == 0 && getrandom(&value, sizeof(value), 0) < 0) {
  }
  return value;
}

}  // namespace shardd::journal

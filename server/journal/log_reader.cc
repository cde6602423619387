#include "server/journal/log_reader.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardd::journal {

namespace {

constexpr uint64_t kScanBytes = 1 << 20;

struct Segment {
  std::unique_ptr<env::File> file;
  SegmentHeader header{};
  LiveSegment live;
  uint64_t size = 0;
};

bool AllZero(const env::AlignedBuffer& page) {
  return std::all_of(page.data(), page.data() + page.size(),
                     [](std::byte b) { return b == std::byte{0}; });
}

class Reader {
 public:
  Reader(env::FileSystem* files, std::string directory, const JobIdentity& job,
         const LogRange& range)
      : files_(files),
        directory_(std::move(directory)),
        job_(job),
        range_(range),
        durable_(range.durable_lsn) {}

  absl::StatusOr<LogIndex> Read() {
    if (absl::Status status = OpenSegments(); !status.ok()) return status;
    KeepWhatCounts();
    if (absl::Status status = ReadHeaders(); !status.ok()) return status;
    if (absl::Status status = CheckTail(); !status.ok()) return status;
    Finish();
    return std::move(out_);
  }

 private:
  absl::Status OpenSegments() {
    absl::StatusOr<std::vector<std::string>> names = files_->List(directory_);
    if (!names.ok()) return names.status();
    for (const std::string& name : *names) {
      const int64_t slot = SlotOf(name, "log-");
      if (slot < 0) continue;
      absl::StatusOr<std::unique_ptr<env::File>> file =
          files_->Open(env::JoinPath(directory_, name), {.direct = true});
      if (!file.ok()) return file.status();
      absl::StatusOr<size_t> n = (*file)->ReadAt(0, page_.span());
      if (!n.ok()) return n.status();
      Segment segment;
      if (*n < kPageBytes) {
        return absl::DataLossError(PlaceName(**file, 0) + " is cut short: it has no header");
      }
      if (AllZero(page_)) {  // never used
        out_.end.free.push_back(static_cast<uint64_t>(slot));
        continue;
      }
      std::memcpy(&segment.header, page_.data(), sizeof(segment.header));
      absl::Status status =
          CheckSegmentHeader(*page_.as<SegmentHeader>(), job_, PlaceName(**file, 0));
      if (!status.ok()) return status;
      absl::StatusOr<uint64_t> size = (*file)->Size();
      if (!size.ok()) return size.status();
      if (*size < segment.header.file_bytes) {
        return absl::DataLossError(absl::StrCat(PlaceName(**file, *size), " is cut short: it had ",
                                                segment.header.file_bytes, " bytes"));
      }
      segment.size = *size;
      segment.file = *std::move(file);
      segment.live = {static_cast<uint64_t>(slot), segment.header.epoch, segment.header.first_lsn,
                      kPageBytes};
      out_.end.next_epoch = std::max(out_.end.next_epoch, segment.header.epoch + 1);
      all_.push_back(std::move(segment));
    }
    std::sort(all_.begin(), all_.end(),
              [](const Segment& a, const Segment& b) { return a.live.epoch < b.live.epoch; });
    return absl::OkStatus();
  }

  // Between two gaps: what holds the record at redo_lsn, and what continues it.
  void KeepWhatCounts() {
    size_t begin = 0, end = all_.size();
    for (size_t i = 0; i < all_.size(); ++i) {
      if (all_[i].header.gap == 0) continue;
      if (all_[i].live.first_lsn > range_.redo_lsn) {
        end = i;
        break;
      }
      begin = i;
    }
    // Of these, what ends before keep_lsn is not needed.
    while (begin + 1 < end && all_[begin + 1].live.first_lsn <= range_.keep_lsn) ++begin;
    for (size_t i = 0; i < all_.size(); ++i) {
      if (i >= begin && i < end) {
        segments_.push_back(std::move(all_[i]));
      } else {
        out_.end.free.push_back(all_[i].live.slot);
        if (i >= end) out_.end.discard.push_back(all_[i].live.slot);
      }
    }
    for (const Segment& s : segments_) {
      durable_ = std::max({durable_, s.header.durable_lsn, s.live.first_lsn - 1});
    }
  }

  // The header at `offset`, or why it is none of `segment` with this LSN.
  absl::Status ReadHeader(const Segment& segment, uint64_t offset, uint64_t lsn) {
    const std::string what = PlaceName(*segment.file, offset);
    if (offset + kPageBytes > segment.size) return absl::OutOfRangeError(what + " is at the end");
    absl::StatusOr<size_t> n = segment.file->ReadAt(offset, page_.span());
    if (!n.ok()) return n.status();
    if (*n < kPageBytes) return absl::DataLossError(what + " is cut short");
    const auto* h = page_.as<RecordHeader>();
    if (absl::Status status = CheckRecordHeader(*h, job_, what); !status.ok()) return status;
    if (h->nonce != segment.header.nonce || h->epoch != segment.header.epoch) {
      return absl::DataLossError(what + " is of an earlier use of the file");
    }
    if (h->lsn != lsn) {
      return absl::DataLossError(
          absl::StrCat(what, " is record ", h->lsn, " where ", lsn, " is due"));
    }
    if (offset + kPageBytes + h->padded_bytes() > segment.size) {
      return absl::DataLossError(what + " does not end in its file");
    }
    return absl::OkStatus();
  }

  absl::Status ReadHeaders() {
    next_lsn_ = segments_.empty() ? range_.redo_lsn : segments_[0].live.first_lsn;
    if (next_lsn_ > range_.redo_lsn) {
      return absl::DataLossError(absl::StrCat("the log in ", directory_, " begins with record ",
                                              next_lsn_, " of ", segments_[0].file->path(),
                                              " where record ", range_.redo_lsn, " is needed"));
    }
    for (size_t i = 0; i < segments_.size(); ++i) {
      Segment& segment = segments_[i];
      const bool last = i + 1 == segments_.size();
      const uint64_t end_lsn = last ? ~uint64_t{0} : segments_[i + 1].live.first_lsn;
      if (segment.live.first_lsn > next_lsn_) {
        return Missing(i, absl::StrCat("the segment of record ", next_lsn_, " is missing"));
      }
      uint64_t offset = kPageBytes;
      for (next_lsn_ = segment.live.first_lsn; next_lsn_ < end_lsn; ++next_lsn_) {
        const absl::Status status = ReadHeader(segment, offset, next_lsn_);
        if (!status.ok()) {
          if (!absl::IsDataLoss(status) && !absl::IsOutOfRange(status)) return status;
          if (!last) return Missing(i + 1, std::string(status.message()));
          if (absl::Status s = EndAt(segment, offset, status); !s.ok()) return s;
          break;
        }
        const auto* h = page_.as<RecordHeader>();
        durable_ = std::max(durable_, h->durable_lsn);
        all_places_.push_back(
            {i, offset, h->padded_bytes(), h->piece_bytes, h->lsn, h->fields(), h->payload_bytes});
        offset += kPageBytes + h->padded_bytes();
      }
      segment.live.bytes = offset;
    }
    if (durable_ >= next_lsn_) {
      return absl::DataLossError(absl::StrCat("the log in ", directory_, " ends before record ",
                                              next_lsn_, ", but was durable up to ", durable_,
                                              ": a segment is missing or damaged"));
    }
    return absl::OkStatus();
  }

  absl::Status Missing(size_t next, const std::string& why) const {
    return absl::DataLossError(
        absl::StrCat(why, ", but was durable when ", segments_[next].file->path(), " was begun"));
  }

  // The last segment ends here: nothing more was written, the tail is torn, or it is damage.
  absl::Status EndAt(const Segment& segment, uint64_t offset, const absl::Status& why) {
    if (range_.machine_lived && durable_ < next_lsn_) return absl::OkStatus();
    bool later = false;
    env::AlignedBuffer block(kScanBytes);
    for (uint64_t at = offset; at < segment.size; at += kScanBytes) {
      const uint64_t bytes = std::min(kScanBytes, segment.size - at);
      absl::StatusOr<size_t> n = segment.file->ReadAt(at, {block.data(), bytes});
      if (!n.ok()) return n.status();
      for (uint64_t p = 0; p + kPageBytes <= *n; p += kPageBytes) {
        const auto* h = reinterpret_cast<const RecordHeader*>(block.data() + p);
        if (h->magic != kRecordMagic || h->nonce != segment.header.nonce ||
            h->epoch != segment.header.epoch || h->lsn <= next_lsn_ ||
            !CheckRecordHeader(*h, job_, "").ok()) {
          continue;
        }
        later = true;
        durable_ = std::max(durable_, h->durable_lsn);
      }
    }
    if (durable_ >= next_lsn_) {
      return absl::DataLossError(absl::StrCat(why.message(), ", but record ", next_lsn_,
                                              " was durable (up to ", durable_, ")"));
    }
    if (later) out_.cut = std::string(why.message());
    return absl::OkStatus();
  }

  // Payloads that may be torn.
  absl::Status CheckTail() {
    if (range_.machine_lived) {
      while (!all_places_.empty() && all_places_.back().fields.kind == RecordKind::kGradient &&
             all_places_.back().lsn > durable_) {
        next_lsn_ = all_places_.back().lsn;
        all_places_.pop_back();
      }
    }
    for (size_t r = 0; r < all_places_.size(); ++r) {
      RecordPlace& place = all_places_[r];
      if (place.lsn <= durable_) continue;
      if (range_.machine_lived && place.fields.kind == RecordKind::kGradient) continue;
      env::AlignedBuffer whole(kPageBytes + place.padded_bytes);
      env::File& file = *segments_[place.segment].file;
      absl::StatusOr<size_t> n = file.ReadAt(place.offset, whole.span());
      if (!n.ok()) return n.status();
      const std::string what = PlaceName(file, place.offset);
      const absl::Status status =
          *n < whole.size()
              ? absl::DataLossError(what + " is cut short")
              : CheckPieces(*whole.as<RecordHeader>(), 0, whole.span().subspan(kPageBytes), what);
      if (status.ok()) continue;
      out_.cut = std::string(status.message());
      next_lsn_ = place.lsn;
      all_places_.resize(r);
      break;
    }
    return absl::OkStatus();
  }

  void Finish() {
    out_.end.next_lsn = std::max(next_lsn_, range_.durable_lsn + 1);
    for (Segment& s : segments_) {
      out_.end.live.push_back(s.live);
      out_.files.push_back(std::move(s.file));
    }
    for (RecordPlace& place : all_places_) {
      if (place.lsn >= range_.redo_lsn) out_.records.push_back(place);
    }
  }

  env::FileSystem* files_;
  const std::string directory_;
  const JobIdentity& job_;
  const LogRange range_;
  uint64_t durable_;
  uint64_t next_lsn_ = 1;
  std::vector<Segment> all_;
  std::vector<Segment> segments_;
  std::vector<RecordPlace> all_places_;
  env::AlignedBuffer page_{kPageBytes};
  LogIndex out_;
};

}  // namespace

std::string PlaceName(const env::File& file, uint64_t offset) {
  return absl::StrCat(file.path(), " at ", offset);
}

uint64_t LastStep(const LogIndex& log, uint64_t snapshot_step) {
  uint64_t step = snapshot_step;
  for (const RecordPlace& place : log.records) {
    if (place.fields.kind == RecordKind::kDecision) step = std::max(step, place.fields.step);
  }
  return step;
}

absl::StatusOr<LogIndex> ReadLog(env::FileSystem* files, const std::string& directory,
                                 const JobIdentity& job, const LogRange& range) {
  return Reader(files, directory, job, range).Read();
}

absl::StatusOr<env::AlignedBuffer> ReadRecord(const LogIndex& log, const RecordPlace& place,
                                              const JobIdentity& job) {
  env::AlignedBuffer whole(kPageBytes + place.padded_bytes);
  env::File& file = *log.files[place.segment];
  absl::StatusOr<size_t> n = file.ReadAt(place.offset, whole.span());
  if (!n.ok()) return n.status();
  const std::string what = PlaceName(file, place.offset);
  if (*n < whole.size()) return absl::DataLossError(what + " is cut short");
  const auto* header = whole.as<RecordHeader>();
  if (absl::Status s = CheckRecordHeader(*header, job, what); !s.ok()) return s;
  if (absl::Status s = CheckPieces(*header, 0, whole.span().subspan(kPageBytes), what); !s.ok()) {
    return s;
  }
  return whole;
}

}  // namespace shardd::journal

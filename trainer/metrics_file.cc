#include "trainer/metrics_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace shardd::trainer {
namespace {

using Json = nlohmann::ordered_json;

Json Finite(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

std::string Hex(double value) {
  if (std::isnan(value)) return "nan";
  char text[64];
  std::snprintf(text, sizeof(text), "%a", value);
  return text;
}

}  // namespace

std::string MetricsLine(const StepRecord& record, std::optional<double> tokens_per_second) {
  Json line = {{"step", record.step},
               {"applied", record.result == StepResult::kApplied},
               {"loss", Finite(record.loss)},
               {"loss_hex", Hex(record.loss)},
               {"grad_norm", Finite(record.grad_norm)},
               {"grad_norm_hex", Hex(record.grad_norm)},
               {"loss_scale", record.loss_scale},
               {"lr", record.lr},
               {"tokens", record.tokens},
               {"tokens_per_second", nullptr}};
  if (tokens_per_second.has_value()) line["tokens_per_second"] = Finite(*tokens_per_second);
  if (record.result == StepResult::kSkipped) line["reason"] = record.reason;
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<std::unique_ptr<MetricsFile>> MetricsFile::Open(const std::string& path) {
  std::unique_ptr<MetricsFile> file(new MetricsFile(path));
  file->fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file->fd_ < 0) return absl::ErrnoToStatus(errno, absl::StrCat("metrics: cannot open ", path));
  if (absl::Status s = file->Load(); !s.ok()) return s;
  return file;
}

MetricsFile::~MetricsFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status MetricsFile::Load() {
  std::ifstream in(path_, std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(in)), {});
  size_t begin = 0;
  for (size_t end; (end = content.find('\n', begin)) != std::string::npos; begin = end + 1) {
    if (absl::Status s = AcceptLine(content.substr(begin, end - begin), static_cast<off_t>(begin));
        !s.ok()) {
      return s;
    }
  }
  // What follows the last line feed was being written when its writer died.
  end_ = static_cast<off_t>(begin);
  if (begin != content.size() && ftruncate(fd_, end_) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("metrics: cannot cut ", path_));
  }
  return absl::OkStatus();
}

absl::Status MetricsFile::AcceptLine(const std::string& line, off_t offset) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  const bool valid = json.is_object() && json.contains("step") &&
                     json["step"].is_number_unsigned() && json["step"].get<uint64_t>() > 0;
  const uint64_t step = valid ? json["step"].get<uint64_t>() : 0;
  if (!valid || (!offsets_.empty() && step != last_step() + 1)) {
    return absl::DataLossError(
        absl::StrCat("metrics: ", path_, " holds something else than the metrics of a run (line ",
                     offsets_.size() + 1, "); name another file or remove it"));
  }
  if (offsets_.empty()) first_step_ = step;
  offsets_.push_back(offset);
  return absl::OkStatus();
}

absl::Status MetricsFile::CutFrom(uint64_t next_step) {
  if (last_step() < next_step) return absl::OkStatus();
  const size_t kept = next_step > first_step_ ? next_step - first_step_ : 0;
  end_ = offsets_[kept];
  offsets_.resize(kept);
  if (offsets_.empty()) first_step_ = 1;
  if (ftruncate(fd_, end_) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("metrics: cannot cut ", path_));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> MetricsFile::Complete(std::span<const StepRecord> records) {
  uint64_t lost = 0;
  const StepRecord* previous = nullptr;
  for (const StepRecord& record : records) {
    if (record.step > last_step()) {
      if (record.step > last_step() + 1) {
        lost += record.step - last_step() - 1;
        // Steps before the gap stay; the file goes on behind it only if it is empty.
        if (!offsets_.empty()) {
          return absl::DataLossError(
              absl::StrCat("metrics: ", path_, " ends at step ", last_step(),
                           " and the daemon's records begin "
                           "at step ",
                           record.step, ": the steps between are lost; name another file"));
        }
        first_step_ = record.step;
      }
      std::optional<double> rate;
      if (previous != nullptr && record.unix_nanos > previous->unix_nanos) {
        rate = 1e9 * static_cast<double>(record.tokens) /
               static_cast<double>(record.unix_nanos - previous->unix_nanos);
      }
      if (absl::Status s = Append(record, rate); !s.ok()) return s;
    }
    previous = &record;
  }
  return lost;
}

absl::Status MetricsFile::Append(const StepRecord& record,
                                 std::optional<double> tokens_per_second) {
  if (offsets_.empty()) first_step_ = record.step;
  if (record.step != last_step() + 1) {
    return absl::InternalError(
        absl::StrCat("metrics: step ", record.step, " follows step ", last_step(), " in ", path_));
  }
  const std::string line = MetricsLine(record, tokens_per_second) + "\n";
  const ssize_t written = pwrite(fd_, line.data(), line.size(), end_);
  if (written != static_cast<ssize_t>(line.size())) {
    if (written >= 0) errno = ENOSPC;
    return absl::ErrnoToStatus(errno, absl::StrCat("metrics: cannot write ", path_));
  }
  offsets_.push_back(end_);
  end_ += written;
  return absl::OkStatus();
}

absl::Status MetricsFile::Sync() {
  if (fsync(fd_) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("metrics: cannot fsync ", path_));
}

}  // namespace shardd::trainer

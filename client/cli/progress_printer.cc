#include "client/cli/progress_printer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/output.h"

namespace shardd::cli {

namespace {

constexpr int kCells = 30;

}  // namespace

ProgressPrinter::~ProgressPrinter() {
  if (style_ == ProgressStyle::kBar && width_ > 0) *out_ << "\n" << std::flush;
}

void ProgressPrinter::Show(const std::string& what, uint64_t done, uint64_t total, double seconds) {
  const std::lock_guard lock(mutex_);
  if (style_ == ProgressStyle::kNone) return;
  const double part =
      total == 0 ? 0 : std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  const int tenth = static_cast<int>(part * 10);
  if (style_ == ProgressStyle::kLines) {
    if (what == what_ && tenth == tenth_) return;
    what_ = what;
    tenth_ = tenth;
    *out_ << what;
    if (total > 0) {
      *out_ << ": " << FormatBytes(done) << " of " << FormatBytes(total) << ", "
            << FormatSeconds(seconds);
    }
    *out_ << "\n" << std::flush;
    return;
  }
  std::string line = what;
  if (total > 0) {
    const int full = static_cast<int>(part * kCells);
    absl::StrAppend(&line, " [", std::string(static_cast<size_t>(full), '#'),
                    std::string(static_cast<size_t>(kCells - full), '.'), "] ",
                    absl::StrFormat("%3d%% ", static_cast<int>(part * 100)), FormatBytes(done));
    if (seconds > 0) {
      absl::StrAppend(&line, ", ",
                      FormatBytes(static_cast<uint64_t>(static_cast<double>(done) / seconds)),
                      "/s");
    }
  }
  const size_t width = line.size();
  if (width < width_) line.append(width_ - width, ' ');
  width_ = width;
  *out_ << "\r" << line << std::flush;
}

}  // namespace shardd::cli

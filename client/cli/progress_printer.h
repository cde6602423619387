// Shows how far something is that takes long: a bar on a terminal, else a line now and then.
#ifndef SHARDD_CLIENT_CLI_PROGRESS_PRINTER_H_
#define SHARDD_CLIENT_CLI_PROGRESS_PRINTER_H_

#include <cstdint>
#include <mutex>
#include <ostream>
#include <string>

namespace shardd::cli {

enum class ProgressStyle { kNone, kLines, kBar };

// Thread-safe.
class ProgressPrinter {
 public:
  ProgressPrinter(std::ostream* out, ProgressStyle style) : out_(out), style_(style) {}
  // Ends the bar's line.
  ~ProgressPrinter();

  // `what`: "writing step 100". In style kLines a line is written for each new `what` and each
  // tenth of the way.
  void Show(const std::string& what, uint64_t done, uint64_t total, double seconds);

 private:
  std::ostream* const out_;
  const ProgressStyle style_;
  std::mutex mutex_;
  std::string what_;
  int tenth_ = -1;
  size_t width_ = 0;  // of the bar's line as it stands there
};

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_PROGRESS_PRINTER_H_

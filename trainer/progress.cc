#include "trainer/progress.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace shardd::trainer {
namespace {

constexpr int kBarWidth = 24;
constexpr uint64_t kLinesOfARun = 20;

std::string Bar(uint64_t step, uint64_t steps) {
  const int filled =
      static_cast<int>(std::min(step, steps) * kBarWidth / std::max<uint64_t>(1, steps));
  std::string bar(static_cast<size_t>(filled), '=');
  if (filled < kBarWidth) bar += '>';
  bar.resize(kBarWidth, ' ');
  return absl::StrCat("[", bar, "]");
}

}  // namespace

std::string Duration(double seconds) {
  const int64_t total = static_cast<int64_t>(std::llround(std::max(0.0, seconds)));
  const int64_t hours = total / 3600, minutes = total / 60 % 60, rest = total % 60;
  if (hours > 0) return absl::StrFormat("%d:%02d:%02d", hours, minutes, rest);
  return absl::StrFormat("%d:%02d", minutes, rest);
}

void Progress::Step(const StepRecord& record, double tokens_per_second, double seconds_left) {
  if (!options_.enabled) return;
  const uint64_t every = std::max<uint64_t>(1, options_.steps / kLinesOfARun);
  const bool last = record.step >= options_.steps;
  if (!options_.terminal && record.step % every != 0 && record.step != 1 && !last) return;
  std::string text =
      absl::StrFormat("step %d/%d  loss %.4f  norm %.3f  lr %.2e  %.0f tokens/s", record.step,
                      options_.steps, record.loss, record.grad_norm, record.lr, tokens_per_second);
  if (record.result == StepResult::kSkipped) absl::StrAppend(&text, "  skipped");
  if (seconds_left >= 0) absl::StrAppend(&text, "  ", Duration(seconds_left), " left");
  if (!options_.terminal) {
    std::fprintf(options_.out, "%s\n", text.c_str());
    std::fflush(options_.out);
    return;
  }
  text = absl::StrCat(Bar(record.step, options_.steps), " ", text);
  if (text.size() >= static_cast<size_t>(options_.columns)) text.resize(options_.columns - 1);
  // Back to the first column, the text, and the rest of the line cleared.
  std::fprintf(options_.out, "\r%s\x1b[K", text.c_str());
  bar_ = true;
  if (last) EndBar();
  std::fflush(options_.out);
}

void Progress::Message(const std::string& line) {
  EndBar();
  std::fprintf(options_.out, "%s\n", line.c_str());
  std::fflush(options_.out);
}

void Progress::EndBar() {
  if (bar_) std::fprintf(options_.out, "\n");
  bar_ = false;
}

}  // namespace shardd::trainer

#include "tests/golden/check_file.h"

#include <algorithm>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/safetensors/reader.h"
#include "tests/golden/metadata.h"
#include "tests/golden/model_run.h"
#include "tests/golden/optimizer_run.h"

namespace shardd::golden {
namespace {

using safetensors::Reader;

constexpr DaemonRun kOptimizerRuns[] = {
    {.ranks = 1, .slots = 1, .stage = 0},
    {.ranks = 1, .slots = 4, .stage = 1},
    {.ranks = 3, .slots = 4, .stage = 2},
    {.ranks = 4, .slots = 4, .stage = 1},
    {.ranks = 3, .slots = 4, .stage = 3, .weights = WeightsMode::kPrivate},
};
constexpr DaemonRun kModelRuns[] = {
    {.ranks = 1, .slots = 1, .stage = 1},
    {.ranks = 2, .slots = 2, .stage = 2},
    {.ranks = 2, .slots = 4, .stage = 3, .weights = WeightsMode::kPrivate},
};

class Check {
 public:
  Check(const std::string& socket, const std::string& job_prefix, std::vector<std::string>* jobs,
        FileReport* report)
      : socket_(socket), job_prefix_(job_prefix), jobs_(jobs), report_(report) {}

  absl::Status Optimizer(const Reader& reader) {
    const absl::StatusOr<OptimizerFile> file = ReadOptimizerFile(reader);
    if (!file.ok()) return file.status();
    Line("optimizer %s, %d steps of %d elements", file->optimizer, file->steps, file->elements);
    for (const DaemonRun& run : kOptimizerRuns) {
      const auto result = RunOptimizer(socket_, NewJob(), *file, run);
      if (!result.ok()) return Failed(run, result.status());
      report_->worst = std::max(report_->worst, result->worst);
      Line(
          "%s: worst error %.3g (%.2f of the tolerance 1e-7 + 2e-7*|value|) at step %d, element %d",
          run.Name(), result->worst_difference, result->worst, result->worst_step + 1,
          result->worst_element);
    }
    return absl::OkStatus();
  }

  absl::Status Model(const Reader& reader) {
    const absl::StatusOr<ModelFile> file = ReadModelFile(reader);
    if (!file.ok()) return file.status();
    Line("model %s, %d steps of %d x %d tokens", file->name, file->steps, file->batch,
         file->length);
    for (const DaemonRun& run : kModelRuns) {
      if (run.slots > file->batch) continue;
      const auto result = RunModel(socket_, NewJob(), *file, run);
      if (!result.ok()) return Failed(run, result.status());
      report_->worst = std::max(report_->worst, result->worst());
      Line("%s: worst error %.2f of its tolerance:", run.Name(), result->worst());
      Line("  %s, %s, %s, %s", Say("gradient of step 1", result->gradient),
           Say("loss", result->loss), Say("grad_norm", result->norm),
           file->final_names.empty() ? "no final.*" : Say("final weight", result->final));
    }
    return absl::OkStatus();
  }

 private:
  template <class... Args>
  void Line(const absl::FormatSpec<Args...>& format, const Args&... args) {
    report_->lines.push_back(absl::StrFormat(format, args...));
  }
  static std::string Say(const char* what, const Worst& worst) {
    return absl::StrFormat("%s %.2g (%.2f, %s)", what, worst.difference, worst.tolerances,
                           worst.where);
  }
  std::string NewJob() {
    jobs_->push_back(absl::StrCat(job_prefix_, jobs_->size()));
    return jobs_->back();
  }
  static absl::Status Failed(const DaemonRun& run, const absl::Status& why) {
    return {why.code(), absl::StrCat(run.Name(), ": ", why.message())};
  }

  const std::string& socket_;
  const std::string& job_prefix_;
  std::vector<std::string>* const jobs_;
  FileReport* const report_;
};

}  // namespace

FileReport CheckFile(const std::string& socket, const std::string& path,
                     const std::string& job_prefix, std::vector<std::string>* jobs) {
  FileReport report;
  const auto reader = Reader::Open(path);
  if (!reader.ok()) {
    report.status = reader.status();
    return report;
  }
  const absl::StatusOr<Form> form = FormOf(**reader);
  if (!form.ok()) {
    report.status = form.status();
    return report;
  }
  Check check(socket, job_prefix, jobs, &report);
  report.status = *form == Form::kOptimizer ? check.Optimizer(**reader) : check.Model(**reader);
  if (report.status.ok() && !(report.worst <= 1.0)) {
    report.status =
        absl::OutOfRangeError(absl::StrFormat("worst error %.2f of the tolerance", report.worst));
  }
  return report;
}

std::string FileReport::Text(const std::string& path) const {
  std::string text;
  if (status.ok()) {
    text = absl::StrFormat("PASS %s: worst error %.2f of the tolerance\n", path, worst);
  } else {
    // Most errors name the file already.
    const bool named = absl::StrContains(status.message(), path);
    text = absl::StrCat("FAIL ", named ? "" : path + ": ", status.message(), "\n");
  }
  for (const std::string& line : lines) absl::StrAppend(&text, "  ", line, "\n");
  return text;
}

}  // namespace shardd::golden

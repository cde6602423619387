#include "client/cli/checkpoint_support.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"

namespace shardd::cli {

bool IsDirectory(const std::string& word) { return word.find('/') != std::string::npos; }

std::unique_ptr<ProgressPrinter> MakeProgress(const Context& context) {
  const ProgressStyle style = context.output == OutputFormat::kJson    ? ProgressStyle::kNone
                              : context.environment.stderr_is_terminal ? ProgressStyle::kBar
                                                                       : ProgressStyle::kLines;
  return std::make_unique<ProgressPrinter>(&context.err, style);
}

void PrintResult(const Context& context, const v1::CheckpointProgress& progress,
                 const std::string& text) {
  if (context.output == OutputFormat::kJson) {
    context.out << ToJson(progress).dump() << "\n";
    return;
  }
  for (const std::string& remark : progress.remarks()) context.err << "note: " << remark << "\n";
  context.out << text << "\n";
}

std::string BytesInTime(const v1::CheckpointProgress& progress) {
  std::string text =
      absl::StrCat(FormatBytes(progress.done_bytes()), " in ", FormatSeconds(progress.seconds()));
  if (progress.seconds() > 0) {
    const double rate = static_cast<double>(progress.done_bytes()) / progress.seconds();
    absl::StrAppend(&text, " (", FormatBytes(static_cast<uint64_t>(rate)), "/s)");
  }
  return text;
}

void PrintCheckpoints(const Context& context, const v1::ListCheckpointsReply& reply) {
  if (context.output == OutputFormat::kJson) {
    context.out << ToJson(reply).dump() << "\n";
    return;
  }
  Table table({"STEP", "BYTES", "TAKEN", "MEMBERS", "PATH", "PROBLEM"});
  for (const v1::Checkpoint& c : reply.checkpoints()) {
    const absl::Time taken = absl::FromUnixNanos(c.created_unix_nanos());
    table.AddRow({absl::StrCat(c.step()), FormatBytes(c.bytes()),
                  c.created_unix_nanos() == 0
                      ? "-"
                      : absl::FormatTime("%Y-%m-%d %H:%M:%S", taken, absl::LocalTimeZone()),
                  c.members() == 1 ? "1" : absl::StrCat(c.present_size(), "/", c.members()),
                  c.path(), c.problem().empty() ? "-" : c.problem()});
  }
  context.out << table.Text();
}

}  // namespace shardd::cli

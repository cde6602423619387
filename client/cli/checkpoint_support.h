// What the checkpoint commands share.
#ifndef SHARDD_CLIENT_CLI_CHECKPOINT_SUPPORT_H_
#define SHARDD_CLIENT_CLI_CHECKPOINT_SUPPORT_H_

#include <memory>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/progress_printer.h"

namespace shardd::cli {

// A word that has a '/' names a directory, any other a job.
bool IsDirectory(const std::string& word);

// To stderr: a bar on a terminal, lines elsewhere, nothing with --output=json.
std::unique_ptr<ProgressPrinter> MakeProgress(const Context& context);

// Makes a streaming call and shows its progress; returns its last message.
template <typename Request>
absl::StatusOr<v1::CheckpointProgress> StreamCheckpoint(const Context& context,
                                                        AdminChannel::StreamMethod<Request> method,
                                                        Request request) {
  auto channel = context.Connect();
  if (!channel.ok()) return channel.status();
  const std::unique_ptr<ProgressPrinter> printer = MakeProgress(context);
  v1::CheckpointProgress last;
  absl::Status status =
      (*channel)->Stream(method, std::move(request), [&](const v1::CheckpointProgress& progress) {
        std::string what = progress.stage();
        if (progress.step() > 0) what += " step " + std::to_string(progress.step());
        if (!progress.finished()) {
          printer->Show(what, progress.done_bytes(), progress.total_bytes(), progress.seconds());
        }
        last = progress;
      });
  if (!status.ok()) return status;
  return last;
}

// Remarks to stderr, the message as JSON or `text` to stdout.
void PrintResult(const Context& context, const v1::CheckpointProgress& progress,
                 const std::string& text);

// "123.4 MiB in 2.0s (61.7 MiB/s)".
std::string BytesInTime(const v1::CheckpointProgress& progress);

// A table of what is in a directory, or JSON.
void PrintCheckpoints(const Context& context, const v1::ListCheckpointsReply& reply);

// checkpoint_files.cc: on the files themselves, without a daemon.
// `directory` is a checkpoint or holds some.
absl::StatusOr<v1::ListCheckpointsReply> ListFiles(const std::string& directory);
absl::StatusOr<v1::CheckpointProgress> VerifyFiles(const Context& context,
                                                   const std::string& directory);
absl::StatusOr<v1::CheckpointProgress> ExportFiles(const Context& context,
                                                   const std::string& directory, v1::DType dtype,
                                                   const std::string& prefix,
                                                   const std::string& path);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_CHECKPOINT_SUPPORT_H_

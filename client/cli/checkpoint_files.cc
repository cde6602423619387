// Checkpoints as files: what needs no daemon.
#include <dirent.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/checkpoint_support.h"
#include "client/export_weights.h"
#include "proto/checkpoint/directory.h"

namespace shardd::cli {

namespace {

using checkpoint::Reader;

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& directory) {
  DIR* stream = opendir(directory.c_str());
  if (stream == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat(directory, ": cannot be listed"));
  }
  std::vector<std::string> names;
  while (const dirent* entry = readdir(stream)) names.emplace_back(entry->d_name);
  closedir(stream);
  return names;
}

// One row; what is wrong with it is said there.
v1::Checkpoint Describe(const std::string& path) {
  v1::Checkpoint row;
  row.set_path(path);
  absl::StatusOr<Reader> reader = Reader::Open(path, checkpoint::SystemFiles());
  if (!reader.ok()) {
    row.set_problem(std::string(reader.status().message()));
    return row;
  }
  const checkpoint::Manifest& m = reader->manifest();
  row.set_step(m.step);
  row.set_applied(m.applied);
  row.set_bytes(m.bytes());
  row.set_members(m.members);
  row.add_present(m.member);
  row.set_created_unix_nanos(m.created_unix_nanos);
  return row;
}

size_t Threads() { return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 16); }

// Counts and shows bytes from several threads.
class Meter {
 public:
  Meter(const Context& context, std::string what)
      : printer_(MakeProgress(context)), what_(std::move(what)), begun_(absl::Now()) {}
  void Add(uint64_t bytes, uint64_t total) {
    done_ += bytes;
    printer_->Show(what_, done_, total, seconds());
  }
  uint64_t done() const { return done_; }
  double seconds() const { return absl::ToDoubleSeconds(absl::Now() - begun_); }

 private:
  const std::unique_ptr<ProgressPrinter> printer_;
  const std::string what_;
  const absl::Time begun_;
  std::atomic<uint64_t> done_{0};
};

v1::CheckpointProgress Result(const Reader& reader, const Meter& meter) {
  v1::CheckpointProgress progress;
  progress.set_job(reader.manifest().job());
  progress.set_step(reader.manifest().step);
  progress.set_path(reader.directory());
  progress.set_done_bytes(meter.done());
  progress.set_total_bytes(meter.done());
  progress.set_seconds(meter.seconds());
  progress.set_finished(true);
  return progress;
}

}  // namespace

absl::StatusOr<v1::ListCheckpointsReply> ListFiles(const std::string& directory) {
  absl::StatusOr<std::vector<std::string>> names = NamesIn(directory);
  if (!names.ok()) return names.status();
  v1::ListCheckpointsReply reply;
  reply.set_directory(directory);
  if (std::find(names->begin(), names->end(), checkpoint::kManifestName) != names->end()) {
    *reply.add_checkpoints() = Describe(directory);
    return reply;
  }
  for (const checkpoint::StepDirectory& step : checkpoint::StepsAmong(*names)) {
    v1::Checkpoint row = Describe(absl::StrCat(directory, "/", checkpoint::DirectoryName(step)));
    row.set_step(step.step);
    row.set_members(step.members);
    *reply.add_checkpoints() = std::move(row);
  }
  return reply;
}

absl::StatusOr<v1::CheckpointProgress> VerifyFiles(const Context& context,
                                                   const std::string& directory) {
  absl::StatusOr<Reader> reader = Reader::Open(directory, checkpoint::SystemFiles());
  if (!reader.ok()) return reader.status();
  Meter meter(context, absl::StrCat("verifying step ", reader->manifest().step));
  const uint64_t total = reader->manifest().bytes();
  absl::Status status = reader->Verify(
      [&](uint64_t bytes) {
        meter.Add(bytes, total);
        return absl::OkStatus();
      },
      Threads());
  if (!status.ok()) return status;
  return Result(*reader, meter);
}

absl::StatusOr<v1::CheckpointProgress> ExportFiles(const Context& context,
                                                   const std::string& directory, v1::DType dtype,
                                                   const std::string& prefix,
                                                   const std::string& path) {
  absl::StatusOr<std::vector<Reader>> members = OpenCheckpointSet(directory);
  if (!members.ok()) return members.status();
  const Reader& first = (*members)[0];
  Meter meter(context, absl::StrCat("exporting step ", first.manifest().step));
  absl::Status status =
      ExportWeights(*members, dtype, prefix, path, Threads(),
                    [&](uint64_t bytes, uint64_t total) { meter.Add(bytes, total); });
  if (!status.ok()) return status;
  v1::CheckpointProgress result = Result(first, meter);
  result.set_path(path);
  return result;
}

}  // namespace shardd::cli

// Manager::Restore.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/fill.h"
#include "server/checkpoint/manager_parts.h"
#include "server/control/job_spec.h"

namespace shardd::checkpoint {

namespace {

// All members of a set, which together hold every chunk.
absl::Status CheckSet(const std::vector<Reader>& members, const contract::Layout& layout) {
  const Manifest& first = members[0].manifest();
  std::vector<contract::Range> held;
  for (const Reader& reader : members) {
    const Manifest& m = reader.manifest();
    if (m.timeline != first.timeline || m.job_id != first.job_id) {
      return absl::DataLossError(
          absl::StrCat(reader.directory(), ": is of another run than ", members[0].directory()));
    }
    if (!m.chunks.empty()) held.push_back(m.chunks);
  }
  std::sort(held.begin(), held.end(),
            [](const contract::Range& a, const contract::Range& b) { return a.begin < b.begin; });
  uint64_t next = 0;
  for (const contract::Range& range : held) {
    if (range.begin != next) break;
    next = range.end;
  }
  if (next == layout.num_chunks() && members.size() == first.members) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      members[0].directory(), ": ", members.size(), " of the ", first.members,
      " members of its set lie here, and chunk ", next, " of ", layout.num_chunks(),
      " is missing; bring the other daemons' directories of step ", first.step, " here"));
}

}  // namespace

std::shared_ptr<Operation> Manager::Restore(Caller caller, v1::RestoreCheckpointRequest request,
                                            Report report, Done done) {
  return Begin(request.job(), std::move(report), std::move(done),
               [this, caller, request](const auto& operation, const Done&) {
                 return RunRestore(caller, request, operation.get());
               });
}

absl::Status Manager::RunRestore(Caller caller, const v1::RestoreCheckpointRequest& request,
                                 Operation* operation) {
  if (absl::Status s = control::CheckJobName(request.job()); !s.ok()) return s;
  const std::string& from = request.from_job().empty() ? request.job() : request.from_job();
  absl::StatusOr<std::vector<Reader>> members = OpenStep(caller, from, request.step());
  if (!members.ok()) return members.status();
  const Reader& first = (*members)[0];
  absl::StatusOr<contract::Layout> layout = ManifestLayout(first.manifest(), first.directory());
  if (!layout.ok()) return layout.status();
  if (absl::Status s = CheckSet(*members, *layout); !s.ok()) return s;
  absl::StatusOr<store::JobSpec> spec = SpecOf(first);
  if (!spec.ok()) return spec.status();
  spec->config.set_name(request.job());

  const auto existing = options_.jobs->Find(request.job(), 0, true);
  if (existing.ok()) {
    if (!caller.privileged && (*existing)->uid() != caller.uid) {
      return absl::PermissionDeniedError(
          absl::StrCat("job '", request.job(), "' belongs to another user; choose another name"));
    }
    if (!request.replace()) {
      return absl::AlreadyExistsError(absl::StrCat("job '", request.job(), "' exists at step ",
                                                   (*existing)->Status().committed_step(),
                                                   "; --replace puts the checkpoint in its place"));
    }
  }
  operation->Update([&](v1::CheckpointProgress* p) {
    p->set_step(first.manifest().step);
    p->set_path(first.directory());
    for (const Reader& reader : *members) {
      p->set_total_bytes(p->total_bytes() + DataBytes(reader.manifest()) * (existing.ok() ? 2 : 1));
    }
  });
  if (existing.ok()) {
    // Nothing is given up for a checkpoint that is damaged.
    operation->Update([](v1::CheckpointProgress* p) { p->set_stage("verifying"); });
    for (const Reader& reader : *members) {
      absl::Status status = reader.Verify(
          [operation](uint64_t bytes) { return operation->Advance(bytes); }, options_.threads);
      if (!status.ok()) return status;
    }
    Awaited<v1::DeleteJobReply> deleted;
    options_.jobs->Delete(request.job(), request.force(), deleted.Callback());
    if (absl::Status s = deleted.Wait().status(); !s.ok()) return s;
  }
  operation->Update([](v1::CheckpointProgress* p) { p->set_stage("loading"); });
  absl::Status status =
      options_.jobs->Make(*std::move(spec), *layout, [&](store::JobSegments* segments) {
        for (const Reader& reader : *members) {
          absl::Status filled =
              FillFromCheckpoint(reader, *layout, operation, options_.threads, segments);
          if (!filled.ok()) return filled;
        }
        options_.failpoints->Reach("checkpoint.restore.loaded");
        return absl::OkStatus();
      });
  if (status.ok()) {
    options_.log(absl::StrCat("job ", request.job(), ": restored at step ", first.manifest().step,
                              " from ", first.directory()));
  }
  return status;
}

}  // namespace shardd::checkpoint

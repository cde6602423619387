// Builds a job's state from its journal: the newest snapshot, and all steps since, bit for bit.
#ifndef SHARDD_SERVER_STEP_JOURNAL_REDO_H_
#define SHARDD_SERVER_STEP_JOURNAL_REDO_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/contract/layout.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/env/thread_pool.h"
#include "server/journal/log_reader.h"
#include "server/journal/manifest.h"
#include "server/journal/snapshot_file.h"
#include "server/step/decision_record.h"
#include "server/step/journal_part.h"
#include "server/step/updater.h"
#include "server/store/decision_log.h"
#include "server/store/job_segments.h"

namespace shardd::step {

struct RedoEnvironment {
  env::FileSystem* files = nullptr;
  env::Failpoints* failpoints = nullptr;
  env::ThreadPool* pool = nullptr;
  kernels::Isa isa = kernels::Isa::kScalar;
  std::function<void(const std::string&)> log;
};

// What was done, for messages and figures.
struct RedoReport {
  uint64_t snapshot_step = 0;
  uint64_t committed_step = 0;
  uint64_t redone_steps = 0;
  uint64_t snapshot_bytes = 0;
  uint64_t log_bytes = 0;
  double snapshot_seconds = 0;
  double log_seconds = 0;
  // The step after committed_step, if all of its gradients are there (and in the reduced segment)
  // but no decision; else 0. Its owner had prepared it.
  uint64_t prepared_step = 0;
  std::string cut;  // where a torn tail was cut
};

// A journal that was opened for recovery. One thread.
class JournalRedo {
 public:
  // Opens the journal in `directory`: its manifest, the newest snapshot that is whole at its ends,
  // and the log. The `skip` newest snapshots are not looked at. NotFound: nothing was ever
  // committed in it, and for no other reason. DataLoss names what is damaged or missing.
  // FailedPrecondition: another version wrote it.
  static absl::StatusOr<std::unique_ptr<JournalRedo>> Open(const RedoEnvironment& environment,
                                                           const std::string& directory,
                                                           size_t skip = 0);

  // What the job was made of.
  const store::JobSpec& spec() const { return image_.spec; }
  const contract::Layout& layout() const { return image_.layout; }

  // The step that the journal leads to, as its headers say.
  uint64_t last_step() const { return journal::LastStep(log_, snapshot_.step); }

  // Of a job that spans daemons: what its file PEERS says; then spec() is sparse.
  const std::optional<v1::JobPeers>& peers() const { return peers_; }

  // Fills new segments of spec() and layout(), which nobody else sees yet. After an error they are
  // of no use. With peers, the chunks that are held are made; and those that were on their way here
  // when the daemon ended, if all of them had been stored.
  absl::StatusOr<RedoReport> Fill(store::JobSegments* segments);

  // After a Fill that failed since a chunk of the snapshot is damaged: how many of the newest ones
  // to skip for the one before it. 0: that was not why, or there is none.
  size_t skip_for_older() const { return damaged_chunk_ ? skip_for_older_ : 0; }

  // Where the journal goes on; after Fill.
  journal::LogEnd TakeEnd() { return std::move(log_.end); }
  const journal::Manifest& manifest() const { return manifest_; }

 private:
  struct Step {
    std::vector<const journal::RecordPlace*> gradients;  // by part
    DecisionRecord decision;
  };
  JournalRedo(const RedoEnvironment& environment, std::string directory,
              store::JobDescription image)
      : environment_(environment), directory_(std::move(directory)), image_(std::move(image)) {}

  absl::Status LoadImage(store::JobSegments* segments) const;
  absl::Status LoadChunks(const std::vector<contract::Range>& wanted, store::JobSegments* segments);
  absl::Status LoadIncoming(store::JobSegments* segments);
  const GradientPart* PartOf(const journal::RecordFields& fields) const;
  absl::Status LoadChunk(const journal::ChunkBytes& chunk, uint64_t index, uint64_t number,
                         store::JobSegments* segments) const;
  absl::Status PlanSteps(store::JobSegments* segments, store::DecisionLog* log);
  absl::Status Replay(store::JobSegments* segments, store::DecisionLog* log);
  absl::Status LoadPrepared(store::JobSegments* segments);

  const RedoEnvironment environment_;
  const std::string directory_;
  store::JobDescription image_;
  std::optional<v1::JobPeers> peers_;
  std::vector<contract::Range> chunks_;  // that the journal is of
  std::vector<GradientPart> parts_;
  journal::Manifest manifest_;
  journal::ManifestSnapshot snapshot_{};
  size_t skip_for_older_ = 0;
  bool damaged_chunk_ = false;
  std::unique_ptr<journal::SnapshotReader> reader_;
  journal::LogIndex log_;
  std::vector<Step> steps_;
  std::vector<const journal::RecordPlace*> prepared_;  // by part, of the step after the last
  RedoReport report_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_JOURNAL_REDO_H_

// A job's use of its journal (durability = node, peer): what is handed over when, and what a new
// daemon finds of it.
#ifndef SHARDD_SERVER_STEP_DURABILITY_H_
#define SHARDD_SERVER_STEP_DURABILITY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/contract/layout.h"
#include "proto/control.pb.h"
#include "proto/daemon_config.pb.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/journal/job_journal.h"
#include "server/peer/job_mirror.h"
#include "server/step/chunk_gate.h"
#include "server/step/journal_part.h"
#include "server/store/decision_log.h"
#include "server/store/job_segments.h"

namespace shardd::step {

// Where and how a job keeps its journal.
struct JournalSetup {
  env::FileSystem* files = nullptr;
  env::Failpoints* failpoints = nullptr;
  std::string directory;  // of this job
  v1::DaemonConfig::Journal config;
  std::function<void(const std::string&)> log;
  // durability = peer; `files` are then its.
  std::shared_ptr<peer::JobMirror> mirror;
};

// Who the journal of `segments` belongs to.
journal::JobIdentity IdentityOf(const store::JobSegments& segments);

// The job's thread, but for CopyChunk. What it is made of outlives it.
class Durability final : public journal::ChunkSource {
 public:
  // What of the job it works on.
  struct Parts {
    const contract::Layout* layout = nullptr;
    store::JobSegments* segments = nullptr;
    ChunkGate* gate = nullptr;
    int moments = 2;
    // Of a job that spans daemons: the chunks that lie here, and what its file PEERS says.
    // Otherwise the journal is of all chunks.
    std::optional<std::vector<contract::Range>> chunks;
    std::string peers;
  };

  // For a new job: makes its files. ResourceExhausted: the disk has no room.
  static absl::StatusOr<std::unique_ptr<Durability>> Create(const JournalSetup& setup,
                                                            const Parts& parts);
  // Makes the journal that is to be of a job that spans daemons, beside the one that is there: all
  // of it is durable on return. With `state`, what lies in the segments at `committed_step`.
  static absl::Status MakeNext(const JournalSetup& setup, const Parts& parts,
                               uint64_t committed_step, bool state);
  // Whether that journal was made, of these peers and at that step.
  static bool NextIs(const JournalSetup& setup, const Parts& parts, uint64_t committed_step,
                     bool state);
  // Puts it in the place of the one that is there, which nobody uses any more, and opens it.
  static absl::StatusOr<std::unique_ptr<Durability>> TakeNext(const JournalSetup& setup,
                                                              const Parts& parts,
                                                              uint64_t committed_step);
  // For a job whose state was just recovered from its journal, which goes on at `end`.
  static absl::StatusOr<std::unique_ptr<Durability>> Continue(const JournalSetup& setup,
                                                              const Parts& parts,
                                                              journal::LogEnd end,
                                                              journal::Manifest manifest,
                                                              uint64_t committed_step);
  // For a job whose segments live: compares its journal with the decision that `log` holds. A
  // journal that is missing, damaged or behind is begun anew from the segments. DataLoss: the
  // journal is ahead of them. FailedPrecondition: another version wrote it.
  static absl::StatusOr<std::unique_ptr<Durability>> Adopt(const JournalSetup& setup,
                                                           const Parts& parts,
                                                           const store::DecisionLog& log);
  ~Durability() override;

  // The current decision was recorded by a daemon that died before it was durable: hand all of
  // the step over again. Nobody was told of it, and no chunk carries it.
  bool behind() const { return behind_; }
  void Start();
  void Stop();

  // The bucket's sum lies in the reduced segment.
  void OnBucket(uint64_t bucket, uint64_t step, uint64_t generation);
  // The step's decision is recorded. `durable` may come from any thread, or from this call.
  void Commit(const store::Decision& decision, const contract::StepRecordEntry& record,
              std::span<const contract::ParameterEntry> table, std::function<void()> durable);
  // `durable` is called, as Commit's, when all that was handed over of a step that is not decided
  // is durable.
  void AwaitDurable(std::function<void()> durable);
  // Others' chunks, or the coordinator, are others: durably.
  absl::Status StorePeers(const std::string& peers);
  // A new generation begins; what is not decided is dropped. `quiet` as durable: buckets may be
  // written again from then on.
  void OnNewGeneration(std::function<void()> quiet);
  // Failed jobs stay so.
  void OnFailure();
  // Between two steps; all chunks carry the current decision.
  void AtBoundary(uint64_t committed_step);

  // Fields 30 on. `status` has its committed_step.
  void Report(v1::JobStatus* status) const;
  // What the loss of the machine would cost, for a status that Report has filled in; with its
  // disk, for a job with durability = peer.
  static std::string MachineCost(const v1::JobStatus& status);
  static std::string DiskCost(const v1::JobStatus& status);
  // Why commits wait; empty: they do not.
  std::string Stall() const;

  Copy CopyChunk(uint64_t chunk, std::byte* out) override;
  uint64_t ChunkAt(uint64_t index) const override { return chunks_[index]; }
  // Frozen parameters.
  uint64_t ImageTailBytes() const override;
  void CopyImageTail(std::byte* out) const override;

 private:
  Durability(const JournalSetup& setup, const Parts& parts);
  journal::JournalOptions Options();
  // Hands over what the journal lacks of a decided step's gradient.
  void HandOver(uint64_t step, uint64_t generation);
  // What is left of a journal is of no use.
  absl::Status BeginAnew(const std::string& why);

  const JournalSetup setup_;
  const Parts parts_;
  const journal::JobSizes sizes_;
  const journal::JournalPlan plan_;
  const std::vector<uint64_t> chunks_;  // that the journal is of
  const std::vector<GradientPart> parts_of_gradient_;
  bool behind_ = false;
  std::vector<uint64_t> handed_;  // [buckets]: the step whose sum the journal has; 0: none
  mutable std::atomic<uint64_t> mirrored_step_{0};  // the last that the mirror is known to have
  std::unique_ptr<journal::JobJournal> journal_;
};

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_DURABILITY_H_

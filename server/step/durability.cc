#include "server/step/durability.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/dtype.h"
#include "server/journal/log_reader.h"
#include "server/journal/snapshot_file.h"
#include "server/step/decision_record.h"

namespace shardd::step {

namespace {

// Of the job segment: up to the end of its decisions, which changes with every step.
uint64_t ImageHeadBytes(const store::JobSegments& segments) {
  const contract::JobHeader* header = segments.header();
  return header->decisions_offset + 2 * header->decision_bytes;
}

std::vector<contract::Range> RangesOf(const Durability::Parts& parts) {
  if (parts.chunks.has_value()) return *parts.chunks;
  return {{0, parts.layout->num_chunks()}};
}

std::vector<uint64_t> ChunksOf(const Durability::Parts& parts) {
  std::vector<uint64_t> chunks;
  for (const contract::Range& range : RangesOf(parts)) {
    for (uint64_t c = range.begin; c < range.end; ++c) chunks.push_back(c);
  }
  return chunks;
}

journal::JobSizes SizesOf(const Durability::Parts& parts) {
  const contract::Layout& layout = *parts.layout;
  const uint64_t element = kernels::DTypeSize(parts.segments->reduced_dtype());
  const std::vector<GradientPart> gradient = GradientParts(layout, RangesOf(parts));
  uint64_t elements = 0;
  for (const GradientPart& part : gradient) elements += part.elements.size();
  journal::JobSizes sizes;
  sizes.image_bytes = parts.segments->header()->total_bytes;
  sizes.chunks = ChunksOf(parts).size();
  sizes.chunk_bytes =
      uint64_t{layout.chunk_elements()} * sizeof(float) * static_cast<uint64_t>(parts.moments + 1);
  sizes.chunk_gradient_bytes = layout.chunk_elements() * element;
  sizes.buckets = gradient.size();
  sizes.gradient_bytes = elements * element;
  return sizes;
}

// Zeros in every format are bytes of 0, but for a -0, which is as well kept.
bool MomentsAreZeros(const store::ChunkView& view, uint64_t count) {
  const uint64_t bytes = count * view.format.moment_bytes();
  return std::all_of(view.arrays.moments.begin(), view.arrays.moments.end(), [&](const void* of) {
    const auto* moment = static_cast<const char*>(of);
    return moment == nullptr || std::all_of(moment, moment + bytes, [](char x) { return x == 0; });
  });
}

}  // namespace

journal::JobIdentity IdentityOf(const store::JobSegments& segments) {
  return {segments.header()->name, segments.job_tag(), segments.timeline()};
}

Durability::Durability(const JournalSetup& setup, const Parts& parts)
    : setup_(setup),
      parts_(parts),
      sizes_(SizesOf(parts)),
      plan_(journal::PlanJournal(sizes_, setup.config)),
      chunks_(ChunksOf(parts)),
      parts_of_gradient_(GradientParts(*parts.layout, RangesOf(parts))),
      handed_(parts.layout->num_buckets()) {}

Durability::~Durability() {
  if (journal_ != nullptr) Stop();
}

void Durability::Start() {
  if (setup_.mirror != nullptr) setup_.mirror->Start();
  journal_->Start();
}

void Durability::Stop() {
  journal_->BeginStop();
  if (setup_.mirror != nullptr) setup_.mirror->Stop();
  journal_->Stop();
}

journal::JournalOptions Durability::Options() {
  journal::JournalOptions options;
  options.files = setup_.files;
  options.failpoints = setup_.failpoints;
  options.directory = setup_.directory;
  options.job = IdentityOf(*parts_.segments);
  options.sizes = sizes_;
  options.plan = plan_;
  options.snapshots_kept = setup_.config.snapshots_kept();
  options.snapshot_bytes_per_second = setup_.config.snapshot_bytes_per_second();
  options.degrade = setup_.config.on_failure() == "degrade";
  options.log = setup_.log;
  options.source = this;
  options.peers = parts_.peers;
  return options;
}

absl::Status Durability::MakeNext(const JournalSetup& setup, const Parts& parts,
                                  uint64_t committed_step, bool state) {
  Durability next(setup, parts);
  journal::JournalOptions options = next.Options();
  options.directory = NextJournalPath(setup.directory);
  if (!state) return journal::JobJournal::MakeFiles(options);
  const uint64_t bytes = ImageHeadBytes(*parts.segments);
  env::AlignedBuffer image(bytes);
  std::memcpy(image.data(), parts.segments->job().data(), bytes);
  return journal::JobJournal::MakeFilesWithSnapshot(options, image, bytes, committed_step).status();
}

bool Durability::NextIs(const JournalSetup& setup, const Parts& parts, uint64_t committed_step,
                        bool state) {
  const std::string directory = NextJournalPath(setup.directory);
  const absl::StatusOr<v1::JobPeers> peers = ReadJournalPeers(setup.files, directory);
  if (!peers.ok() || EncodeJournalPeers(*peers) != parts.peers) return false;
  const absl::StatusOr<journal::Manifest> manifest = journal::ReadManifest(setup.files, directory);
  const journal::JobIdentity job = IdentityOf(*parts.segments);
  if (!manifest.ok() || manifest->job.job_tag != job.job_tag ||
      manifest->job.timeline != job.timeline || manifest->snapshots.empty() == state) {
    return false;
  }
  return !state || manifest->snapshots.back().step == committed_step;
}

absl::StatusOr<std::unique_ptr<Durability>> Durability::TakeNext(const JournalSetup& setup,
                                                                 const Parts& parts,
                                                                 uint64_t committed_step) {
  if (absl::Status s = SwitchJournal(setup.files, setup.directory); !s.ok()) return s;
  absl::StatusOr<journal::Manifest> manifest = journal::ReadManifest(setup.files, setup.directory);
  if (!manifest.ok()) return manifest.status();
  std::unique_ptr<Durability> durability(new Durability(setup, parts));
  durability->journal_ = std::make_unique<journal::JobJournal>(
      durability->Options(), journal::LogEnd{}, *std::move(manifest), committed_step);
  return durability;
}

absl::Status Durability::StorePeers(const std::string& peers) {
  return env::ReplaceFile(setup_.files, env::JoinPath(setup_.directory, journal::kPeersName),
                          std::as_bytes(std::span(peers)));
}

void Durability::AwaitDurable(std::function<void()> durable) {
  journal_->AwaitDurable(std::move(durable));
}

absl::StatusOr<std::unique_ptr<Durability>> Durability::Create(const JournalSetup& setup,
                                                               const Parts& parts) {
  std::unique_ptr<Durability> durability(new Durability(setup, parts));
  const journal::JournalOptions options = durability->Options();
  if (absl::Status s = journal::JobJournal::MakeFiles(options); !s.ok()) return s;
  durability->journal_ =
      std::make_unique<journal::JobJournal>(options, journal::LogEnd{}, journal::Manifest{}, 0);
  return durability;
}

absl::StatusOr<std::unique_ptr<Durability>> Durability::Continue(const JournalSetup& setup,
                                                                 const Parts& parts,
                                                                 journal::LogEnd end,
                                                                 journal::Manifest manifest,
                                                                 uint64_t committed_step) {
  std::unique_ptr<Durability> durability(new Durability(setup, parts));
  durability->journal_ = std::make_unique<journal::JobJournal>(
      durability->Options(), std::move(end), std::move(manifest), committed_step);
  if (absl::Status s = durability->journal_->Prepare(); !s.ok()) return s;
  return durability;
}

absl::Status Durability::BeginAnew(const std::string& why) {
  setup_.log(absl::StrCat("job ", parts_.segments->header()->name,
                          ": its journal is begun anew from the living state: ", why));
  const std::string aside = absl::StrCat(env::ParentOf(setup_.directory), "/.",
                                         parts_.segments->header()->name, ".damaged");
  if (absl::Status s = env::RemoveTree(setup_.files, aside); !s.ok()) return s;
  const absl::Status moved = setup_.files->Rename(setup_.directory, aside);
  if (!moved.ok() && !absl::IsNotFound(moved)) return moved;
  const journal::JournalOptions options = Options();
  if (absl::Status s = journal::JobJournal::MakeFiles(options); !s.ok()) return s;
  journal_ =
      std::make_unique<journal::JobJournal>(options, journal::LogEnd{}, journal::Manifest{}, 0);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Durability>> Durability::Adopt(const JournalSetup& setup,
                                                              const Parts& parts,
                                                              const store::DecisionLog& log) {
  std::unique_ptr<Durability> durability(new Durability(setup, parts));
  // The owners were taken, and the journal that goes with them was not put in its place.
  if (parts.chunks.has_value() && NextIs(setup, parts, log.ReadCurrent().header.step, true)) {
    if (absl::Status s = SwitchJournal(setup.files, setup.directory); !s.ok()) return s;
  }
  const auto anew = [&](const std::string& why) -> absl::StatusOr<std::unique_ptr<Durability>> {
    if (absl::Status status = durability->BeginAnew(why); !status.ok()) return status;
    return std::move(durability);
  };
  const journal::JobIdentity job = IdentityOf(*parts.segments);
  absl::StatusOr<journal::Manifest> manifest = journal::ReadManifest(setup.files, setup.directory);
  if (absl::IsFailedPrecondition(manifest.status())) return manifest.status();
  if (!manifest.ok()) return anew(std::string(manifest.status().message()));
  if (manifest->job.job_tag != job.job_tag || manifest->job.timeline != job.timeline) {
    return anew(absl::StrCat(setup.directory, " is of another job or timeline"));
  }
  if (manifest->snapshots.empty()) return anew("it had no complete snapshot");
  if (parts.chunks.has_value()) {
    const absl::StatusOr<v1::JobPeers> peers = ReadJournalPeers(setup.files, setup.directory);
    if (!peers.ok()) return anew(std::string(peers.status().message()));
    if (OwnChunks(*peers) != *parts.chunks) return anew("it is of other chunks");
    if (EncodeJournalPeers(*peers) != parts.peers) {
      if (absl::Status s = durability->StorePeers(parts.peers); !s.ok()) {
        return anew(std::string(s.message()));
      }
    }
  }
  const journal::ManifestSnapshot& newest = manifest->snapshots.back();
  // The loss of the machine would find out too late.
  if (const auto snapshot =
          journal::SnapshotReader::Open(setup.files, setup.directory, job, newest);
      !snapshot.ok()) {
    return anew(std::string(snapshot.status().message()));
  }
  absl::StatusOr<journal::LogIndex> index =
      journal::ReadLog(setup.files, setup.directory, job,
                       {.keep_lsn = manifest->snapshots.front().redo_lsn,
                        .redo_lsn = newest.redo_lsn,
                        .durable_lsn = manifest->durable_lsn,
                        .machine_lived = true});
  if (absl::IsFailedPrecondition(index.status())) return index.status();
  if (!index.ok()) return anew(std::string(index.status().message()));
  const uint64_t committed = log.ReadCurrent().header.step;
  const uint64_t step = journal::LastStep(*index, newest.step);
  if (step > committed) {
    return absl::DataLossError(absl::StrCat("the journal in ", setup.directory, " knows step ",
                                            step, ", and the segments are at ", committed,
                                            "; remove them to recover the job from its journal"));
  }
  // Told though it was not durable, or not there to be written again.
  bool rewritable = parts.segments->board()->committed_step.load() < committed;
  for (const GradientPart& part : durability->parts_of_gradient_) {
    const uint64_t have = parts.segments->reduced_line(part.bucket)->step.load();
    rewritable = rewritable && have == committed;
  }
  if (step + 1 < committed || (step < committed && !rewritable)) {
    return anew(absl::StrCat("it ends at step ", step, ", and the job is at ", committed));
  }
  // What the daemon before wrote may not have reached the disk.
  if (!index->files.empty()) {
    if (absl::Status s = index->files.back()->Sync(); !s.ok()) {
      return anew(std::string(s.message()));
    }
  }
  durability->behind_ = step < committed;
  durability->journal_ = std::make_unique<journal::JobJournal>(
      durability->Options(), std::move(index->end), *std::move(manifest), step);
  if (absl::Status s = durability->journal_->Prepare(); !s.ok()) {
    return anew(std::string(s.message()));
  }
  return durability;
}

void Durability::OnBucket(uint64_t bucket, uint64_t step, uint64_t generation) {
  const contract::Range whole = parts_.layout->bucket_range(bucket);
  const kernels::DType dtype = parts_.segments->reduced_dtype();
  handed_[bucket] = step;
  auto at = std::partition_point(parts_of_gradient_.begin(), parts_of_gradient_.end(),
                                 [&](const GradientPart& part) { return part.bucket < bucket; });
  for (; at != parts_of_gradient_.end() && at->bucket == bucket; ++at) {
    const GradientPart& part = *at;
    journal::RecordFields fields;
    fields.kind = journal::RecordKind::kGradient;
    fields.generation = generation;
    fields.step = step;
    fields.bucket = bucket;
    fields.offset = part.elements.begin - whole.begin;
    fields.dtype = static_cast<uint32_t>(dtype);
    fields.count = part.elements.size();
    journal_->AppendGradient(fields, parts_.segments->reduced(part.elements.begin),
                             part.elements.size() * kernels::DTypeSize(dtype),
                             sizes_.chunk_gradient_bytes);
  }
}

void Durability::HandOver(uint64_t step, uint64_t generation) {
  for (const GradientPart& part : parts_of_gradient_) {
    if (handed_[part.bucket] != step) OnBucket(part.bucket, step, generation);
  }
}

void Durability::Commit(const store::Decision& decision, const contract::StepRecordEntry& record,
                        std::span<const contract::ParameterEntry> table,
                        std::function<void()> durable) {
  behind_ = false;
  // Of a step that was prepared before a crash or a new generation, the log may have lost some.
  if (decision.header.result == v1::STEP_APPLIED) {
    HandOver(decision.header.step, decision.header.generation);
  }
  EncodedRecord encoded = EncodeDecision(decision, record, table);
  journal::RecordFields fields;
  fields.kind = journal::RecordKind::kDecision;
  fields.generation = decision.header.generation;
  fields.step = decision.header.step;
  if (setup_.mirror != nullptr) {
    durable = [this, step = fields.step, told = std::move(durable)] {
      if (setup_.mirror->in_step()) mirrored_step_ = step;
      told();
    };
  }
  journal_->Commit(fields, std::move(encoded.buffer), encoded.bytes, std::move(durable));
}

void Durability::OnNewGeneration(std::function<void()> quiet) {
  EncodedRecord encoded = EncodeState(*parts_.segments->header());
  journal::RecordFields fields;
  fields.kind = journal::RecordKind::kState;
  fields.generation = parts_.segments->header()->generation.load();
  handed_.assign(handed_.size(), 0);
  journal_->Abandon(fields, std::move(encoded.buffer), encoded.bytes, std::move(quiet));
}

void Durability::OnFailure() {
  OnNewGeneration([] {});
}

void Durability::AtBoundary(uint64_t committed_step) {
  if (behind_ || !journal_->WantsImage()) return;
  const uint64_t bytes = ImageHeadBytes(*parts_.segments);
  env::AlignedBuffer image(bytes);
  std::memcpy(image.data(), parts_.segments->job().data(), bytes);
  journal_->BeginSnapshot(std::move(image), bytes, committed_step);
}

uint64_t Durability::ImageTailBytes() const {
  return parts_.segments->header()->total_bytes - ImageHeadBytes(*parts_.segments);
}

void Durability::CopyImageTail(std::byte* out) const {
  std::memcpy(out, parts_.segments->job().data() + ImageHeadBytes(*parts_.segments),
              ImageTailBytes());
}

journal::ChunkSource::Copy Durability::CopyChunk(uint64_t chunk, std::byte* out) {
  Copy copy;
  copy.count = parts_.layout->chunk_range(chunk).size();
  const store::ChunkView view = parts_.segments->chunk(chunk);
  auto* const arrays = reinterpret_cast<float*>(out);
  const ChunkClaim claim(parts_.gate, chunk);
  copy.applied = view.header->applied.load(std::memory_order_acquire);
  view.Read(0, 0, copy.count, arrays);
  // A job may begin with moments; else they are zeros before the first step and left out.
  const bool zeros = copy.applied == 0 && MomentsAreZeros(view, copy.count);
  for (int m = 0; !zeros && m < parts_.moments; ++m) {
    view.Read(copy.arrays, 0, copy.count, arrays + copy.arrays * copy.count);
    ++copy.arrays;
  }
  return copy;
}

void Durability::Report(v1::JobStatus* status) const {
  const journal::JournalStatus journal = journal_->status();
  status->set_durable_step(journal.durable_step);
  status->set_journal_state(std::string(journal::JournalStateName(journal.state)));
  status->set_journal_bytes(journal.disk_bytes);
  status->set_journal_log_bytes(journal.log_bytes);
  status->set_journal_snapshot_step(journal.snapshot_step);
  status->set_journal_failure(journal.error);
  status->set_journal_bytes_written(journal.bytes_written);
  if (setup_.mirror == nullptr) return;
  // After the journal's: a mirror that is in step now has what was durable then.
  const peer::MirrorStatus mirror = setup_.mirror->status();
  if (mirror.state == peer::MirrorState::kInStep && mirrored_step_ < journal.durable_step) {
    mirrored_step_ = journal.durable_step;
  }
  status->set_mirror_peer(mirror.peer);
  status->set_mirror_state(mirror.Text());
  status->set_mirror_step(mirrored_step_);
}

std::string Durability::DiskCost(const v1::JobStatus& status) {
  if (status.mirror_peer().empty()) return "the whole job: it has no mirror";
  const std::string& peer = status.mirror_peer();
  if (status.mirror_state() == "in step") {
    return status.journal_state() == "whole" || status.journal_state() == "stalled"
               ? absl::StrCat("at most one step computed again, from the mirror at peer ", peer)
               : absl::StrCat("what the machine's costs; the mirror at peer ", peer, " is in step");
  }
  if (status.mirror_step() == 0) {
    return absl::StrCat("the whole job, until peer ", peer, " has its mirror (",
                        status.mirror_state(), ")");
  }
  const uint64_t ahead =
      status.committed_step() - std::min(status.mirror_step(), status.committed_step());
  return absl::StrCat("the ", ahead, " steps after step ", status.mirror_step(),
                      ", up to which peer ", peer, " has the mirror (", status.mirror_state(), ")");
}

std::string Durability::MachineCost(const v1::JobStatus& status) {
  const uint64_t durable = status.durable_step();
  const uint64_t ahead = status.committed_step() - std::min(durable, status.committed_step());
  const std::string& state = status.journal_state();
  if (state == "whole") return "at most one step computed again, from the journal";
  if (state == "stalled") {
    return absl::StrCat("nothing after step ", durable, ": the job waits for its journal");
  }
  if (state == "degraded") {
    return absl::StrCat("the ", ahead, " steps after step ", durable, ", since the journal fails");
  }
  return absl::StrCat(
      "the whole job, until its first snapshot is on the disk",
      durable > 0 ? absl::StrCat(" (what is older leads to step ", durable, ")") : "");
}

std::string Durability::Stall() const {
  const journal::JournalStatus journal = journal_->status();
  if (journal.state == journal::JournalState::kStalled) return journal.error;
  if (journal.state == journal::JournalState::kBuilding) return "its first snapshot is written";
  return "";
}

}  // namespace shardd::step

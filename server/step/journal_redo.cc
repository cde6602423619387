#include "server/step/journal_redo.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/dtype.h"
#include "kernels/optimizer.h"
#include "server/journal/read_ahead.h"
#include "server/step/placement.h"

namespace shardd::step {

namespace {

using journal::kPageBytes;
using journal::RecordKind;
using journal::RecordPlace;

// What is read at a time, and how many of these are on their way.
constexpr uint64_t kSliceBytes = 8 << 20;
constexpr size_t kDepth = 3;

// Keeps the first error of several threads.
class FirstError {
 public:
  void Add(absl::Status status) {
    if (status.ok()) return;
    const std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = std::move(status);
  }
  absl::Status Get() {
    const std::lock_guard lock(mutex_);
    return status_;
  }

 private:
  std::mutex mutex_;
  absl::Status status_;
};

// Part of a GRADIENT record: whole pieces, the first slice with the header page before them.
struct Slice {
  const RecordPlace* place;
  bool has_header;
  uint64_t first_piece;
  uint64_t bytes;  // without the header page
};

std::vector<Slice> Cut(const RecordPlace& place) {
  std::vector<Slice> slices;
  const uint64_t at_a_time = std::max<uint64_t>(1, kSliceBytes / place.piece_bytes);
  for (uint64_t at = 0; at < place.padded_bytes || at == 0;) {
    const uint64_t bytes = std::min(at_a_time * place.piece_bytes, place.padded_bytes - at);
    slices.push_back({&place, at == 0, at / place.piece_bytes, bytes});
    at += std::max<uint64_t>(bytes, 1);
  }
  return slices;
}

absl::Status Misfit(const journal::LogIndex& log, const RecordPlace& place,
                    const std::string& why) {
  return absl::DataLossError(absl::StrCat(
      journal::PlaceName(*log.files[place.segment], place.offset), " does not fit: ", why));
}

// What is not there though the journal says that it is, is damage like any other.
absl::Status Damage(const absl::Status& status) {
  if (!absl::IsNotFound(status)) return status;
  return absl::DataLossError(absl::StrCat(status.message(), "; it is missing from the journal"));
}

// The manifest names no snapshot. While the first one is written steps wait for it: the log of
// such a journal knows one step at most, or the manifest is not its own.
absl::Status NothingCommitted(env::FileSystem* files, const std::string& directory,
                              const journal::Manifest& manifest) {
  absl::StatusOr<journal::LogIndex> log =
      journal::ReadLog(files, directory, manifest.job, {.durable_lsn = manifest.durable_lsn});
  if (!log.ok()) return Damage(log.status());
  for (const RecordPlace& place : log->records) {
    if (place.fields.kind != RecordKind::kDecision || place.fields.step < 2) continue;
    return absl::DataLossError(absl::StrCat(
        directory, "/MANIFEST names no snapshot, but ",
        journal::PlaceName(*log->files[place.segment], place.offset), " decides step ",
        place.fields.step, ": the manifest is an older one, or the job ran without its journal"));
  }
  return absl::NotFoundError(absl::StrCat("the journal in ", directory,
                                          " has no complete snapshot: no step was ever committed "
                                          "in it"));
}

std::span<const std::byte> PayloadOf(const env::AlignedBuffer& whole) {
  return whole.span().subspan(kPageBytes, whole.as<journal::RecordHeader>()->payload_bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<JournalRedo>> JournalRedo::Open(const RedoEnvironment& environment,
                                                               const std::string& directory,
                                                               size_t skip) {
  absl::StatusOr<journal::Manifest> manifest = journal::ReadManifest(environment.files, directory);
  if (!manifest.ok()) return Damage(manifest.status());
  absl::StatusOr<v1::JobPeers> peers = ReadJournalPeers(environment.files, directory);
  if (!peers.ok() && !absl::IsNotFound(peers.status())) return peers.status();
  if (manifest->snapshots.empty()) return NothingCommitted(environment.files, directory, *manifest);
  absl::Status damage = absl::DataLossError(absl::StrCat(directory, " has no whole snapshot"));
  const size_t kept = manifest->snapshots.size();
  for (size_t i = kept - std::min(skip, kept); i-- > 0;) {
    const journal::ManifestSnapshot& snapshot = manifest->snapshots[i];
    absl::StatusOr<std::unique_ptr<journal::SnapshotReader>> reader =
        journal::SnapshotReader::Open(environment.files, directory, manifest->job, snapshot);
    const absl::Status opened = Damage(reader.status());
    if (!opened.ok()) {
      if (!absl::IsDataLoss(opened)) return opened;
      environment.log(absl::StrCat("job ", manifest->job.name, ": ", opened.message(),
                                   i > 0 ? "; the snapshot before it is taken" : ""));
      damage = opened;
      continue;
    }
    absl::StatusOr<store::JobDescription> image = store::ReadJobImage(
        {(*reader)->image(), (*reader)->image_bytes()},
        absl::StrCat(directory, "/", journal::SnapshotName(snapshot.slot), ": its image"));
    if (!image.ok()) return image.status();
    absl::StatusOr<journal::LogIndex> log =
        journal::ReadLog(environment.files, directory, manifest->job,
                         {.keep_lsn = manifest->snapshots.front().redo_lsn,
                          .redo_lsn = snapshot.redo_lsn,
                          .durable_lsn = manifest->durable_lsn});
    if (!log.ok()) return Damage(log.status());
    std::unique_ptr<JournalRedo> redo(new JournalRedo(environment, directory, *std::move(image)));
    redo->manifest_ = *std::move(manifest);
    redo->manifest_.snapshots.resize(i + 1);
    redo->snapshot_ = redo->manifest_.snapshots.back();
    redo->skip_for_older_ = i > 0 ? kept - i : 0;
    redo->reader_ = *std::move(reader);
    redo->log_ = *std::move(log);
    redo->chunks_ = {{0, redo->image_.layout.num_chunks()}};
    if (peers.ok()) {
      redo->peers_ = *std::move(peers);
      redo->image_.spec.sparse = true;
      redo->chunks_ = OwnChunks(*redo->peers_);
    }
    for (const contract::Range& range : redo->chunks_) {
      if (range.end > redo->image_.layout.num_chunks()) {
        return absl::DataLossError(absl::StrCat(directory, "/", journal::kPeersName,
                                                " is of chunks that the job does not have"));
      }
    }
    redo->parts_ = GradientParts(redo->image_.layout, redo->chunks_);
    return redo;
  }
  return damage;
}

absl::StatusOr<RedoReport> JournalRedo::Fill(store::JobSegments* segments) {
  report_ = RedoReport();
  report_.snapshot_step = report_.committed_step = snapshot_.step;
  report_.cut = log_.cut;
  if (absl::Status status = LoadImage(segments); !status.ok()) return status;
  const absl::Time begun = absl::Now();
  for (const contract::Range& range : chunks_) {
    if (!peers_.has_value()) break;
    if (absl::Status status = segments->AddChunks(range, true); !status.ok()) return status;
  }
  if (absl::Status status = LoadChunks(chunks_, segments); !status.ok()) {
    damaged_chunk_ = absl::IsDataLoss(status);
    return status;
  }
  const absl::Time loaded = absl::Now();
  store::DecisionLog log(&segments->job());
  absl::Status status = PlanSteps(segments, &log);
  if (status.ok()) status = Replay(segments, &log);
  if (status.ok()) status = LoadPrepared(segments);
  if (status.ok() && peers_.has_value()) status = LoadIncoming(segments);
  if (!status.ok()) return status;
  // Generations of the last moments may have been used and not logged; of those that another
  // daemon gives, it says which is the newest.
  if (!peers_.has_value() || peers_->coordinator() == peers_->daemon()) {
    segments->header()->generation += 1024;
  }
  report_.snapshot_bytes = reader_->bytes();
  report_.snapshot_seconds = absl::ToDoubleSeconds(loaded - begun);
  report_.log_seconds = absl::ToDoubleSeconds(absl::Now() - loaded);
  return report_;
}

// Tables, records and decisions, and what else the image's header has of the past.
absl::Status JournalRedo::LoadImage(store::JobSegments* segments) const {
  const std::byte* image = reader_->image();
  const auto* then = reinterpret_cast<const contract::JobHeader*>(image);
  contract::JobHeader* now = segments->header();
  if (then->table_offset != now->table_offset || then->records_offset != now->records_offset ||
      then->decisions_offset != now->decisions_offset ||
      then->decision_bytes != now->decision_bytes || then->total_bytes != now->total_bytes ||
      reader_->image_bytes() != now->total_bytes) {
    return absl::DataLossError(absl::StrCat(directory_, "/", journal::SnapshotName(snapshot_.slot),
                                            " has an image of another form"));
  }
  std::memcpy(segments->job().data() + now->table_offset, image + now->table_offset,
              reader_->image_bytes() - now->table_offset);
  now->generation = then->generation.load();
  now->recomputed_steps = then->recomputed_steps.load();
  now->regroups = then->regroups.load();
  now->failed = then->failed.load();
  std::memcpy(now->failure, then->failure, sizeof(now->failure));
  now->initialised = 1;
  return absl::OkStatus();
}

absl::Status JournalRedo::LoadChunk(const journal::ChunkBytes& chunk, uint64_t index,
                                    uint64_t number, store::JobSegments* segments) const {
  if (absl::Status status = reader_->Check(chunk, index, number); !status.ok()) return status;
  const journal::RecordHeader& header = *chunk.header;
  const auto all = static_cast<uint32_t>(image_.spec.moments) + 1;
  if (header.count != image_.layout.chunk_range(number).size() ||
      (header.arrays != all && (header.step != 0 || header.arrays != 1))) {
    return absl::DataLossError(absl::StrCat(directory_, "/", journal::SnapshotName(snapshot_.slot),
                                            " at ", chunk.offset, " has chunk ", number,
                                            " with another size than its job's"));
  }
  const store::ChunkView view = segments->chunk(number);
  const auto* values = reinterpret_cast<const float*>(chunk.payload.data());
  for (uint32_t a = 0; a < header.arrays; ++a) {
    view.Write(a, 0, header.count, values + a * header.count);
  }
  view.header->applied.store(header.step, std::memory_order_release);
  environment_.failpoints->Reach("recover.journal.after_chunk");
  return absl::OkStatus();
}

// Those of `wanted` that the journal is of.
absl::Status JournalRedo::LoadChunks(const std::vector<contract::Range>& wanted,
                                     store::JobSegments* segments) {
  std::vector<uint64_t> numbers;
  for (const contract::Range& range : chunks_) {
    for (uint64_t c = range.begin; c < range.end; ++c) numbers.push_back(c);
  }
  if (reader_->chunks() != numbers.size()) {
    return absl::DataLossError(absl::StrCat(directory_, "/", journal::SnapshotName(snapshot_.slot),
                                            " has ", reader_->chunks(), " chunks of ",
                                            numbers.size()));
  }
  const auto is_wanted = [&](uint64_t chunk) {
    return std::any_of(wanted.begin(), wanted.end(), [&](const contract::Range& range) {
      return chunk >= range.begin && chunk < range.end;
    });
  };
  uint64_t next = 0;
  while (true) {
    absl::StatusOr<std::vector<journal::ChunkBytes>> batch = reader_->NextBatch();
    if (!batch.ok()) return batch.status();
    if (batch->empty()) return absl::OkStatus();
    FirstError error;
    environment_.pool->ParallelFor(batch->size(), [&](size_t i) {
      const uint64_t index = next + i, number = numbers[index];
      if (is_wanted(number)) error.Add(LoadChunk((*batch)[i], index, number, segments));
    });
    if (absl::Status status = error.Get(); !status.ok()) return status;
    next += batch->size();
  }
}

// Chunks that had all come when the daemon ended, and that may be its own by now: whoever
// coordinates says so.
absl::Status JournalRedo::LoadIncoming(store::JobSegments* segments) {
  absl::StatusOr<std::unique_ptr<JournalRedo>> next =
      Open(environment_, NextJournalPath(directory_));
  if (!next.ok() || !(*next)->peers_.has_value()) return absl::OkStatus();
  const v1::JobPeers& peers = *(*next)->peers_;
  if (peers.owners_version() != peers_->owners_version() + 1 ||
      (*next)->snapshot_.step != report_.committed_step ||
      (*next)->manifest_.job.job_tag != manifest_.job.job_tag ||
      (*next)->manifest_.job.timeline != manifest_.job.timeline) {
    return absl::OkStatus();
  }
  const std::vector<contract::Range> incoming = Without((*next)->chunks_, chunks_);
  for (const contract::Range& range : incoming) {
    if (absl::Status status = segments->AddChunks(range, true); !status.ok()) return status;
  }
  return (*next)->LoadChunks(incoming, segments);
}

const GradientPart* JournalRedo::PartOf(const journal::RecordFields& fields) const {
  const uint64_t begin = fields.bucket < image_.layout.num_buckets()
                             ? image_.layout.bucket_range(fields.bucket).begin + fields.offset
                             : 0;
  const auto before = [&](const GradientPart& part) {
    return std::pair(part.bucket, part.elements.begin) < std::pair(fields.bucket, begin);
  };
  const auto at = std::partition_point(parts_.begin(), parts_.end(), before);
  if (at == parts_.end() || at->bucket != fields.bucket || at->elements.begin != begin) {
    return nullptr;
  }
  return &*at;
}

// Pairs each decision of the log with the gradients that it was about.
absl::Status JournalRedo::PlanSteps(store::JobSegments* segments, store::DecisionLog* log) {
  const contract::JobHeader* header = segments->header();
  const uint64_t element = kernels::DTypeSize(segments->reduced_dtype());
  uint64_t next = log->ReadCurrent().header.step + 1;
  if (next != snapshot_.step + 1) {
    return absl::DataLossError(absl::StrCat(
        directory_, "/", journal::SnapshotName(snapshot_.slot), " has an image of step ", next - 1,
        ", and MANIFEST says that it is of step ", snapshot_.step));
  }
  prepared_.assign(parts_.size(), nullptr);
  for (const RecordPlace& place : log_.records) {
    const journal::RecordFields& fields = place.fields;
    if (fields.kind == RecordKind::kGradient) {
      if (fields.step != next) continue;
      const GradientPart* part = PartOf(fields);
      if (part == nullptr || fields.count != part->elements.size() ||
          fields.dtype != static_cast<uint32_t>(segments->reduced_dtype()) ||
          place.payload_bytes != fields.count * element ||
          place.piece_bytes % (image_.layout.chunk_elements() * element) != 0) {
        return Misfit(log_, place, "it is not a bucket of this job");
      }
      prepared_[static_cast<size_t>(part - parts_.data())] = &place;
      continue;
    }
    absl::StatusOr<env::AlignedBuffer> whole = journal::ReadRecord(log_, place, manifest_.job);
    if (!whole.ok()) return whole.status();
    if (fields.kind == RecordKind::kState) {
      absl::Status status = ReplayState(PayloadOf(*whole), segments->header());
      if (!status.ok()) return status;
      continue;
    }
    absl::StatusOr<DecisionRecord> decision =
        DecodeDecision(PayloadOf(*whole), header->parameters, header->groups);
    if (!decision.ok()) return Misfit(log_, place, std::string(decision.status().message()));
    if (fields.step != next || decision->decision.header.step != next) {
      return Misfit(log_, place,
                    absl::StrCat("it decides step ", fields.step, " where ", next, " is due"));
    }
    Step step;
    if (decision->decision.header.result == v1::STEP_APPLIED) {
      for (size_t p = 0; p < parts_.size(); ++p) {
        if (prepared_[p] == nullptr || prepared_[p]->fields.generation != fields.generation) {
          return Misfit(log_, place,
                        absl::StrCat("step ", next, " lacks bucket ", parts_[p].bucket));
        }
      }
      step.gradients = prepared_;
    }
    step.decision = *std::move(decision);
    steps_.push_back(std::move(step));
    prepared_.assign(parts_.size(), nullptr);
    ++next;
  }
  return absl::OkStatus();
}

absl::Status JournalRedo::Replay(store::JobSegments* segments, store::DecisionLog* log) {
  std::vector<Slice> slices;
  for (const Step& step : steps_) {
    for (const RecordPlace* place : step.gradients) {
      for (const Slice& slice : Cut(*place)) slices.push_back(slice);
    }
  }
  std::vector<journal::Extent> extents;
  for (const Slice& slice : slices) {
    const uint64_t payload = slice.place->offset + kPageBytes;
    const uint64_t at = payload + slice.first_piece * slice.place->piece_bytes;
    const uint64_t head = slice.has_header ? kPageBytes : 0;
    extents.push_back({log_.files[slice.place->segment].get(), at - head, slice.bytes + head});
    report_.log_bytes += slice.bytes + head;
  }
  journal::ReadAhead ahead(std::move(extents), slices.empty() ? 0 : kDepth);
  Updater updater(&image_.layout, segments, kernels::FindOptimizer(image_.spec.config.optimizer()),
                  environment_.isa, environment_.pool, environment_.failpoints);
  const uint64_t element = kernels::DTypeSize(segments->reduced_dtype());
  const uint64_t chunk_elements = image_.layout.chunk_elements();
  env::AlignedBuffer header_page(kPageBytes);
  const auto* header = header_page.as<journal::RecordHeader>();
  size_t next_slice = 0;
  for (Step& step : steps_) {
    const contract::DecisionHeader decided = step.decision.decision.header;
    ReplayDecision(std::move(step.decision), log);
    const store::Decision decision = log->ReadCurrent();
    UpdateOrder order;
    order.step = decided.step;
    order.applied = decided.applied;
    order.clip_factor = std::bit_cast<float>(decided.clip_factor_bits);
    order.table = log->table(decided.sequence);
    order.presence = decision.presence;
    while (next_slice < slices.size() && slices[next_slice].place->fields.step == decided.step) {
      const Slice& slice = slices[next_slice++];
      absl::StatusOr<std::span<const std::byte>> bytes = ahead.Next();
      if (!bytes.ok()) return bytes.status();
      const std::string what =
          journal::PlaceName(*log_.files[slice.place->segment], slice.place->offset);
      if (slice.has_header) {
        std::memcpy(header_page.data(), bytes->data(), kPageBytes);
        if (absl::Status s = journal::CheckRecordHeader(*header, manifest_.job, what); !s.ok()) {
          return s;
        }
        *bytes = bytes->subspan(kPageBytes);
      }
      const uint64_t piece_bytes = slice.place->piece_bytes;
      const contract::Range part = PartOf(slice.place->fields)->elements;
      order.gradient = bytes->data();
      order.gradient_begin = part.begin + slice.first_piece * piece_bytes / element;
      FirstError error;
      environment_.pool->ParallelFor((slice.bytes + piece_bytes - 1) / piece_bytes, [&](size_t i) {
        const auto piece =
            bytes->subspan(i * piece_bytes, std::min(piece_bytes, slice.bytes - i * piece_bytes));
        absl::Status status = journal::CheckPieces(*header, slice.first_piece + i, piece, what);
        if (!status.ok()) return error.Add(std::move(status));
        const uint64_t begin = order.gradient_begin + i * piece_bytes / element;
        const uint64_t end = std::min(begin + piece_bytes / element, part.end);
        for (uint64_t at = begin; at < end; at += chunk_elements) {
          const uint64_t chunk = at / chunk_elements;
          const uint64_t applied = segments->chunk(chunk).header->applied.load();
          if (applied + 1 < order.applied) {
            return error.Add(absl::DataLossError(
                absl::StrCat("chunk ", chunk, " in ", directory_, " carries ", applied,
                             " steps where the next is ", order.applied)));
          }
          updater.Redo(chunk, order);
        }
      });
      if (absl::Status status = error.Get(); !status.ok()) return status;
    }
    report_.committed_step = decided.step;
    ++report_.redone_steps;
    environment_.failpoints->Reach("recover.journal.after_step");
  }
  const uint64_t due = log->ReadCurrent().header.applied;
  for (const contract::Range& range : chunks_) {
    for (uint64_t c = range.begin; c < range.end; ++c) {
      const uint64_t applied = segments->chunk(c).header->applied.load();
      if (applied == due) continue;
      return absl::DataLossError(absl::StrCat(
          directory_, "/", journal::SnapshotName(snapshot_.slot),
          " and the log after it leave chunk ", c, " at ", applied, " applied steps of ", due));
    }
  }
  return absl::OkStatus();
}

// Gradients that are complete and not decided go where their owner had them.
absl::Status JournalRedo::LoadPrepared(store::JobSegments* segments) {
  for (const RecordPlace* place : prepared_) {
    if (place == nullptr || place->fields.generation != prepared_[0]->fields.generation) {
      return absl::OkStatus();
    }
  }
  if (prepared_.empty()) return absl::OkStatus();
  for (const RecordPlace* place : prepared_) {
    absl::StatusOr<env::AlignedBuffer> whole = journal::ReadRecord(log_, *place, manifest_.job);
    if (!whole.ok()) return whole.status();
    const std::span<const std::byte> payload = PayloadOf(*whole);
    const contract::Range range = PartOf(place->fields)->elements;
    std::memcpy(segments->reduced(range.begin), payload.data(), payload.size());
    segments->reduced_line(place->fields.bucket)
        ->step.store(place->fields.step, std::memory_order_release);
  }
  report_.prepared_step = report_.committed_step + 1;
  return absl::OkStatus();
}

}  // namespace shardd::step

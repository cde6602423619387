#include "server/step/decision_record.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace shardd::step {

namespace {

using contract::DecisionGroup;
using contract::DecisionHeader;
using contract::ParameterEntry;
using contract::StepRecordEntry;

struct RunHeader {
  uint64_t count;
  ParameterEntry entry;
};

struct Preamble {
  uint64_t runs;
  uint64_t parameters;
};

struct StatePayload {
  uint64_t generation;
  uint64_t recomputed_steps;
  uint64_t regroups;
  uint64_t failed;
  char failure[512];
};

class Writer {
 public:
  explicit Writer(uint64_t bytes) : out_{env::AlignedBuffer(bytes), 0} {}
  void Put(const void* data, size_t bytes) {
    if (bytes > 0) std::memcpy(out_.buffer.data() + out_.bytes, data, bytes);
    out_.bytes += bytes;
  }
  EncodedRecord Take() { return std::move(out_); }

 private:
  EncodedRecord out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> data) : data_(data) {}
  bool Get(void* out, size_t bytes) {
    if (bytes > data_.size() - at_) return false;
    if (bytes > 0) std::memcpy(out, data_.data() + at_, bytes);
    at_ += bytes;
    return true;
  }
  uint64_t left() const { return data_.size() - at_; }

 private:
  std::span<const std::byte> data_;
  size_t at_ = 0;
};

std::vector<RunHeader> RunsOf(std::span<const ParameterEntry> table) {
  std::vector<RunHeader> runs;
  for (const ParameterEntry& entry : table) {
    if (!runs.empty() && std::memcmp(&runs.back().entry, &entry, sizeof(entry)) == 0) {
      ++runs.back().count;
    } else {
      RunHeader run;
      std::memset(static_cast<void*>(&run), 0, sizeof(run));
      run.count = 1;
      run.entry = entry;
      runs.push_back(run);
    }
  }
  return runs;
}

absl::Status DoesNotFit() {
  return absl::DataLossError("a decision in the journal does not fit its job");
}

}  // namespace

EncodedRecord EncodeDecision(const store::Decision& decision, const StepRecordEntry& record,
                             std::span<const ParameterEntry> table) {
  const std::vector<RunHeader> runs = RunsOf(table);
  DecisionHeader header = decision.header;
  header.presence_words = decision.presence.size();
  header.groups = decision.groups.size();
  header.blob_bytes = decision.blob.size();
  const Preamble preamble{runs.size(), table.size()};
  Writer out(sizeof(header) + decision.presence.size() * 8 +
             decision.groups.size() * sizeof(DecisionGroup) + decision.blob.size() +
             sizeof(record) + sizeof(preamble) + runs.size() * sizeof(RunHeader));
  out.Put(&header, sizeof(header));
  out.Put(decision.presence.data(), decision.presence.size() * 8);
  out.Put(decision.groups.data(), decision.groups.size() * sizeof(DecisionGroup));
  out.Put(decision.blob.data(), decision.blob.size());
  out.Put(&record, sizeof(record));
  out.Put(&preamble, sizeof(preamble));
  out.Put(runs.data(), runs.size() * sizeof(RunHeader));
  return out.Take();
}

absl::StatusOr<DecisionRecord> DecodeDecision(std::span<const std::byte> payload,
                                              uint64_t parameters, uint64_t groups) {
  Reader in(payload);
  DecisionRecord out;
  DecisionHeader& header = out.decision.header;
  if (!in.Get(&header, sizeof(header)) || header.presence_words != (parameters + 63) / 64 ||
      header.groups != groups || header.blob_bytes > contract::kMaxBlobBytes) {
    return DoesNotFit();
  }
  out.decision.presence.resize(header.presence_words);
  out.decision.groups.resize(header.groups);
  out.decision.blob.resize(header.blob_bytes);
  Preamble preamble{};
  if (!in.Get(out.decision.presence.data(), header.presence_words * 8) ||
      !in.Get(out.decision.groups.data(), groups * sizeof(DecisionGroup)) ||
      !in.Get(out.decision.blob.data(), header.blob_bytes) ||
      !in.Get(&out.record, sizeof(out.record)) || !in.Get(&preamble, sizeof(preamble)) ||
      preamble.parameters != parameters || preamble.runs > parameters ||
      out.record.step != header.step) {
    return DoesNotFit();
  }
  out.table.reserve(parameters);
  for (uint64_t r = 0; r < preamble.runs; ++r) {
    RunHeader run;
    if (!in.Get(&run, sizeof(run)) || run.count > parameters - out.table.size()) {
      return DoesNotFit();
    }
    out.table.insert(out.table.end(), run.count, run.entry);
  }
  if (out.table.size() != parameters) return DoesNotFit();
  return out;
}

void ReplayDecision(DecisionRecord record, store::DecisionLog* log) {
  const std::span<ParameterEntry> table = log->table(record.decision.header.sequence);
  std::copy(record.table.begin(), record.table.end(), table.begin());
  log->PutRecord(record.record);
  log->Write(&record.decision);
}

EncodedRecord EncodeState(const contract::JobHeader& header) {
  StatePayload payload{};
  payload.generation = header.generation.load();
  payload.recomputed_steps = header.recomputed_steps.load();
  payload.regroups = header.regroups.load();
  payload.failed = header.failed.load();
  std::memcpy(payload.failure, header.failure, sizeof(payload.failure));
  Writer out(sizeof(payload));
  out.Put(&payload, sizeof(payload));
  return out.Take();
}

absl::Status ReplayState(std::span<const std::byte> data, contract::JobHeader* header) {
  StatePayload payload;
  if (!Reader(data).Get(&payload, sizeof(payload))) {
    return absl::DataLossError("a state record in the journal is too short");
  }
  header->generation = payload.generation;
  header->recomputed_steps = payload.recomputed_steps;
  header->regroups = payload.regroups;
  header->failed = payload.failed;
  std::memcpy(header->failure, payload.failure, sizeof(payload.failure));
  return absl::OkStatus();
}

}  // namespace shardd::step

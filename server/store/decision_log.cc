#include "server/store/decision_log.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "server/store/crc32c.h"

namespace shardd::store {

namespace {

using contract::DecisionGroup;
using contract::DecisionHeader;
using contract::kStepRecords;
using contract::StepRecordEntry;

// Over the header with crc 0 and all that follows it.
uint32_t SlotCrc(const std::byte* slot, const DecisionHeader& header) {
  DecisionHeader zeroed = header;
  zeroed.crc = 0;
  const uint32_t crc = Crc32c(&zeroed, sizeof(zeroed));
  const size_t rest =
      header.presence_words * 8 + header.groups * sizeof(DecisionGroup) + header.blob_bytes;
  return Crc32c(slot + sizeof(header), rest, crc);
}

}  // namespace

DecisionLog::DecisionLog(const Segment* job) : job_(job) {}

std::byte* DecisionLog::slot(uint64_t sequence) const {
  return job_->data() + header()->decisions_offset + (sequence & 1) * header()->decision_bytes;
}

bool DecisionLog::Valid(const std::byte* slot) const {
  DecisionHeader h;
  std::memcpy(&h, slot, sizeof(h));
  if (h.sequence == 0 || h.timeline != header()->timeline) return false;
  if (h.presence_words != (header()->parameters + 63) / 64 || h.groups != header()->groups ||
      h.blob_bytes > contract::kMaxBlobBytes) {
    return false;
  }
  return SlotCrc(slot, h) == h.crc;
}

Decision DecisionLog::ReadCurrent() const {
  Decision out;
  const std::byte* best = nullptr;
  for (uint64_t i = 0; i < 2; ++i) {
    const std::byte* at = slot(i);
    if (!Valid(at)) continue;
    if (best == nullptr || reinterpret_cast<const DecisionHeader*>(at)->sequence >
                               reinterpret_cast<const DecisionHeader*>(best)->sequence) {
      best = at;
    }
  }
  if (best == nullptr) return out;
  std::memcpy(&out.header, best, sizeof(out.header));
  const std::byte* at = best + sizeof(out.header);
  out.presence.resize(out.header.presence_words);
  std::memcpy(out.presence.data(), at, out.presence.size() * 8);
  at += out.presence.size() * 8;
  out.groups.resize(out.header.groups);
  std::memcpy(out.groups.data(), at, out.groups.size() * sizeof(DecisionGroup));
  at += out.groups.size() * sizeof(DecisionGroup);
  out.blob.assign(reinterpret_cast<const char*>(at), out.header.blob_bytes);
  return out;
}

std::span<contract::ParameterEntry> DecisionLog::table(uint64_t sequence) const {
  const uint64_t count = header()->parameters;
  return {job_->at<contract::ParameterEntry>(header()->table_offset) + (sequence & 1) * count,
          count};
}

void DecisionLog::PutRecord(const StepRecordEntry& record) {
  job_->at<StepRecordEntry>(header()->records_offset)[record.step % kStepRecords] = record;
}

std::vector<StepRecordEntry> DecisionLog::Records(uint64_t first, uint64_t committed) const {
  const auto* records = job_->at<StepRecordEntry>(header()->records_offset);
  const uint64_t oldest = committed >= kStepRecords ? committed - kStepRecords + 1 : 1;
  std::vector<StepRecordEntry> out;
  for (uint64_t step = std::max<uint64_t>(first, oldest); step <= committed; ++step) {
    const StepRecordEntry& record = records[step % kStepRecords];
    // A record that was overwritten for a step that was then never decided is gone.
    if (record.step == step) out.push_back(record);
  }
  return out;
}

void DecisionLog::Write(Decision* decision) {
  DecisionHeader& h = decision->header;
  h.timeline = header()->timeline;
  h.presence_words = decision->presence.size();
  h.groups = decision->groups.size();
  h.blob_bytes = decision->blob.size();
  h.reserved = 0;
  std::byte* at = slot(h.sequence);
  // The slot's old content ends first: a torn slot must not pass for its old self.
  reinterpret_cast<DecisionHeader*>(at)->sequence = 0;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::byte* body = at + sizeof(h);
  std::memcpy(body, decision->presence.data(), decision->presence.size() * 8);
  body += decision->presence.size() * 8;
  std::memcpy(body, decision->groups.data(), decision->groups.size() * sizeof(DecisionGroup));
  body += decision->groups.size() * sizeof(DecisionGroup);
  std::memcpy(body, decision->blob.data(), decision->blob.size());
  std::atomic_signal_fence(std::memory_order_seq_cst);
  h.crc = SlotCrc(at, h);
  DecisionHeader unsequenced = h;
  unsequenced.sequence = 0;
  std::memcpy(at, &unsequenced, sizeof(h));
  std::atomic_ref<uint64_t>(reinterpret_cast<DecisionHeader*>(at)->sequence)
      .store(h.sequence, std::memory_order_release);
}

}  // namespace shardd::store

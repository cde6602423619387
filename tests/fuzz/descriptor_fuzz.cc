// Random bytes as descriptors: the daemon refuses or takes each, and lives.
//
// The input is up to 8 descriptors. A first byte says which fields are put right
// first, so that the checks behind the tag and the generation are reached too.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/fuzz/in_process_daemon.h"
#include "tests/support/raw_session.h"

namespace {

using shardd::contract::Descriptor;

constexpr uint64_t kElements = 5000;

void PutRight(uint8_t which, const Descriptor& good, Descriptor* d) {
  if ((which & 1) != 0) d->job_tag = good.job_tag;
  if ((which & 2) != 0) d->generation = good.generation;
  if ((which & 4) != 0) d->step = good.step;
  if ((which & 8) != 0) d->kind = good.kind;
  if ((which & 16) != 0) d->begin = good.begin, d->count = good.count, d->bucket = good.bucket;
  if ((which & 32) != 0) d->slot_lo = good.slot_lo, d->slot_hi = good.slot_hi;
  if ((which & 64) != 0) d->dtype = good.dtype;
  if ((which & 128) != 0) d->data_offset = good.data_offset;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto& daemon = shardd::test::InProcessDaemon::Get();
  static uint64_t run = 0;
  if (++run % 64 == 0) daemon.CheckBystander();
  if (size < 2) return 0;
  shardd::test::RawSession raw(daemon.socket());
  raw.Start("fuzz", kElements, 0, 1);
  const uint8_t which = data[0];
  // Gradients: the data area too comes from the input.
  std::memcpy(raw.ring_base() + raw.data_offset(), data,
              std::min<uint64_t>(size, raw.ring_bytes() - raw.data_offset()));
  const uint64_t already = raw.ring()->head.load();
  uint64_t published = 0;
  for (size_t at = 1; at < size && published < 8; at += sizeof(Descriptor)) {
    Descriptor d{};
    std::memcpy(static_cast<void*>(&d), data + at, std::min(sizeof(d), size - at));
    PutRight(which, raw.Gradient(), &d);
    raw.Publish(d);
    ++published;
  }
  raw.AwaitReleased(already + published);
  raw.Delete();
  return 0;
}

#include "proto/contract/layout.h"

#include <algorithm>
#include <bit>
#include <unordered_set>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardd::contract {

namespace {

uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Buckets of about a sixteenth of the model overlap well with backward; below a
// chunk they cannot be, above 4 Mi elements a ring of two grows for nothing.
uint64_t ChooseBucket(uint64_t flat, uint32_t chunk) {
  constexpr uint64_t kLargest = 4 * 1024 * 1024;
  return std::clamp<uint64_t>(RoundUp(flat / 16, chunk), chunk,
                              std::max<uint64_t>(kLargest, chunk));
}

absl::StatusOr<uint64_t> CountElements(const ParameterSpec& spec) {
  // A zero first: it makes any other extent harmless.
  const bool zero = std::find(spec.shape.begin(), spec.shape.end(), 0) != spec.shape.end();
  uint64_t count = 1;
  for (int64_t extent : spec.shape) {
    if (extent < 0) {
      return absl::InvalidArgumentError(absl::StrCat("parameter '", spec.name, "' has the extent ",
                                                     extent,
                                                     " in its shape; extents are 0 or more"));
    }
    if (zero) continue;
    if (count > kMaxElements / static_cast<uint64_t>(extent)) {
      return absl::InvalidArgumentError(absl::StrCat("parameter '", spec.name, "' has more than ",
                                                     kMaxElements,
                                                     " elements; split it into several"));
    }
    count *= static_cast<uint64_t>(extent);
  }
  return zero ? 0 : count;
}

// Whether `text` is UTF-8 (no overlong form, no surrogate) without control characters, which
// would reach logs and terminals.
bool IsPrintableUtf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : 4;
    if (length == 4 && lead >> 3 != 30) return false;
    if (text.size() - i < length) return false;
    uint32_t code = length == 1 ? lead : lead & (0x7f >> length);
    for (size_t k = 1; k < length; ++k) {
      const auto next = static_cast<uint8_t>(text[i + k]);
      if (next >> 6 != 2) return false;
      code = code << 6 | (next & 0x3f);
    }
    constexpr uint32_t kLeast[] = {0x20, 0x80, 0x800, 0x10000};
    if (code < kLeast[length - 1] || code > 0x10ffff) return false;
    if ((code >= 0x7f && code < 0xa0) || (code >= 0xd800 && code < 0xe000)) return false;
    i += length;
  }
  return true;
}

absl::Status CheckNames(const std::vector<ParameterSpec>& parameters) {
  std::unordered_set<std::string> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = parameters[i].name;
    if (absl::Status status = CheckParameterName(i, name); !status.ok()) return status;
    if (!seen.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter '", name, "' is registered twice; register a tied parameter once"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckParameterName(size_t index, const std::string& name) {
  if (name.empty() || name.size() > 512) {
    return absl::InvalidArgumentError(absl::StrCat("parameter ", index, " has a name of ",
                                                   name.size(), " bytes; names have 1 to 512"));
  }
  if (!IsPrintableUtf8(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", index, " has the name '", absl::CHexEscape(name),
                     "'; names are UTF-8 without control characters"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Layout> Layout::Create(std::vector<ParameterSpec> parameters,
                                      const Options& options) {
  Layout layout;
  layout.chunk_ = options.chunk_elements == 0 ? kDefaultChunkElements : options.chunk_elements;
  if (!std::has_single_bit(layout.chunk_) || layout.chunk_ < kMinChunkElements ||
      layout.chunk_ > kMaxChunkElements) {
    return absl::InvalidArgumentError(absl::StrCat("chunk_elements is ", layout.chunk_,
                                                   "; it must be a power of two from ",
                                                   kMinChunkElements, " to ", kMaxChunkElements));
  }
  if (parameters.empty() || parameters.size() > kMaxParameters) {
    return absl::InvalidArgumentError(
        absl::StrCat("a job has 1 to ", kMaxParameters, " parameters, not ", parameters.size()));
  }
  if (absl::Status status = CheckNames(parameters); !status.ok()) return status;

  Hasher hasher;
  uint64_t next = 0;
  for (const ParameterSpec& spec : parameters) {
    absl::StatusOr<uint64_t> count = CountElements(spec);
    if (!count.ok()) return count.status();
    if (spec.group >= options.groups) {
      return absl::InvalidArgumentError(absl::StrCat("parameter '", spec.name, "' is in group ",
                                                     spec.group, ", but the job has ",
                                                     options.groups, " parameter groups"));
    }
    layout.offsets_.push_back(next);
    layout.elements_.push_back(*count);
    layout.trainable_ += *count;
    next += RoundUp(*count, kParameterAlignment);
    if (next > kMaxElements) {
      return absl::InvalidArgumentError(absl::StrCat("the job has more than ", kMaxElements,
                                                     " elements at parameter '", spec.name, "'"));
    }
    hasher.Add(spec.name).Add(uint64_t{spec.group}).Add(uint64_t{spec.shape.size()});
    for (int64_t extent : spec.shape) hasher.Add(static_cast<uint64_t>(extent));
  }
  layout.flat_ = next;
  layout.bucket_ =
      options.bucket_elements == 0 ? ChooseBucket(next, layout.chunk_) : options.bucket_elements;
  if (layout.bucket_ % layout.chunk_ != 0 || layout.bucket_ > kMaxElements) {
    return absl::InvalidArgumentError(absl::StrCat("bucket_elements is ", layout.bucket_,
                                                   "; it must be a multiple of chunk_elements, ",
                                                   layout.chunk_));
  }
  layout.hash_ = hasher.Add(uint64_t{layout.chunk_}).Add(layout.bucket_).value();
  layout.parameters_ = std::move(parameters);
  return layout;
}

Range Layout::chunk_range(uint64_t chunk) const {
  const uint64_t begin = chunk * chunk_;
  return {begin, std::min<uint64_t>(begin + chunk_, flat_)};
}

Range Layout::bucket_range(uint64_t bucket) const {
  const uint64_t begin = (num_buckets() - 1 - bucket) * bucket_;
  return {begin, std::min(begin + bucket_, flat_)};
}

uint64_t Layout::max_bucket_elements() const { return std::min(bucket_, flat_); }

Range Layout::shard_chunks(uint32_t rank, uint32_t world_size) const {
  // Quotient and remainder apart, so that chunks * rank cannot overflow.
  const uint64_t chunks = num_chunks();
  const auto bound = [&](uint64_t r) {
    return chunks / world_size * r + chunks % world_size * r / world_size;
  };
  return {bound(rank), bound(uint64_t{rank} + 1)};
}

Range Layout::shard_range(uint32_t rank, uint32_t world_size) const {
  const Range chunks = shard_chunks(rank, world_size);
  return {std::min(chunks.begin * chunk_, flat_), std::min(chunks.end * chunk_, flat_)};
}

std::vector<Run> Layout::runs(Range range) const {
  std::vector<Run> out;
  // The last parameter that starts at or before the range; earlier ones end before it
  // unless they are this one. Parameters without elements share offsets and are skipped.
  auto it = std::upper_bound(offsets_.begin(), offsets_.end(), range.begin);
  size_t i = it == offsets_.begin() ? 0 : static_cast<size_t>(it - offsets_.begin()) - 1;
  while (i > 0 && elements_[i] == 0) --i;
  for (; i < offsets_.size() && offsets_[i] < range.end; ++i) {
    const uint64_t begin = std::max(range.begin, offsets_[i]);
    const uint64_t end = std::min(range.end, offsets_[i] + elements_[i]);
    if (begin < end) out.push_back({static_cast<uint32_t>(i), begin - offsets_[i], {begin, end}});
  }
  return out;
}

Hasher& Hasher::Add(uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) {
    hash_ = (hash_ ^ ((value >> shift) & 0xff)) * 0x100000001b3u;
  }
  return *this;
}

Hasher& Hasher::Add(const std::string& value) {
  Add(static_cast<uint64_t>(value.size()));
  for (unsigned char c : value) hash_ = (hash_ ^ c) * 0x100000001b3u;
  return *this;
}

Hasher& Hasher::Add(double value) { return Add(std::bit_cast<uint64_t>(value)); }

}  // namespace shardd::contract

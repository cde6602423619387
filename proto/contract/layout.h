// The flat space of a job: where each parameter, chunk, shard and bucket lies.
//
// Worker and daemon compute it from the same inputs and compare the hash.
#ifndef SHARDD_PROTO_CONTRACT_LAYOUT_H_
#define SHARDD_PROTO_CONTRACT_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardd::contract {

// Every parameter starts at a multiple of this many elements.
inline constexpr uint64_t kParameterAlignment = 32;
// The unit of norms.
inline constexpr uint64_t kBlockElements = 4096;
inline constexpr uint32_t kDefaultChunkElements = 64 * 1024;
inline constexpr uint32_t kMinChunkElements = 4096;
inline constexpr uint32_t kMaxChunkElements = 1024 * 1024;
inline constexpr size_t kMaxParameters = 1'000'000;
inline constexpr uint64_t kMaxElements = uint64_t{1} << 42;

// A trainable parameter as the user registers it.
struct ParameterSpec {
  std::string name;            // unique, 1..512 bytes
  std::vector<int64_t> shape;  // row-major; empty: a scalar; a 0: no elements
  uint32_t group = 0;
};

// Elements [begin, end) of the flat space.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
  bool operator==(const Range&) const = default;
};

// Part of a parameter inside some range of the flat space.
struct Run {
  uint32_t parameter = 0;
  uint64_t offset = 0;  // within the parameter
  Range range;          // in the flat space
};

// InvalidArgument unless `name` is 1 to 512 bytes of UTF-8 without control characters.
absl::Status CheckParameterName(size_t index, const std::string& name);

// Immutable; thread-safe.
class Layout {
 public:
  struct Options {
    uint32_t chunk_elements = 0;   // a power of two in [4096, 2^20]; 0: 65536
    uint64_t bucket_elements = 0;  // a multiple of chunk_elements; 0: chosen from the size
    uint32_t groups = 1;
  };

  // InvalidArgument names the parameter or field that is wrong.
  static absl::StatusOr<Layout> Create(std::vector<ParameterSpec> parameters,
                                       const Options& options);

  size_t num_parameters() const { return parameters_.size(); }
  const ParameterSpec& parameter(size_t i) const { return parameters_[i]; }
  // Without padding. Empty ranges for parameters without elements.
  Range parameter_range(size_t i) const { return {offsets_[i], offsets_[i] + elements_[i]}; }
  uint64_t parameter_elements(size_t i) const { return elements_[i]; }
  // Sum over parameters, without padding.
  uint64_t trainable_elements() const { return trainable_; }
  // Flat space with padding, a multiple of 32; 0 when nothing has elements.
  uint64_t flat_elements() const { return flat_; }

  uint32_t chunk_elements() const { return chunk_; }
  uint64_t num_chunks() const { return (flat_ + chunk_ - 1) / chunk_; }
  Range chunk_range(uint64_t chunk) const;
  uint64_t num_blocks() const { return (flat_ + kBlockElements - 1) / kBlockElements; }

  // Buckets are numbered in publish order: bucket 0 is the end of the flat space,
  // whose gradients backward finishes first.
  uint64_t bucket_elements() const { return bucket_; }
  uint64_t num_buckets() const { return (flat_ + bucket_ - 1) / bucket_; }
  Range bucket_range(uint64_t bucket) const;
  uint64_t bucket_of(uint64_t element) const { return num_buckets() - 1 - element / bucket_; }
  // Elements of the largest bucket.
  uint64_t max_bucket_elements() const;

  // Chunks of `rank`'s shard: contiguous, over all ranks each exactly once.
  Range shard_chunks(uint32_t rank, uint32_t world_size) const;
  // The same in elements of the flat space.
  Range shard_range(uint32_t rank, uint32_t world_size) const;

  // The parts of parameters inside `range`, ascending; padding is left out.
  std::vector<Run> runs(Range range) const;

  // Over names, shapes, groups, chunk and bucket sizes.
  uint64_t hash() const { return hash_; }

 private:
  Layout() = default;

  std::vector<ParameterSpec> parameters_;
  std::vector<uint64_t> offsets_;   // [num_parameters], ascending
  std::vector<uint64_t> elements_;  // [num_parameters]
  uint64_t trainable_ = 0;
  uint64_t flat_ = 0;
  uint32_t chunk_ = kDefaultChunkElements;
  uint64_t bucket_ = kDefaultChunkElements;
  uint64_t hash_ = 0;
};

// FNV-1a over 64-bit words and strings, for the hashes that both sides compare.
class Hasher {
 public:
  Hasher& Add(uint64_t value);
  Hasher& Add(const std::string& value);
  Hasher& Add(double value);
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_LAYOUT_H_

#include "client/ring_writer.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "absl/time/clock.h"

namespace shardd {
namespace {

using contract::Descriptor;

std::unique_ptr<RingWriter> MakeRing(uint64_t bytes, uint32_t descriptors = 4,
                                     absl::Duration heartbeat = absl::Hours(1)) {
  RingWriter::Options options;
  options.data_bytes = bytes;
  options.descriptors = descriptors;
  options.heartbeat = heartbeat;
  return *RingWriter::Create(options);
}

// The daemon's view of a ring.
class Reader {
 public:
  explicit Reader(const RingWriter& ring)
      : mapping_(*ReadOnlyMapping::Map(contract::UniqueFd(dup(ring.fd())), ring.size(), "ring")) {}

  const contract::RingHeader& header() const {
    return *reinterpret_cast<const contract::RingHeader*>(mapping_.data());
  }
  Descriptor descriptor(uint64_t index) const {
    return reinterpret_cast<const Descriptor*>(
        mapping_.data() + contract::kSegmentPage)[index & (header().queue_entries - 1)];
  }
  const std::byte* data(const Descriptor& descriptor) const {
    return mapping_.data() + header().data_offset + descriptor.data_offset;
  }

 private:
  ReadOnlyMapping mapping_;
};

void PublishOne(RingWriter* ring, uint64_t step) {
  Descriptor descriptor{};
  descriptor.step = step;
  ring->Publish(std::span(&descriptor, 1));
}

TEST(RingWriter, LaysTheSegmentOutAsDocumented) {
  auto ring = MakeRing(100'000, 65);
  Reader reader(*ring);
  EXPECT_EQ(reader.header().magic, contract::kRingMagic);
  EXPECT_EQ(reader.header().version, contract::kFormatVersion);
  EXPECT_EQ(reader.header().queue_entries, 128u);
  EXPECT_EQ(reader.header().data_offset % contract::kSegmentPage, 0u);
  EXPECT_EQ(reader.header().data_bytes % contract::kSegmentPage, 0u);
  EXPECT_GE(reader.header().data_bytes, 100'000u);
  EXPECT_EQ(reader.header().data_offset + reader.header().data_bytes, ring->size());
  EXPECT_EQ(fcntl(ring->fd(), F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_NE(ftruncate(ring->fd(), 4096), 0) << "a sealed ring was cut";
  EXPECT_EQ(MakeRing(1, 1)->size(), 3 * contract::kSegmentPage);
}

TEST(RingWriter, DescriptorsAndDataArriveInOrder) {
  auto ring = MakeRing(8192);
  Reader reader(*ring);
  ASSERT_TRUE(ring->TryReserve(200, 2, 0));
  std::memset(ring->block(), 1, 100);
  std::memset(ring->block() + 128, 2, 72);
  Descriptor two[2] = {};
  two[0].bucket = 5;
  two[1].bucket = 6;
  two[1].data_offset = 128;
  ring->Publish(two);
  EXPECT_EQ(reader.header().head.load(), 2u);
  EXPECT_EQ(reader.descriptor(0).bucket, 5u);
  EXPECT_EQ(reader.descriptor(1).bucket, 6u);
  EXPECT_EQ(reader.data(reader.descriptor(0))[99], std::byte{1});
  EXPECT_EQ(reader.data(reader.descriptor(1))[71], std::byte{2});
  EXPECT_EQ(reader.descriptor(1).data_offset % 64, 0u);
}

TEST(RingWriter, BeginsAnewInTheSameMemory) {
  auto ring = MakeRing(8192);
  Reader reader(*ring);
  Descriptor one[1] = {};
  ASSERT_TRUE(ring->TryReserve(8192, 1, 0));
  std::byte* const block = ring->block();
  ring->Publish(one);
  EXPECT_FALSE(ring->TryReserve(8192, 1, 0)) << "nothing was released";
  ring->Restart();
  EXPECT_EQ(reader.header().head.load(), 0u);
  EXPECT_FALSE(ring->reserved());
  ASSERT_TRUE(ring->TryReserve(8192, 1, 0));
  EXPECT_EQ(ring->block(), block);
  one[0].bucket = 7;
  ring->Publish(one);
  EXPECT_EQ(reader.header().head.load(), 1u);
  EXPECT_EQ(reader.descriptor(0).bucket, 7u);
}

TEST(RingWriter, SpaceComesBackInOrderOfRelease) {
  auto ring = MakeRing(8192);
  ASSERT_TRUE(ring->TryReserve(4096, 1, 0));
  PublishOne(ring.get(), 1);
  ASSERT_TRUE(ring->TryReserve(4096, 1, 0));
  PublishOne(ring.get(), 2);
  EXPECT_FALSE(ring->TryReserve(64, 1, 0)) << "the ring is full";
  EXPECT_FALSE(ring->reserved());
  ASSERT_TRUE(ring->TryReserve(4096, 1, 1));
  const std::byte* first = ring->block();
  PublishOne(ring.get(), 3);
  EXPECT_FALSE(ring->TryReserve(64, 1, 1));
  ASSERT_TRUE(ring->TryReserve(4096, 1, 2));
  EXPECT_EQ(ring->block() - first, 4096);
}

TEST(RingWriter, NothingOutstandingMeansThatAnythingFits) {
  auto ring = MakeRing(12288);
  ASSERT_TRUE(ring->TryReserve(6000, 1, 0));
  PublishOne(ring.get(), 1);
  EXPECT_FALSE(ring->TryReserve(12288, 1, 0));
  ASSERT_TRUE(ring->TryReserve(12288, 1, 1)) << "the free space is in two pieces";
}

TEST(RingWriter, CancelGivesTheBlockBack) {
  auto ring = MakeRing(4096);
  ASSERT_TRUE(ring->TryReserve(4096, 1, 0));
  EXPECT_TRUE(ring->reserved());
  ring->Cancel();
  EXPECT_FALSE(ring->reserved());
  EXPECT_TRUE(ring->TryReserve(4096, 1, 0));
}

TEST(RingWriter, NeverMoreDescriptorsThanTheQueueHolds) {
  auto ring = MakeRing(1 << 20, 1);
  for (uint64_t i = 0; i < 64; ++i) {
    ASSERT_TRUE(ring->TryReserve(64, 1, 0));
    PublishOne(ring.get(), i);
  }
  EXPECT_FALSE(ring->TryReserve(64, 1, 0));
  EXPECT_TRUE(ring->TryReserve(64, 1, 1));
}

// Whatever the sizes and releases: blocks in use never overlap, a block of up to half
// the ring can follow another, and once all are released any block fits.
TEST(RingWriter, RandomTrafficNeverOverlapsAndNeverStarves) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 20; ++round) {
    auto ring = MakeRing(64 * 1024);
    Reader reader(*ring);
    struct Use {
      const std::byte* begin;
      uint64_t bytes;
    };
    std::vector<Use> uses;  // by descriptor
    uint64_t released = 0;
    for (int i = 0; i < 2000; ++i) {
      const uint64_t bytes = 1 + random() % (round % 2 == 0 ? 64 * 1024 : 32 * 1024);
      while (!ring->TryReserve(bytes, 1, released)) {
        ASSERT_LT(released, uses.size()) << bytes << " bytes do not fit an empty ring";
        ++released;
      }
      const Use use{ring->block(), bytes};
      for (uint64_t k = released; k < uses.size(); ++k) {
        ASSERT_TRUE(use.begin >= uses[k].begin + uses[k].bytes ||
                    uses[k].begin >= use.begin + use.bytes);
      }
      PublishOne(ring.get(), i);
      const Descriptor descriptor = reader.descriptor(uses.size());
      ASSERT_LE(descriptor.data_offset + bytes, reader.header().data_bytes);
      uses.push_back(use);
      if (random() % 3 == 0 && released < uses.size()) {
        released += 1 + random() % (uses.size() - released);
      }
    }
  }
}

TEST(RingWriter, TheHeartBeatsWithoutPublications) {
  auto ring = MakeRing(4096, 1, absl::Milliseconds(20));
  Reader reader(*ring);
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  const absl::Time begin = absl::Now();
  while (reader.header().heartbeat.load() < 10 && absl::Now() < deadline) {
  }
  EXPECT_GE(reader.header().heartbeat.load(), 10u);
  // At least four, at most five in a heartbeat.
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(30));
}

}  // namespace
}  // namespace shardd

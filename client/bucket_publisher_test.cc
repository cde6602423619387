#include "client/bucket_publisher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "kernels/isa.h"

namespace shardd {
namespace {

using contract::Descriptor;
using kernels::DType;

contract::Layout MakeLayout() {
  contract::Layout::Options options;
  options.chunk_elements = 4096;
  options.bucket_elements = 4096;
  return *contract::Layout::Create({{"a", {3000}, 0},
                                    {"b", {3000}, 0},
                                    {"empty", {0}, 0},
                                    {"c", {10400}, 0},
                                    {"d", {}, 0},
                                    {"e", {500}, 0},
                                    {"f", {4096}, 0}},
                                   options);
}

// One rank: staging, ring and publisher over the smallest ring, with a reader that
// sees what the daemon sees.
class Rank {
 public:
  using Wait = std::function<absl::Status(absl::FunctionRef<bool()>)>;

  Rank(const contract::Layout& layout, uint32_t slots, contract::SlotRange run, Wait wait,
       bool discard = false)
      : layout_(layout) {
    staging_ =
        *GradStaging::Create(layout, MakeSlotPlan(slots, run), DType::kFloat32, kernels::BestIsa());
    RingWriter::Options ring;
    ring.data_bytes = 2 * BucketPublisher::LargestBlock(layout, *staging_);
    ring.descriptors = 2 * BucketPublisher::DescriptorsPerBucket(*staging_);
    ring.heartbeat = absl::Hours(1);
    ring_ = *RingWriter::Create(ring);
    view_ = *ReadOnlyMapping::Map(contract::UniqueFd(dup(ring_->fd())), ring_->size(), "ring");
    BucketPublisher::Options options;
    options.layout = &layout;
    options.staging = staging_.get();
    options.ring = ring_.get();
    options.grad_dtype = DType::kFloat32;
    options.job_tag = 77;
    options.discard_published = discard;
    options.peer.released = [this] { return released.load(); };
    options.peer.doorbell = [this] { ++doorbells; };
    options.peer.wait = std::move(wait);
    publisher_ = std::make_unique<BucketPublisher>(options);
    publisher_->Begin(3, 9);
  }

  BucketPublisher& publisher() { return *publisher_; }
  GradStaging& staging() { return *staging_; }

  // Acquires, fills with value(parameter, slot) and hands over.
  absl::Status Give(size_t parameter, uint32_t slot) {
    absl::StatusOr<void*> buffer = publisher_->Acquire(parameter, slot);
    if (!buffer.ok()) return buffer.status();
    std::fill_n(static_cast<float*>(*buffer), layout_.parameter_elements(parameter),
                Value(parameter, slot));
    return publisher_->Ready(parameter, slot);
  }
  static float Value(size_t parameter, uint32_t slot) {
    return static_cast<float>(parameter + 1) + 100.0f * static_cast<float>(slot);
  }

  uint64_t head() const { return header().head.load(); }
  Descriptor descriptor(uint64_t index) const {
    return reinterpret_cast<const Descriptor*>(
        view_.data() + contract::kSegmentPage)[index & (header().queue_entries - 1)];
  }
  std::vector<float> Data(const Descriptor& descriptor) const {
    std::vector<float> data(descriptor.count);
    std::memcpy(data.data(), view_.data() + header().data_offset + descriptor.data_offset,
                data.size() * 4);
    return data;
  }
  bool InRing(const void* pointer) const {
    // The writer's mapping is another one: compare by what the reader sees change.
    const auto* word = static_cast<const volatile uint32_t*>(pointer);
    auto* writable = const_cast<volatile uint32_t*>(word);
    *writable = 0x5eed5eed;
    const auto* data = reinterpret_cast<const uint32_t*>(view_.data() + header().data_offset);
    return std::find(data, data + header().data_bytes / 4, 0x5eed5eedu) !=
           data + header().data_bytes / 4;
  }

  std::atomic<uint64_t> released{0};
  int doorbells = 0;

 private:
  const contract::RingHeader& header() const {
    return *reinterpret_cast<const contract::RingHeader*>(view_.data());
  }
  const contract::Layout& layout_;
  std::unique_ptr<GradStaging> staging_;
  std::unique_ptr<RingWriter> ring_;
  ReadOnlyMapping view_;
  std::unique_ptr<BucketPublisher> publisher_;
};

// A daemon that releases everything as soon as somebody waits, having looked at it.
class Consumer {
 public:
  explicit Consumer(const contract::Layout& layout) : flat_(layout.flat_elements(), -1.0f) {}
  Rank::Wait Wait() {
    return [this](absl::FunctionRef<bool()> done) {
      Consume();
      return done() ? absl::OkStatus() : absl::InternalError("no room in an empty ring");
    };
  }
  void Attach(Rank* rank) { rank_ = rank; }
  void Consume() {
    for (; next_ < rank_->head(); ++next_) {
      const Descriptor d = rank_->descriptor(next_);
      order_.push_back(d);
      const std::vector<float> data = rank_->Data(d);
      std::copy(data.begin(), data.end(), flat_.begin() + static_cast<ptrdiff_t>(d.begin));
    }
    rank_->released = next_;
  }
  const std::vector<Descriptor>& order() const { return order_; }
  const std::vector<float>& flat() const { return flat_; }  // of the last node of each bucket

 private:
  Rank* rank_ = nullptr;
  uint64_t next_ = 0;
  std::vector<Descriptor> order_;
  std::vector<float> flat_;
};

// Every element of `flat` is that of its parameter, padding is zero.
void ExpectFlat(const contract::Layout& layout, const std::vector<float>& flat,
                const std::function<float(size_t)>& value) {
  std::vector<float> want(layout.flat_elements(), 0.0f);
  for (size_t p = 0; p < layout.num_parameters(); ++p) {
    const contract::Range range = layout.parameter_range(p);
    std::fill(want.begin() + static_cast<ptrdiff_t>(range.begin),
              want.begin() + static_cast<ptrdiff_t>(range.end), value(p));
  }
  for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(flat[i], want[i]) << "element " << i;
}

TEST(BucketPublisher, AnyOrderOfParametersPublishesBucketsInTheOneOrder) {
  const contract::Layout layout = MakeLayout();
  std::mt19937_64 random(5);
  for (int round = 0; round < 100; ++round) {
    Consumer consumer(layout);
    Rank rank(layout, 1, {0, 1}, consumer.Wait());
    consumer.Attach(&rank);
    std::vector<size_t> order(layout.num_parameters());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (size_t p : order) ASSERT_TRUE(rank.Give(p, 0).ok());
    ASSERT_TRUE(rank.publisher().Finish().ok());
    consumer.Consume();
    ASSERT_EQ(consumer.order().size(), layout.num_buckets());
    for (uint64_t b = 0; b < layout.num_buckets(); ++b) {
      const Descriptor& d = consumer.order()[b];
      ASSERT_EQ(d.bucket, b);
      ASSERT_EQ(d.begin, layout.bucket_range(b).begin);
      ASSERT_EQ(d.count, layout.bucket_range(b).size());
      ASSERT_EQ(d.generation, 3u);
      ASSERT_EQ(d.step, 9u);
      ASSERT_EQ(d.job_tag, 77u);
      ASSERT_EQ(d.slot_hi, 1u);
      ASSERT_EQ(d.dtype, static_cast<uint8_t>(DType::kFloat32));
      ASSERT_EQ(d.kind, static_cast<uint8_t>(contract::DescriptorKind::kGrad));
    }
    ASSERT_EQ(rank.doorbells, static_cast<int>(layout.num_buckets()));
    ExpectFlat(layout, consumer.flat(), [](size_t p) { return Rank::Value(p, 0); });
  }
}

TEST(BucketPublisher, SeveralNodesOfABucketComeBeforeTheNextBucket) {
  const contract::Layout layout = MakeLayout();
  Consumer consumer(layout);
  Rank rank(layout, 10, {5, 10}, consumer.Wait());  // nodes 5, 6..8, 8..10
  consumer.Attach(&rank);
  for (uint32_t slot = 5; slot < 10; ++slot) {
    for (size_t p = layout.num_parameters(); p-- > 0;) {
      ASSERT_TRUE(rank.Give(p, slot).ok());
      ASSERT_TRUE(slot == 9 || rank.head() == 0) << "published before the last slot";
    }
  }
  ASSERT_TRUE(rank.publisher().Finish().ok());
  consumer.Consume();
  ASSERT_EQ(consumer.order().size(), 3 * layout.num_buckets());
  const std::vector<contract::SlotRange> nodes = {{5, 6}, {6, 8}, {8, 10}};
  for (size_t i = 0; i < consumer.order().size(); ++i) {
    const Descriptor& d = consumer.order()[i];
    ASSERT_EQ(d.bucket, i / 3);
    ASSERT_EQ((contract::SlotRange{d.slot_lo, d.slot_hi}), nodes[i % 3]);
  }
  ExpectFlat(layout, consumer.flat(),
             [](size_t p) { return Rank::Value(p, 8) + Rank::Value(p, 9); });
}

TEST(BucketPublisher, WhatIsNotGivenIsZeroAlsoInPartlyFilledBuckets) {
  const contract::Layout layout = MakeLayout();
  Consumer consumer(layout);
  Rank rank(layout, 2, {0, 2}, consumer.Wait());
  consumer.Attach(&rank);
  // Dirty memory first, so that zeros have to be written.
  for (uint32_t slot : {0u, 1u}) {
    for (size_t p = 0; p < layout.num_parameters(); ++p) ASSERT_TRUE(rank.Give(p, slot).ok());
  }
  ASSERT_TRUE(rank.publisher().Finish().ok());
  consumer.Consume();
  rank.publisher().Begin(3, 10);
  // 0: in both slots. 1: never. 3: in slot 0. 5: in slot 1. The others: never.
  ASSERT_TRUE(rank.Give(0, 0).ok());
  ASSERT_TRUE(rank.Give(3, 0).ok());
  ASSERT_TRUE(rank.Give(0, 1).ok());
  ASSERT_TRUE(rank.Give(5, 1).ok());
  EXPECT_TRUE(rank.publisher().given(3));
  EXPECT_FALSE(rank.publisher().given(1));
  ASSERT_TRUE(rank.publisher().Finish().ok());
  consumer.Consume();
  ASSERT_EQ(consumer.order().size(), 2 * layout.num_buckets());
  ExpectFlat(layout, consumer.flat(), [](size_t p) {
    return p == 0   ? Rank::Value(0, 0) + Rank::Value(0, 1)
           : p == 3 ? Rank::Value(3, 0)
           : p == 5 ? Rank::Value(5, 1)
                    : 0.0f;
  });
}

TEST(BucketPublisher, AParameterOfTheBucketWhoseTurnItIsLiesInTheRing) {
  const contract::Layout layout = MakeLayout();
  Consumer consumer(layout);
  Rank rank(layout, 1, {0, 1}, consumer.Wait());
  consumer.Attach(&rank);
  ASSERT_EQ(layout.bucket_of(layout.parameter_range(5).begin), 1u);
  EXPECT_FALSE(rank.InRing(*rank.publisher().Acquire(5, 0))) << "it is not bucket 1's turn";
  EXPECT_FALSE(rank.InRing(*rank.publisher().Acquire(6, 0))) << "it is in two buckets";
  ASSERT_TRUE(rank.Give(6, 0).ok());
  ASSERT_TRUE(rank.head() == 1);
  absl::StatusOr<void*> direct = rank.publisher().Acquire(4, 0);
  ASSERT_TRUE(direct.ok());
  EXPECT_TRUE(rank.InRing(*direct));
  EXPECT_EQ(*direct, *rank.publisher().Acquire(4, 0)) << "acquired again it stays where it is";
  // Given up and never ready: its space in the ring counts as zeros.
  for (size_t p : {0, 1, 2, 3, 5}) ASSERT_TRUE(rank.Give(p, 0).ok());
  ASSERT_TRUE(rank.publisher().Finish().ok());
  consumer.Consume();
  ExpectFlat(layout, consumer.flat(), [](size_t p) { return p == 4 ? 0.0f : Rank::Value(p, 0); });
}

TEST(BucketPublisher, MisuseIsNamed) {
  const contract::Layout layout = MakeLayout();
  Consumer consumer(layout);
  Rank rank(layout, 4, {0, 4}, consumer.Wait());
  consumer.Attach(&rank);
  EXPECT_EQ(rank.publisher().Ready(0, 0).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(rank.Give(0, 1).ok());
  EXPECT_EQ(rank.publisher().Ready(0, 1).code(), absl::StatusCode::kFailedPrecondition) << "twice";
  const absl::Status again = rank.publisher().Acquire(0, 1).status();
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(again.message()).find("'a' in slot 1"), std::string::npos) << again;
  EXPECT_EQ(rank.publisher().Acquire(0, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(rank.publisher().Acquire(0, 2).ok());
  EXPECT_EQ(rank.publisher().Ready(0, 3).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(BucketPublisher, AnErrorOfTheWaitIsReturnedAndPublishingGoesOnLater) {
  const contract::Layout layout = MakeLayout();
  Consumer consumer(layout);
  bool gone = true;
  Rank rank(layout, 1, {0, 1}, [&](absl::FunctionRef<bool()> done) {
    return gone ? absl::UnavailableError("gone") : consumer.Wait()(done);
  });
  consumer.Attach(&rank);
  absl::Status status;
  for (size_t p = layout.num_parameters(); p-- > 0;) status.Update(rank.Give(p, 0));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(rank.publisher().Finish().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(rank.head(), 2u) << "the ring takes two buckets";
  gone = false;
  ASSERT_TRUE(rank.publisher().Finish().ok());
  consumer.Consume();
  ASSERT_EQ(consumer.order().size(), layout.num_buckets());
  ExpectFlat(layout, consumer.flat(), [](size_t p) { return Rank::Value(p, 0); });
}

TEST(BucketPublisher, ANewGenerationBeginsWithNothing) {
  const contract::Layout layout = MakeLayout();
  Consumer consumer(layout);
  Rank rank(layout, 1, {0, 1}, consumer.Wait());
  consumer.Attach(&rank);
  ASSERT_TRUE(rank.Give(6, 0).ok());
  ASSERT_TRUE(rank.publisher().Acquire(5, 0).ok());  // opens a block
  rank.publisher().Begin(4, 9);
  EXPECT_FALSE(rank.publisher().given(6));
  for (size_t p = 0; p < layout.num_parameters(); ++p) ASSERT_TRUE(rank.Give(p, 0).ok());
  ASSERT_TRUE(rank.publisher().Finish().ok());
  consumer.Consume();
  ASSERT_EQ(consumer.order().size(), layout.num_buckets() + 1);
  for (size_t i = 1; i < consumer.order().size(); ++i) {
    EXPECT_EQ(consumer.order()[i].generation, 4u);
    EXPECT_EQ(consumer.order()[i].bucket, i - 1);
  }
}

// Ranks that finish their parameters in different orders, each over the smallest ring,
// against a reducer that releases a bucket only when every rank has published it.
TEST(BucketPublisher, NoOrderOfRanksDeadlocksTheSmallestRings) {
  const contract::Layout layout = MakeLayout();
  constexpr uint32_t kRanks = 3;
  constexpr uint32_t kSlots = 10;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::unique_ptr<Rank>> ranks;
    const auto reduce = [&] {  // under the mutex
      uint64_t common = layout.num_buckets();
      for (const auto& rank : ranks) {
        common = std::min(common, rank->head() / rank->staging().plan().nodes.size());
      }
      for (const auto& rank : ranks) {
        rank->released = common * rank->staging().plan().nodes.size();
      }
      changed.notify_all();
    };
    for (uint32_t r = 0; r < kRanks; ++r) {
      ranks.push_back(std::make_unique<Rank>(
          layout, kSlots, contract::SlotsOfRank(kSlots, kRanks, r),
          [&](absl::FunctionRef<bool()> done) -> absl::Status {
            std::unique_lock<std::mutex> lock(mutex);
            reduce();
            const bool ok =
                changed.wait_for(lock, std::chrono::seconds(20), [&] { return done(); });
            return ok ? absl::OkStatus() : absl::DeadlineExceededError("deadlock");
          }));
    }
    std::vector<std::thread> threads;
    std::vector<absl::Status> results(kRanks);
    for (uint32_t r = 0; r < kRanks; ++r) {
      threads.emplace_back([&, r] {
        std::mt19937_64 random(seed * 100 + r);
        const contract::SlotRange run = ranks[r]->staging().plan().run;
        std::vector<size_t> order(layout.num_parameters());
        std::iota(order.begin(), order.end(), 0);
        for (uint32_t slot = run.lo; slot < run.hi; ++slot) {
          std::shuffle(order.begin(), order.end(), random);
          for (size_t p : order) results[r].Update(ranks[r]->Give(p, slot));
        }
        results[r].Update(ranks[r]->publisher().Finish());
        std::lock_guard<std::mutex> lock(mutex);
        reduce();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (uint32_t r = 0; r < kRanks; ++r) {
      ASSERT_TRUE(results[r].ok()) << results[r] << " at rank " << r << ", seed " << seed;
      ASSERT_EQ(ranks[r]->head(), layout.num_buckets() * ranks[r]->staging().plan().nodes.size());
    }
  }
}

TEST(BucketPublisher, StagesTwoAndThreeGiveStagingBackBucketByBucket) {
  const contract::Layout layout = MakeLayout();
  for (bool discard : {false, true}) {
    Consumer consumer(layout);
    Rank rank(layout, 1, {0, 1}, consumer.Wait(), discard);
    consumer.Attach(&rank);
    for (size_t p = 0; p < layout.num_parameters(); ++p) ASSERT_TRUE(rank.Give(p, 0).ok());
    ASSERT_TRUE(rank.publisher().Finish().ok());
    std::vector<float> staged(layout.flat_elements());
    rank.staging().Fill(0, {0, layout.flat_elements()},
                        reinterpret_cast<std::byte*>(staged.data()));
    const bool empty = std::all_of(staged.begin(), staged.end(), [](float x) { return x == 0; });
    EXPECT_EQ(empty, discard);
  }
}

}  // namespace
}  // namespace shardd

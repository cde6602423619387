// What every optimizer must do. Each one in the registry is tested on each
// instruction set of this machine: a new optimizer needs no line here.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cast.h"
#include "kernels/hostile_values.h"
#include "kernels/optimizer.h"

namespace shardd::kernels {
namespace {

constexpr float kGuard = 12345.0f;

// One chunk's worth of memory, with guard elements after each array. `offset`
// elements in front put the arrays off their alignment.
class Chunk {
 public:
  Chunk(size_t count, DType grad_dtype, DType weight_dtype, uint32_t seed, size_t offset = 0)
      : count_(count), offset_(offset), grad_dtype_(grad_dtype), weight_dtype_(weight_dtype) {
    std::vector<float>* const arrays[] = {&master_, &state_[0], &state_[1], &state_[2]};
    for (uint32_t k = 0; k < 4; ++k) {
      *arrays[k] = HostileFloats(offset + count, seed * 5 + k);
      arrays[k]->resize(offset + count + 16, kGuard);
    }
    grad_ = HostileArray(grad_dtype, offset + count, seed * 5 + 4);
    weight_.assign((offset + count + 16) * DTypeSize(weight_dtype), 0xA5);
  }

  // Elements first .. first + count - 1 as a run, states as the optimizer has.
  UpdateRun Run(const Optimizer& optimizer, const StepScalars& scalars, size_t first,
                size_t count) {
    const size_t at = offset_ + first;
    UpdateRun run;
    run.master = &master_[at];
    for (int s = 0; s < optimizer.num_states(); ++s) run.state[s] = &state_[s][at];
    run.grad = grad_.data() + at * DTypeSize(grad_dtype_);
    run.weight = weight_.data() + at * DTypeSize(weight_dtype_);
    run.count = count;
    run.grad_dtype = grad_dtype_;
    run.weight_dtype = weight_dtype_;
    run.grad_factor = 0.37f;
    run.scalars = &scalars;
    run.position = static_cast<uint32_t>(first);
    return run;
  }
  UpdateRun Run(const Optimizer& optimizer, const StepScalars& scalars) {
    return Run(optimizer, scalars, 0, count_);
  }

  float* master() { return &master_[offset_]; }
  float* state(int s) { return &state_[s][offset_]; }
  const uint8_t* weight() const { return weight_.data() + offset_ * DTypeSize(weight_dtype_); }

  // The first array in which bits differ, or "".
  std::string Difference(const Chunk& other) const {
    if (!SameBits(master_, other.master_)) return "master";
    for (int s = 0; s < kMaxStates; ++s) {
      if (!SameBits(state_[s], other.state_[s])) return "state " + std::to_string(s);
    }
    // Lengths are equal; offsets may not be when only alignment differs.
    return weight_ == other.weight_ ? "" : "weight";
  }

 private:
  static bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
  }

  size_t count_, offset_;
  DType grad_dtype_, weight_dtype_;
  std::vector<float> master_, state_[kMaxStates];
  std::vector<uint8_t> grad_, weight_;
};

class OptimizerConformance : public testing::TestWithParam<std::tuple<std::string_view, Isa>> {
 protected:
  OptimizerConformance()
      : optimizer_(*FindOptimizer(std::get<0>(GetParam()))), isa_(std::get<1>(GetParam())) {
    Hyperparameters hyper;
    hyper.weight_decay = 0.1;
    hyper.momentum = 0.9;
    hyper.nesterov = true;
    StepProgress products;
    for (int step = 0; step < 3; ++step) scalars_ = optimizer_.Step(hyper, &products);
    ResetUndo(&log_, kTimeline);
  }

  // Updates a chunk on `isa` and, undone and unflushed by hardware, on the scalar
  // reference; returns what differs.
  std::string CompareWithScalar(size_t count, DType grad, DType weight, bool undo, size_t offset) {
    Chunk expected(count, grad, weight, static_cast<uint32_t>(count), offset);
    Chunk actual = expected;
    optimizer_.Update(Isa::kScalar, expected.Run(optimizer_, scalars_));
    ScopedFlushToZero flush;
    UpdateRun run = actual.Run(optimizer_, scalars_);
    if (undo) {
      run.undo = &log_;
      run.undo_epoch = ++epoch_;
    }
    run.nontemporal_weights = undo;
    optimizer_.Update(isa_, run);
    StoreFence();
    return expected.Difference(actual);
  }

  static constexpr uint64_t kTimeline = 0x1234567890;
  const Optimizer& optimizer_;
  const Isa isa_;
  StepScalars scalars_;
  UndoLog log_;
  uint32_t epoch_ = 1;
};

TEST_P(OptimizerConformance, ScalarBitsForEverySizeAndDType) {
  for (const DType grad : kAllDTypes) {
    for (const DType weight : kAllDTypes) {
      for (size_t count = 1; count <= 257; ++count) {
        const bool undo = count % 2 == 0;
        const size_t offset = count % 3;
        ASSERT_EQ(CompareWithScalar(count, grad, weight, undo, offset), "")
            << "count " << count << " grad dtype " << int(grad) << " weight dtype " << int(weight);
      }
    }
  }
}

TEST_P(OptimizerConformance, ScalarBitsForALargeRun) {
  for (const DType grad : kAllDTypes) {
    for (const DType weight : kAllDTypes) {
      ASSERT_EQ(CompareWithScalar(1'000'003, grad, weight, true, 0), "")
          << "grad dtype " << int(grad) << " weight dtype " << int(weight);
    }
  }
}

TEST_P(OptimizerConformance, AnyCutIntoRunsGivesTheSameBits) {
  const size_t count = 1000;
  Chunk whole(count, DType::kBFloat16, DType::kBFloat16, 5);
  Chunk pieces = whole;
  optimizer_.Update(isa_, whole.Run(optimizer_, scalars_));
  for (size_t i = 0, length = 1; i < count; i += length, length = length % 97 + 13) {
    const size_t n = std::min(length, count - i);
    optimizer_.Update(isa_, pieces.Run(optimizer_, scalars_, i, n));
  }
  EXPECT_EQ(whole.Difference(pieces), "");
}

TEST_P(OptimizerConformance, NothingStoredIsTinyNegativeZeroOrANoncanonicalNan) {
  const size_t count = 20'000;
  Chunk chunk(count, DType::kFloat32, DType::kFloat32, 6);
  optimizer_.Update(isa_, chunk.Run(optimizer_, scalars_));
  size_t nans = 0;
  std::vector<const float*> arrays = {chunk.master(),
                                      reinterpret_cast<const float*>(chunk.weight())};
  for (int s = 0; s < optimizer_.num_states(); ++s) arrays.push_back(chunk.state(s));
  for (const float* array : arrays) {
    for (size_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, array + i, sizeof bits);
      if (std::isnan(array[i])) {
        ++nans;
        ASSERT_EQ(bits, 0x7FC00000u);
      } else {
        ASSERT_TRUE(bits == 0 || std::fabs(array[i]) >= 0x1p-125f) << array[i];
      }
    }
  }
  EXPECT_GT(nans, 0u);
}

TEST_P(OptimizerConformance, WeightsAreTheCastOfMasters) {
  const size_t count = 5000;
  for (const DType dtype : kAllDTypes) {
    Chunk chunk(count, DType::kFloat16, dtype, 7);
    optimizer_.Update(isa_, chunk.Run(optimizer_, scalars_));
    StoreFence();
    std::vector<uint8_t> expected(count * DTypeSize(dtype));
    MasterToWeight(Isa::kScalar, chunk.master(), count, expected.data(), dtype);
    EXPECT_EQ(std::memcmp(expected.data(), chunk.weight(), expected.size()), 0) << int(dtype);
  }
}

TEST_P(OptimizerConformance, LogsTheGroupItIsIn) {
  // After a whole update the log describes the last group: mending steps back by
  // exactly that group, and redoing it gives the update's bits again.
  for (const size_t count : {1, 63, 64, 65, 128, 1000, 4096}) {
    const Chunk before(count, DType::kFloat32, DType::kBFloat16, 8);
    Chunk chunk = before;
    UpdateRun run = chunk.Run(optimizer_, scalars_);
    run.undo = &log_;
    run.undo_epoch = ++epoch_;
    optimizer_.Update(isa_, run);
    const Chunk after = chunk;

    std::array<float*, kMaxStates> state = {};
    for (int s = 0; s < optimizer_.num_states(); ++s) state[s] = chunk.state(s);
    const size_t last = (count - 1) / kUndoElements * kUndoElements;
    ASSERT_EQ(MendChunk(log_, kTimeline, epoch_, count, chunk.master(), state), last);
    Chunk old = before;
    ASSERT_EQ(std::memcmp(chunk.master() + last, old.master() + last, (count - last) * 4), 0);
    for (int s = 0; s < optimizer_.num_states(); ++s) {
      ASSERT_EQ(std::memcmp(chunk.state(s) + last, old.state(s) + last, (count - last) * 4), 0);
    }
    UpdateRun redo = chunk.Run(optimizer_, scalars_, last, count - last);
    redo.undo = &log_;
    redo.undo_epoch = epoch_;
    optimizer_.Update(isa_, redo);
    StoreFence();
    ASSERT_EQ(chunk.Difference(after), "");
  }
}

TEST_P(OptimizerConformance, AnEmptyRunTouchesNothing) {
  Chunk chunk(10, DType::kFloat32, DType::kFloat32, 9);
  const Chunk before = chunk;
  UpdateRun run = chunk.Run(optimizer_, scalars_, 3, 0);
  run.undo = &log_;
  run.undo_epoch = ++epoch_;
  optimizer_.Update(isa_, run);
  EXPECT_EQ(chunk.Difference(before), "");
  EXPECT_EQ(log_.slot[0].tag, 0u);
  EXPECT_EQ(log_.slot[1].tag, 0u);
}

TEST_P(OptimizerConformance, IsDescribed) {
  EXPECT_EQ(FindOptimizer(optimizer_.name()), &optimizer_);
  EXPECT_GE(optimizer_.num_states(), 0);
  EXPECT_LE(optimizer_.num_states(), kMaxStates);
  StepProgress products;
  for (int step = 1; step <= 5; ++step) {
    for (const float scalar : optimizer_.Step(Hyperparameters(), &products)) {
      EXPECT_TRUE(std::isfinite(scalar));
    }
  }
}

std::string TestName(const testing::TestParamInfo<std::tuple<std::string_view, Isa>>& info) {
  return std::string(std::get<0>(info.param)) + "_" + IsaName(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Registered, OptimizerConformance,
                         testing::Combine(testing::ValuesIn(OptimizerNames()),
                                          testing::ValuesIn(SupportedIsas())),
                         TestName);

TEST(OptimizerRegistry, NamesAreSortedAndUnknownOnesAreNull) {
  const std::vector<std::string_view> names = OptimizerNames();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_NE(std::find(names.begin(), names.end(), "adamw"), names.end());
  EXPECT_EQ(FindOptimizer("adamv"), nullptr);
  EXPECT_EQ(FindOptimizer(""), nullptr);
}

TEST(AdamWStep, AdvancesTheProductsInDouble) {
  Hyperparameters hyper;
  hyper.lr = 0.25;
  hyper.beta1 = 0.5;
  hyper.beta2 = 0.75;
  hyper.weight_decay = 0.5;
  StepProgress products;
  const Optimizer* adamw = FindOptimizer("adamw");
  adamw->Step(hyper, &products);
  const StepScalars second = adamw->Step(hyper, &products);
  EXPECT_EQ(products.beta1_product, 0.25);
  EXPECT_EQ(products.beta2_product, 0.5625);
  EXPECT_EQ(second[6], static_cast<float>(0.25 / 0.75));
  EXPECT_EQ(second[4], static_cast<float>(1.0 / std::sqrt(0.4375)));
  EXPECT_EQ(second[7], 0.125f);
}

}  // namespace
}  // namespace shardd::kernels

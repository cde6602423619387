// Every optimizer in every state format on every instruction set of this machine, against the
// scalar reference on fp32 arrays with the format's rounding around it.
#include "kernels/state_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cast.h"
#include "kernels/float_bits.h"
#include "kernels/hostile_values.h"
#include "kernels/rounding.h"

namespace shardd::kernels {
namespace {

const StateFormat kFormats[] = {
    {MasterFormat::kFloat32, MomentFormat::kFloat32},
    {MasterFormat::kFloat32, MomentFormat::kBFloat16},
    {MasterFormat::kSplit, MomentFormat::kFloat32},
    {MasterFormat::kSplit, MomentFormat::kBFloat16},
    {MasterFormat::kSplit, MomentFormat::kBFloat16, true, false, 17},
    {MasterFormat::kFloat32, MomentFormat::kFloat32, false, true, 18},
    {MasterFormat::kFloat32, MomentFormat::kBFloat16, true, true, 19},
};
// Where the tests' chunks begin in the flat space: blocks of the generator end within them, and
// the upper half of the number counts.
constexpr uint64_t kFirstElement = (uint64_t{5} << 32) + 4096 * 7 - 100;
constexpr uint64_t kAppliedSteps = (uint64_t{1} << 33) + 12;

std::string FormatName(const StateFormat& format) {
  return std::string(format.split() ? "split_" : "fp32_") +
         (format.moments == MomentFormat::kBFloat16 ? "bf16" : "fp32") +
         (format.stochastic_moments ? "_rounded" : "") +
         (format.stochastic_weights ? "_weights" : "");
}

// A chunk in some format, `guard` bytes of a pattern after each array.
class Chunk {
 public:
  Chunk(const StateFormat& format, int states, size_t count, DType weight_dtype, uint32_t seed)
      : format_(format), states_(states), count_(count), weight_dtype_(weight_dtype) {
    master_ = Random(count * format.master_bytes(), count, seed);
    for (uint32_t s = 0; s < 3; ++s) {
      moments_[s] = Random(count * format.moment_bytes(), count, seed * 7 + s + 1);
    }
    weights_.assign(count * DTypeSize(weight_dtype) + kGuard, 0xA5);
    if (!format.split()) return;
    const std::vector<float> values = HostileFloats(count, seed);
    WriteMaster(Isa::kScalar, format, Arrays(), count, values.data());
  }

  StateArrays Arrays() {
    StateArrays arrays;
    arrays.master = master_.data();
    for (size_t s = 0; s < static_cast<size_t>(states_); ++s)
      arrays.moments[s] = moments_[s].data();
    if (format_.split()) arrays.weights = reinterpret_cast<uint16_t*>(weights_.data());
    return arrays;
  }
  void* weights() { return weights_.data(); }

  std::vector<float> Values(size_t array) {
    std::vector<float> out(count_);
    if (array == 0) {
      ReadMaster(Isa::kScalar, format_, Arrays(), count_, out.data());
    } else {
      ReadMoment(Isa::kScalar, format_, Arrays(), array - 1, count_, out.data());
    }
    return out;
  }

  bool operator==(const Chunk& other) const = default;
  std::string Difference(const Chunk& other) const {
    if (master_ != other.master_) return "master";
    for (size_t s = 0; s < 3; ++s) {
      if (moments_[s] != other.moments_[s]) return "moment " + std::to_string(s);
    }
    return weights_ != other.weights_ ? "weights" : "";
  }

 private:
  static constexpr size_t kGuard = 64;
  static std::vector<uint8_t> Random(size_t bytes, size_t count, uint32_t seed) {
    std::vector<uint8_t> array =
        HostileArray(bytes == 4 * count ? DType::kFloat32 : DType::kBFloat16, count, seed);
    array.resize(bytes + kGuard, 0x5A);
    return array;
  }

  StateFormat format_;
  int states_;
  size_t count_;
  DType weight_dtype_;
  std::vector<uint8_t> master_, moments_[3], weights_;
};

class StateFormatConformance
    : public testing::TestWithParam<std::tuple<std::string_view, int, Isa>> {
 protected:
  StateFormatConformance()
      : optimizer_(*FindOptimizer(std::get<0>(GetParam()))),
        format_(kFormats[std::get<1>(GetParam())]),
        isa_(std::get<2>(GetParam())) {
    Hyperparameters hyper;
    hyper.weight_decay = 0.1;
    hyper.momentum = 0.9;
    StepProgress progress;
    for (int step = 0; step < 3; ++step) scalars_ = optimizer_.Step(hyper, &progress);
    ResetUndo(&log_, kTimeline);
  }

  UpdateRun Run(Chunk* chunk, size_t first, size_t count, DType weight_dtype) {
    UpdateRun run;
    run.grad = grad_.data() + 2 * first;
    run.weight = static_cast<char*>(chunk->weights()) + first * DTypeSize(weight_dtype);
    run.count = count;
    run.grad_dtype = DType::kBFloat16;
    run.weight_dtype = weight_dtype;
    run.grad_factor = 0.37f;
    run.scalars = &scalars_;
    run.position = static_cast<uint32_t>(first);
    run.element = kFirstElement + first;
    run.steps = kAppliedSteps;
    return run;
  }
  void Update(Chunk* chunk, size_t first, size_t count, DType weight_dtype, UndoLog* undo) {
    UpdateRun run = Run(chunk, first, count, weight_dtype);
    run.undo = undo;
    run.undo_epoch = epoch_;
    UpdateState(optimizer_, isa_, format_, Advance(format_, chunk->Arrays(), first), run);
    StoreFence();
  }

  // What UpdateState is defined to do, by the scalar optimizer on arrays of fp32 and the casts.
  void UpdateByDefinition(Chunk* chunk, size_t count, DType weight_dtype) {
    std::vector<float> arrays[4];
    for (size_t a = 0; a <= static_cast<size_t>(optimizer_.num_states()); ++a) {
      arrays[a] = chunk->Values(a);
    }
    UpdateRun run = Run(chunk, 0, count, weight_dtype);
    run.master = arrays[0].data();
    for (size_t s = 0; s < 3; ++s) run.state[s] = arrays[s + 1].data();
    optimizer_.Update(Isa::kScalar, run);
    const StateArrays to = chunk->Arrays();
    for (size_t i = 0; format_.stochastic_weights && i < count; ++i) {
      static_cast<uint16_t*>(run.weight)[i] = Rounded(arrays[0][i], 0, i);
    }
    for (size_t i = 0; i < count; ++i) {
      if (format_.split()) {
        static_cast<uint16_t*>(to.master)[i] = LowWord(arrays[0][i]);
      } else {
        static_cast<float*>(to.master)[i] = arrays[0][i];
      }
    }
    for (int s = 0; s < optimizer_.num_states(); ++s) {
      const auto m = static_cast<size_t>(s);
      for (size_t i = 0; i < count; ++i) {
        const float x = arrays[m + 1][i];
        if (format_.stochastic_moments) {
          static_cast<uint16_t*>(to.moments[m])[i] = Rounded(x, static_cast<uint32_t>(m) + 1, i);
        } else if (format_.moments == MomentFormat::kBFloat16) {
          static_cast<uint16_t*>(to.moments[m])[i] = BFloat16TiesEven(x);
        } else {
          static_cast<float*>(to.moments[m])[i] = x;
        }
      }
    }
  }

  uint16_t Rounded(float x, uint32_t array, size_t i) const {
    const uint64_t element = kFirstElement + i;
    const uint64_t key = BlockKey({format_.seed, kAppliedSteps, array}, element / kRoundingBlock);
    return BFloat16Stochastic(x, RandomBits(key, element % kRoundingBlock));
  }

  std::string CompareWithDefinition(size_t count, DType weight_dtype) {
    grad_ = HostileArray(DType::kBFloat16, count, static_cast<uint32_t>(count) + 1);
    Chunk expected(format_, optimizer_.num_states(), count, weight_dtype,
                   static_cast<uint32_t>(count));
    Chunk actual = expected;
    UpdateByDefinition(&expected, count, weight_dtype);
    const ScopedFlushToZero flush;
    ++epoch_;
    Update(&actual, 0, count, weight_dtype, count % 2 == 0 ? &log_ : nullptr);
    return actual.Difference(expected);
  }

  std::vector<DType> WeightDTypes() const {
    if (format_.split() || format_.stochastic_weights) return {DType::kBFloat16};
    return {std::begin(kAllDTypes), std::end(kAllDTypes)};
  }

  static constexpr uint64_t kTimeline = 99;
  const Optimizer& optimizer_;
  const StateFormat format_;
  const Isa isa_;
  StepScalars scalars_;
  std::vector<uint8_t> grad_;
  UndoLog log_;
  uint32_t epoch_ = 1;
};

TEST_P(StateFormatConformance, TheBitsOfTheDefinition) {
  for (const DType weight : WeightDTypes()) {
    for (size_t count = 1; count <= 257; ++count) {
      ASSERT_EQ(CompareWithDefinition(count, weight), "") << count << " dtype " << int(weight);
    }
    ASSERT_EQ(CompareWithDefinition(300'004, weight), "") << "dtype " << int(weight);
  }
}

TEST_P(StateFormatConformance, AnyCutIntoRunsGivesTheSameBits) {
  const size_t count = 3000;
  grad_ = HostileArray(DType::kBFloat16, count, 4);
  Chunk whole(format_, optimizer_.num_states(), count, DType::kBFloat16, 5);
  Chunk pieces = whole;
  Update(&whole, 0, count, DType::kBFloat16, nullptr);
  for (size_t i = 0, length = 1; i < count; i += length, length = length % 97 + 13) {
    Update(&pieces, i, std::min(length, count - i), DType::kBFloat16, nullptr);
  }
  EXPECT_EQ(pieces.Difference(whole), "");
}

TEST_P(StateFormatConformance, LogsTheGroupItIsIn) {
  for (const size_t count : {1, 63, 64, 65, 128, 1000, 4096}) {
    grad_ = HostileArray(DType::kBFloat16, count, 6);
    Chunk chunk(format_, optimizer_.num_states(), count, DType::kBFloat16, 8);
    std::vector<float> before[4];
    const auto arrays = static_cast<size_t>(optimizer_.num_states()) + 1;
    for (size_t a = 0; a < arrays; ++a) before[a] = chunk.Values(a);
    ++epoch_;
    Update(&chunk, 0, count, DType::kBFloat16, &log_);
    const Chunk after = chunk;

    const size_t last = (count - 1) / kUndoElements * kUndoElements;
    ASSERT_EQ(MendState(log_, kTimeline, epoch_, count, format_, chunk.Arrays()), last);
    for (size_t a = 0; a < arrays; ++a) {
      const std::vector<float> mended = chunk.Values(a);
      ASSERT_EQ(std::memcmp(&mended[last], &before[a][last], (count - last) * 4), 0) << a;
    }
    Update(&chunk, last, count - last, DType::kBFloat16, &log_);
    ASSERT_EQ(chunk.Difference(after), "");
  }
}

TEST_P(StateFormatConformance, WritingWhatWasReadChangesNothing) {
  const size_t count = 777;
  grad_ = HostileArray(DType::kBFloat16, count, 6);
  Chunk chunk(format_, optimizer_.num_states(), count, DType::kBFloat16, 9);
  Update(&chunk, 0, count, DType::kBFloat16, nullptr);
  const Chunk before = chunk;
  const StateArrays arrays = chunk.Arrays();
  std::vector<float> values(count);
  ReadMaster(isa_, format_, arrays, count, values.data());
  WriteMaster(isa_, format_, arrays, count, values.data());
  for (size_t m = 0; m < static_cast<size_t>(optimizer_.num_states()); ++m) {
    ReadMoment(isa_, format_, arrays, m, count, values.data());
    WriteMoment(isa_, format_, arrays, m, count, values.data());
  }
  EXPECT_EQ(chunk.Difference(before), "");
}

// Masters and weights of a split master are those of an fp32 one, step after step.
TEST_P(StateFormatConformance, ASplitMasterIsAnFp32Master) {
  if (!format_.split()) return;
  StateFormat whole_format = format_;
  whole_format.master = MasterFormat::kFloat32;
  const size_t count = 1000;
  Chunk split(format_, optimizer_.num_states(), count, DType::kBFloat16, 10);
  Chunk whole(whole_format, optimizer_.num_states(), count, DType::kBFloat16, 10);
  const std::vector<float> masters = split.Values(0);
  WriteMaster(isa_, whole_format, whole.Arrays(), count, masters.data());
  for (uint32_t step = 0; step < 20; ++step) {
    grad_ = HostileArray(DType::kBFloat16, count, 20 + step);
    Update(&split, 0, count, DType::kBFloat16, nullptr);
    UpdateState(optimizer_, isa_, whole_format, whole.Arrays(),
                Run(&whole, 0, count, DType::kBFloat16));
    StoreFence();
    for (size_t a = 0; a <= static_cast<size_t>(optimizer_.num_states()); ++a) {
      const std::vector<float> x = split.Values(a), y = whole.Values(a);
      ASSERT_EQ(std::memcmp(x.data(), y.data(), count * 4), 0) << "array " << a << " step " << step;
    }
    ASSERT_EQ(std::memcmp(split.weights(), whole.weights(), count * 2), 0) << "step " << step;
  }
}

std::string TestName(const testing::TestParamInfo<std::tuple<std::string_view, int, Isa>>& info) {
  return std::string(std::get<0>(info.param)) + "_" +
         FormatName(kFormats[std::get<1>(info.param)]) + "_" + IsaName(std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Registered, StateFormatConformance,
                         testing::Combine(testing::ValuesIn(OptimizerNames()),
                                          testing::Range(0, static_cast<int>(std::size(kFormats))),
                                          testing::ValuesIn(SupportedIsas())),
                         TestName);

class SplitMasterTest : public testing::TestWithParam<Isa> {};

// Over all 2^32 values: what is taken apart comes back, and the upper half is the working weight.
TEST_P(SplitMasterTest, LosesNothingOfAnyValue) {
  constexpr size_t kPart = 1 << 16;
  std::vector<float> in(kPart), out(kPart), canonical(kPart);
  std::vector<uint16_t> weights(kPart), low(kPart), expected(kPart);
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += kPart) {
    for (size_t i = 0; i < kPart; ++i) in[i] = BitsToFloat(static_cast<uint32_t>(first + i));
    SplitMaster(GetParam(), in.data(), kPart, weights.data(), low.data());
    JoinMaster(GetParam(), weights.data(), low.data(), kPart, out.data());
    for (size_t i = 0; i < kPart; ++i) canonical[i] = CanonicalizeNan(in[i]);
    for (size_t i = 0; i < kPart; ++i) expected[i] = BFloat16TiesAway(canonical[i]);
    ASSERT_EQ(std::memcmp(out.data(), canonical.data(), kPart * 4), 0) << std::hex << first;
    ASSERT_EQ(weights, expected) << std::hex << first;
  }
}

// A kernel's working weight is of a flushed value, and so is what a split master is written with.
TEST_P(SplitMasterTest, IsWrittenWithTheWeightsOfAnFp32Master) {
  const std::vector<float> in = HostileFloats(100'003, 12);
  std::vector<uint16_t> weights(in.size()), low(in.size()), expected(in.size());
  StateArrays arrays;
  arrays.master = low.data();
  arrays.weights = weights.data();
  WriteMaster(GetParam(), {MasterFormat::kSplit, MomentFormat::kFloat32}, arrays, in.size(),
              in.data());
  MasterToWeight(Isa::kScalar, in.data(), in.size(), expected.data(), DType::kBFloat16);
  EXPECT_EQ(weights, expected);
}

INSTANTIATE_TEST_SUITE_P(All, SplitMasterTest, testing::ValuesIn(SupportedIsas()),
                         [](const auto& info) { return std::string(IsaName(info.param)); });

}  // namespace
}  // namespace shardd::kernels

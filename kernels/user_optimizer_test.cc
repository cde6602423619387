#include "kernels/user_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cast.h"
#include "kernels/hostile_values.h"

namespace shardd::kernels {
namespace {

using ::testing::HasSubstr;

// A sound one: momentum and its square root.
struct Sound {
  static constexpr const char* kName = "sound";
  static constexpr const char* kStateNames[] = {"a", "b", "c"};
  static void Step(const shardd_hyperparameters& hyper, uint64_t step, float* s) {
    s[0] = static_cast<float>(hyper.beta1);
    s[1] = static_cast<float>(hyper.lr / static_cast<double>(step));
  }
  static void Element(const float* s, float grad, float& master, float* state) {
    state[0] = s[0] * state[0] + grad;
    state[1] += grad * grad;
    state[2] = master;
    master -= s[1] * state[0] / (std::sqrt(state[1]) + 1e-6f);
  }
};

shardd_optimizer_description Describe() { return *shardd_optimizer_detail::Describe<Sound>(); }

TEST(UserOptimizerCheck, PassesASoundOne) { EXPECT_EQ(CheckUserOptimizer(Describe()), ""); }

TEST(UserOptimizerCheck, RefusesADescriptionThatDoesNotFit) {
  shardd_optimizer_description d = Describe();
  d.abi_version = 2;
  EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("ABI version 2, this shardd 1"));
  d = Describe();
  d.struct_bytes -= 8;
  EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("bytes"));
  const char* const names[] = {"", "With-Dash", "a_name_of_more_than_thirty_two_bytes", nullptr};
  for (const char* name : names) {
    d = Describe();
    d.name = name;
    EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("its name"));
    d = Describe();
    d.state_names[1] = name;
    EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("state 1"));
  }
  d = Describe();
  d.num_states = 4;
  EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("4 states; at most 3"));
  d = Describe();
  d.state_names[2] = "a";
  EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("two of its states are named a"));
  d = Describe();
  d.state_names[2] = "model";
  EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("cannot be named model"));
  d = Describe();
  d.update = nullptr;
  EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("no update"));
}

std::string CheckWithUpdate(decltype(shardd_optimizer_description::update) update) {
  shardd_optimizer_description d = Describe();
  d.update = update;
  return CheckUserOptimizer(d);
}

TEST(UserOptimizerCheck, RefusesAFormulaWithAMemory) {
  EXPECT_THAT(CheckWithUpdate(
                  [](const float*, size_t count, const float* grad, float* master, float* const*) {
                    static int calls = 0;
                    ++calls;
                    for (size_t i = 0; i < count; ++i)
                      master[i] -= grad[i] * static_cast<float>(calls);
                  }),
              HasSubstr("when it is done again"));
}

TEST(UserOptimizerCheck, RefusesAFormulaThatLooksAtItsNeighbours) {
  EXPECT_THAT(CheckWithUpdate(
                  [](const float*, size_t count, const float* grad, float* master, float* const*) {
                    for (size_t i = 0; i < count; ++i) master[i] -= grad[0];
                  }),
              HasSubstr("not element-wise"));
  EXPECT_THAT(CheckWithUpdate(
                  [](const float*, size_t count, const float* grad, float* master, float* const*) {
                    for (size_t i = 0; i < count; ++i) {
                      // What an unrolled loop's remainder might be compiled to.
                      master[i] = i + 8 > count ? std::fma(-0.1f, grad[i], master[i])
                                                : master[i] - 0.1f * grad[i];
                    }
                  }),
              HasSubstr("in pieces"));
}

TEST(UserOptimizerCheck, RefusesAFormulaThatWritesElsewhere) {
  EXPECT_THAT(CheckWithUpdate(
                  [](const float*, size_t count, const float* grad, float* master, float* const*) {
                    for (size_t i = 0; i <= count; ++i) master[i] = grad[i];
                  }),
              HasSubstr("beyond the elements"));
  EXPECT_THAT(
      CheckWithUpdate([](const float*, size_t count, const float* grad, float*, float* const*) {
        for (size_t i = 0; i < count; ++i) const_cast<float*>(grad)[i] = 1;
      }),
      HasSubstr("changes the gradient"));
}

TEST(UserOptimizerCheck, RefusesAFormulaThatDividesByAZeroState) {
  EXPECT_THAT(CheckWithUpdate([](const float*, size_t count, const float* grad, float* master,
                                 float* const* states) {
                for (size_t i = 0; i < count; ++i) {
                  states[0][i] += grad[i] * grad[i];
                  master[i] -= grad[i] / std::sqrt(states[0][i]);
                }
              }),
              HasSubstr("with a gradient of 0 makes a value that is not finite"));
}

TEST(UserOptimizerCheck, RefusesScalarsThatChangeOrAreNotFinite) {
  shardd_optimizer_description d = Describe();
  d.step = [](const shardd_hyperparameters*, uint64_t step, float* s) {
    s[0] = 1.0f / static_cast<float>(step - 1);
  };
  EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("scalar of step 1 is not finite"));
  d.step = [](const shardd_hyperparameters*, uint64_t, float* s) {
    static float calls = 0;
    s[0] = ++calls;
  };
  EXPECT_THAT(CheckUserOptimizer(d), HasSubstr("other scalars for the same step"));
}

// --- As an optimizer.

class UserOptimizerRun : public testing::Test {
 protected:
  UserOptimizerRun() : optimizer_(MakeUserOptimizer(*shardd_optimizer_detail::Describe<Sound>())) {
    StepProgress progress;
    for (int i = 0; i < 2; ++i) scalars_ = optimizer_->Step({.lr = 0.1}, &progress);
    EXPECT_EQ(progress.steps, 2u);
    EXPECT_EQ(scalars_[1], 0.05f);
    ResetUndo(&log_, 5);
  }
  struct Chunk {
    std::vector<float> master, state[3];
    std::vector<uint16_t> weight;
    bool operator==(const Chunk& o) const {
      const auto same = [](const auto& a, const auto& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
      };
      return same(master, o.master) && same(state[0], o.state[0]) && same(state[1], o.state[1]) &&
             same(state[2], o.state[2]) && same(weight, o.weight);
    }
  };
  static Chunk Fresh(size_t count) {
    Chunk chunk{HostileFloats(count, 1),
                {HostileFloats(count, 2), HostileFloats(count, 3), HostileFloats(count, 4)},
                std::vector<uint16_t>(count)};
    return chunk;
  }
  UpdateRun RunOf(Chunk* chunk, const std::vector<uint8_t>& grad, size_t first, size_t count) {
    UpdateRun run;
    run.master = &chunk->master[first];
    for (size_t s = 0; s < 3; ++s) run.state[s] = &chunk->state[s][first];
    run.grad = grad.data() + first * 2;
    run.weight = &chunk->weight[first];
    run.count = count;
    run.grad_dtype = DType::kBFloat16;
    run.weight_dtype = DType::kBFloat16;
    run.grad_factor = 0.37f;
    run.scalars = &scalars_;
    run.position = static_cast<uint32_t>(first);
    return run;
  }

  std::unique_ptr<Optimizer> optimizer_;
  StepScalars scalars_;
  UndoLog log_;
};

TEST_F(UserOptimizerRun, TheSameBitsOnAnyIsaInAnyPiecesWithAndWithoutFlushingHardware) {
  constexpr size_t kCount = 5000;
  const std::vector<uint8_t> grad = HostileArray(DType::kBFloat16, kCount, 9);
  Chunk expected = Fresh(kCount);
  optimizer_->Update(Isa::kScalar, RunOf(&expected, grad, 0, kCount));
  for (const Isa isa : SupportedIsas()) {
    const ScopedFlushToZero flush;
    Chunk pieces = Fresh(kCount);
    for (size_t i = 0, length = 1; i < kCount; i += length, length = length * 5 % 1501 + 1) {
      optimizer_->Update(isa, RunOf(&pieces, grad, i, std::min(length, kCount - i)));
    }
    EXPECT_TRUE(pieces == expected) << IsaName(isa);
  }
  std::vector<uint16_t> weights(kCount);
  MasterToWeight(Isa::kScalar, expected.master.data(), kCount, weights.data(), DType::kBFloat16);
  EXPECT_EQ(weights, expected.weight);
  for (const float value : expected.master) {
    EXPECT_TRUE(std::isnan(value) || value == 0 || std::fabs(value) >= 0x1p-125f);
  }
}

TEST_F(UserOptimizerRun, TheUndoLogMendsTheLastGroup) {
  for (const size_t count : {1, 64, 65, 1024, 1030, 4096}) {
    const std::vector<uint8_t> grad = HostileArray(DType::kBFloat16, count, 9);
    const Chunk before = Fresh(count);
    Chunk chunk = before;
    UpdateRun run = RunOf(&chunk, grad, 0, count);
    run.undo = &log_;
    run.undo_epoch = static_cast<uint32_t>(count);
    optimizer_->Update(BestIsa(), run);
    const Chunk after = chunk;
    const size_t last = (count - 1) / kUndoElements * kUndoElements;
    ASSERT_EQ(MendChunk(log_, 5, static_cast<uint32_t>(count), count, chunk.master.data(),
                        {chunk.state[0].data(), chunk.state[1].data(), chunk.state[2].data()}),
              last);
    for (size_t s = 0; s < 3; ++s) {
      EXPECT_EQ(std::memcmp(&chunk.state[s][last], &before.state[s][last], (count - last) * 4), 0);
    }
    EXPECT_EQ(std::memcmp(&chunk.master[last], &before.master[last], (count - last) * 4), 0);
    optimizer_->Update(BestIsa(), RunOf(&chunk, grad, last, count - last));
    EXPECT_TRUE(chunk == after) << count;
  }
}

// --- Loading.

TEST(LoadUserOptimizer, WhatIsNoObjectIsRefused) {
  EXPECT_THAT(LoadUserOptimizer("absent.so").problem, HasSubstr("with a '/'"));
  EXPECT_THAT(LoadUserOptimizer("./absent.so").problem, HasSubstr("absent.so"));
}

}  // namespace
}  // namespace shardd::kernels

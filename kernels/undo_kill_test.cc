// An update killed by SIGKILL at any instruction is mended and redone to the bits
// of an undisturbed one.
//
// Two tests. UndoKill: a child updates a chunk in memory shared with the test,
// over and over, each time to the next epoch, and is killed at random moments.
// UndoStep: a child is single-stepped through one update of a small chunk, and
// after every instruction that changed memory a copy is mended and redone.
// In both, mending and redoing are interrupted too.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "kernels/hostile_values.h"
#include "kernels/optimizer.h"
#include "kernels/state_format.h"
#include "kernels/undo.h"
#include "kernels/user_optimizer.h"

namespace shardd::kernels {
namespace {

constexpr uint64_t kTimeline = 42;
constexpr int kKills = 300;  // fewer of what has less of its own

// A user's formula, whose loop is another one.
struct Momentum {
  static constexpr const char* kName = "momentum";
  static constexpr const char* kStateNames[] = {"buffer", "old"};
  static void Step(const shardd_hyperparameters& hyper, uint64_t, float* s) {
    s[0] = static_cast<float>(hyper.beta1);
    s[1] = static_cast<float>(hyper.lr);
  }
  static void Element(const float* s, float grad, float& master, float* state) {
    state[0] = s[0] * state[0] + grad;
    state[1] = master;
    master -= s[1] * state[0];
  }
};

const Optimizer& Find(const std::string& name) {
  static const Optimizer* const own =
      MakeUserOptimizer(*shardd_optimizer_detail::Describe<Momentum>()).release();
  return name == own->name() ? *own : *FindOptimizer(name);
}

// A chunk of several runs, like those of a chunk that holds several parameters:
// whole and short groups.
template <size_t kChunkElements>
struct Shared {
  static constexpr size_t kChunk = kChunkElements;
  UndoLog log;
  uint32_t epoch;               // of the update that is running or last ran
  std::atomic<uint32_t> phase;  // the child: 0 not begun, 1 begun, 2 done
  alignas(64) float master[kChunk];
  alignas(64) float state[kMaxStates][kChunk];
  alignas(64) uint16_t weight[kChunk];

  static std::vector<size_t> RunEnds() {
    return {5, 37, kChunk / 3, kChunk / 2 + 4, kChunk - 1, kChunk};
  }

  // The gradient of an epoch: one of two, so that a group skipped or done twice
  // shows. Some elements are NaN, Inf or tiny.
  static const std::vector<uint8_t>& Gradient(uint32_t epoch) {
    static const std::vector<uint8_t> gradients[2] = {HostileArray(DType::kBFloat16, kChunk, 1),
                                                      HostileArray(DType::kBFloat16, kChunk, 2)};
    return gradients[epoch % 2];
  }

  // The arrays in `format`, in the memory of those of fp32.
  StateArrays Arrays(const StateFormat& format, int states) {
    StateArrays arrays;
    arrays.master = master;
    for (size_t s = 0; s < static_cast<size_t>(states); ++s) arrays.moments[s] = state[s];
    arrays.weights = format.split() ? weight : nullptr;
    return arrays;
  }

  void Initialise(const StateFormat& format, int states) {
    ResetUndo(&log, kTimeline);
    epoch = 0;
    phase = 0;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < kChunk; ++i) {
      master[i] = normal(random);
      state[0][i] = 0.1f * normal(random);
      state[1][i] = i % 7 == 0 ? 0x1p-130f : 0.01f;
      state[2][i] = i % 5 == 0 ? 0.02f : 0.0f;
      weight[i] = 0;
    }
    const std::vector<float> masters(master, master + kChunk);
    const StateArrays arrays = Arrays(format, states);
    WriteMaster(Isa::kScalar, format, arrays, kChunk, masters.data());
    for (size_t s = 0; s < static_cast<size_t>(states); ++s) {
      const std::vector<float> values(state[s], state[s] + kChunk);
      WriteMoment(Isa::kScalar, format, arrays, s, kChunk, values.data());
    }
  }

  // The first element in which the chunks differ, or "".
  std::string Difference(const Shared& other) const {
    for (size_t i = 0; i < kChunk; ++i) {
      const char* name = nullptr;
      if (std::memcmp(&master[i], &other.master[i], 4) != 0) name = "master";
      if (std::memcmp(&state[0][i], &other.state[0][i], 4) != 0) name = "state 0";
      if (std::memcmp(&state[1][i], &other.state[1][i], 4) != 0) name = "state 1";
      if (std::memcmp(&state[2][i], &other.state[2][i], 4) != 0) name = "state 2";
      if (weight[i] != other.weight[i]) name = "weight";
      if (name != nullptr) return std::string(name) + " of element " + std::to_string(i);
    }
    return "";
  }
};

// The optimizer with everything that an update needs.
class Updater {
 public:
  // "NAME", or "NAME_bf16" with bf16 moments and a split master.
  Updater(const std::string& name, Isa isa)
      : isa_(isa), optimizer_(Find(name.substr(0, name.find("_bf16")))) {
    if (name.find("_bf16") != std::string::npos) {
      format_ = {MasterFormat::kSplit, MomentFormat::kBFloat16};
    }
    Hyperparameters hyper;
    hyper.weight_decay = 0.01;
    StepProgress products;
    scalars_ = optimizer_.Step(hyper, &products);
  }

  template <class Chunk>
  void Initialise(Chunk* chunk) const {
    chunk->Initialise(format_, optimizer_.num_states());
  }

  // Updates the elements from `first` on to the chunk's epoch, run by run.
  template <class Chunk>
  void UpdateFrom(size_t first, bool logged, Chunk* chunk) const {
    for (const size_t end : Chunk::RunEnds()) {
      if (end <= first) continue;
      UpdateRun run;
      run.grad = Chunk::Gradient(chunk->epoch).data() + first * 2;
      run.weight = chunk->weight + first;
      run.count = end - first;
      run.grad_dtype = DType::kBFloat16;
      run.weight_dtype = DType::kBFloat16;
      run.scalars = &scalars_;
      run.undo = logged ? &chunk->log : nullptr;
      run.undo_epoch = chunk->epoch;
      run.position = static_cast<uint32_t>(first);
      const StateArrays arrays = chunk->Arrays(format_, optimizer_.num_states());
      UpdateState(optimizer_, isa_, format_, Advance(format_, arrays, first), run);
      first = end;
    }
    StoreFence();
  }

  // Brings the chunk to its epoch after an interruption. Returns where it was
  // redone from.
  template <class Chunk>
  size_t MendAndRedo(Chunk* chunk) const {
    const size_t first = MendState(chunk->log, kTimeline, chunk->epoch, Chunk::kChunk, format_,
                                   chunk->Arrays(format_, optimizer_.num_states()));
    UpdateFrom(first, true, chunk);
    return first;
  }

 private:
  const Isa isa_;
  const Optimizer& optimizer_;
  StateFormat format_;
  StepScalars scalars_;
};

// Memory that a forked child shares; unmapped by the deleter.
template <class T>
struct Unmap {
  void operator()(T* memory) const { munmap(memory, sizeof(T)); }
};
template <class T>
std::unique_ptr<T, Unmap<T>> MapShared() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  return std::unique_ptr<T, Unmap<T>>(new (memory) T);
}

template <class T>
void CopyBytes(const T& from, T* to) {
  std::memcpy(static_cast<void*>(to), &from, sizeof(T));
}

// Spins: a sleep would end at a scheduling boundary, not at a random instruction.
void SpinFor(uint64_t nanoseconds) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
  };
  for (const uint64_t end = now() + nanoseconds; now() < end;) {
  }
}

// --- Killed at random ---

using LargeChunk = Shared<65536>;

// Never returns. Announces each epoch before its first store.
[[noreturn]] void UpdateForever(const Updater& updater, bool interrupted, LargeChunk* chunk) {
  chunk->phase.store(1);
  if (interrupted) updater.MendAndRedo(chunk);
  for (;;) {
    std::atomic_ref<uint32_t>(chunk->epoch).fetch_add(1);
    updater.UpdateFrom(0, true, chunk);
  }
}

// Forks a child that updates, and kills it within `spin_nanoseconds`.
void RunAndKill(const Updater& updater, bool interrupted, uint64_t spin_nanoseconds,
                LargeChunk* chunk) {
  chunk->phase.store(0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) UpdateForever(updater, interrupted, chunk);
  while (chunk->phase.load() == 0) sched_yield();
  SpinFor(spin_nanoseconds);
  ASSERT_EQ(kill(child, SIGKILL), 0);
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << status;
}

class UndoKill : public testing::TestWithParam<std::tuple<const char*, Isa>> {};

TEST_P(UndoKill, MendedAndRedoneEqualsUndisturbed) {
  const auto [optimizer, isa] = GetParam();
  const Updater updater(optimizer, isa);
  const auto chunk = MapShared<LargeChunk>();
  ASSERT_NE(chunk, nullptr);
  updater.Initialise(chunk.get());
  const auto expected = std::make_unique<LargeChunk>();
  CopyBytes(*chunk, expected.get());
  LargeChunk::Gradient(0);  // made before the fork

  const int kills = optimizer == std::string("adamw") ? kKills : kKills / 3;
  std::mt19937 random(static_cast<uint32_t>(isa) + 17);
  bool interrupted = false;  // by the kill before, and not mended yet
  int torn = 0;              // comparisons after a kill in the midst of a chunk
  for (int kill_number = 0; kill_number < kills; ++kill_number) {
    // Short, when it is mending and redoing that shall be hit.
    const uint64_t spin = random() % (interrupted ? 60'000 : 300'000);
    ASSERT_NO_FATAL_FAILURE(RunAndKill(updater, interrupted, spin, chunk.get()));
    interrupted = kill_number % 3 != 2;
    if (interrupted) continue;
    const size_t redone_from = updater.MendAndRedo(chunk.get());
    if (redone_from != 0) ++torn;
    while (expected->epoch < chunk->epoch) {
      ++expected->epoch;
      updater.UpdateFrom(0, false, expected.get());
    }
    ASSERT_EQ(chunk->Difference(*expected), "") << "kill " << kill_number << " in epoch "
                                                << chunk->epoch << ", redone from " << redone_from;
  }
  std::printf("%d of %d comparisons followed a kill in the midst of a chunk\n", torn, kills / 3);
  EXPECT_GT(torn, kills / 6);
}

// --- Stopped at every instruction ---

using SmallChunk = Shared<300>;

// Steps a child through MendAndRedo of `chunk` instruction by instruction. After
// each that changed memory, calls check(memory as of that instruction).
template <class Check>
void StepThroughRedo(const Updater& updater, SmallChunk* chunk, Check check) {
  chunk->phase.store(0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    chunk->phase.store(1);
    updater.MendAndRedo(chunk);
    chunk->phase.store(2);
    _exit(0);
  }
  SmallChunk seen;
  CopyBytes(*chunk, &seen);
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSTOPPED(status)) << status;
  while (chunk->phase.load() != 2) {
    ASSERT_EQ(ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr), 0) << std::strerror(errno);
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP) << status;
    if (std::memcmp(chunk, &seen, sizeof seen) == 0) continue;
    CopyBytes(*chunk, &seen);
    check(seen);
    if (testing::Test::HasFatalFailure()) break;
  }
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, &status, 0), child);
}

class UndoStep : public testing::TestWithParam<std::tuple<const char*, Isa>> {};

TEST_P(UndoStep, EveryInstructionCanBeTheLast) {
  const auto [optimizer, isa] = GetParam();
  const Updater updater(optimizer, isa);
  const auto chunk = MapShared<SmallChunk>();
  ASSERT_NE(chunk, nullptr);
  updater.Initialise(chunk.get());
  // Two epochs before, so that both slots hold tags of an older one.
  for (int epoch = 0; epoch < 2; ++epoch) {
    ++chunk->epoch;
    updater.UpdateFrom(0, true, chunk.get());
  }
  ++chunk->epoch;
  SmallChunk expected;
  CopyBytes(*chunk, &expected);
  updater.UpdateFrom(0, false, &expected);

  const auto redo_and_compare = [&](const SmallChunk& stopped) {
    SmallChunk copy;
    CopyBytes(stopped, &copy);
    const size_t redone_from = updater.MendAndRedo(&copy);
    ASSERT_EQ(copy.Difference(expected), "") << "redone from " << redone_from;
  };
  std::vector<std::unique_ptr<SmallChunk>> moments;
  StepThroughRedo(updater, chunk.get(), [&](const SmallChunk& stopped) {
    moments.push_back(std::make_unique<SmallChunk>());
    CopyBytes(stopped, moments.back().get());
    redo_and_compare(stopped);
  });
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_EQ(chunk->Difference(expected), "");

  // The redo is interrupted as well, from ten moments of the first interruption.
  size_t moments_of_redo = 0;
  for (size_t k = 0; k < 10; ++k) {
    CopyBytes(*moments[k * (moments.size() - 1) / 9], chunk.get());
    StepThroughRedo(updater, chunk.get(), [&](const SmallChunk& stopped) {
      ++moments_of_redo;
      redo_and_compare(stopped);
    });
    ASSERT_FALSE(HasFatalFailure());
  }
  std::printf("%zu moments of an update, %zu of its redo\n", moments.size(), moments_of_redo);
  EXPECT_GT(moments.size(), 100u);
  EXPECT_GT(moments_of_redo, 100u);
}

std::string Name(const testing::TestParamInfo<std::tuple<const char*, Isa>>& info) {
  return std::string(std::get<0>(info.param)) + "_" + IsaName(std::get<1>(info.param));
}
// One of each number of states, and of each loop.
const auto kAll = testing::Combine(
    testing::Values("adamw", "adam_amsgrad", "sgd", "momentum", "adamw_bf16", "adam_amsgrad_bf16"),
    testing::ValuesIn(SupportedIsas()));
INSTANTIATE_TEST_SUITE_P(All, UndoKill, kAll, Name);
INSTANTIATE_TEST_SUITE_P(All, UndoStep, kAll, Name);

}  // namespace
}  // namespace shardd::kernels

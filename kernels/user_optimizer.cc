// How a user's formula, which knows fp32 arrays only, becomes an optimizer: it works on copies that
// stay in the L1 cache; flush, undo log and casts are done around it.
#include "kernels/user_optimizer.h"

#include <algorithm>
#include <cstring>

#include "kernels/cast.h"
#include "kernels/float_bits.h"
#include "kernels/undo_cursor.h"

namespace shardd::kernels {
namespace {

// Elements per call: four arrays of them fit in half of an L1 cache.
constexpr size_t kTile = 1024;
static_assert(kTile % kUndoElements == 0);

struct Tile {
  alignas(64) float grad[kTile];
  alignas(64) float master[kTile];
  alignas(64) float state[kMaxStates][kTile];
};

void CopyFlushed(const float* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = Flush(from[i]);
}

void FlushAndCanonicalize(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] = CanonicalizeNan(Flush(values[i]));
}

class UserOptimizer final : public Optimizer {
 public:
  explicit UserOptimizer(const shardd_optimizer_description& description) : d_(description) {}

  std::string_view name() const override { return d_.name; }
  std::vector<std::string_view> state_names() const override {
    return {d_.state_names, d_.state_names + d_.num_states};
  }

  StepScalars Step(const Hyperparameters& h, StepProgress* progress) const override {
    const shardd_hyperparameters hyper{
        h.lr,           h.beta1,    h.beta2,     h.eps,
        h.weight_decay, h.momentum, h.dampening, h.nesterov ? 1.0 : 0.0,
        h.lr_decay};
    StepScalars scalars{};
    d_.step(&hyper, ++progress->steps, scalars.data());
    return scalars;
  }

  void Update(Isa isa, const UpdateRun& run) const override {
    // The mode decides what a formula does with subnormals on the way.
    const ScopedFlushToZero flush;
    UndoCursor undo(run.undo, run.undo_epoch);
    Tile tile;
    for (size_t i = 0; i < run.count; i += kTile) {
      const size_t n = std::min(kTile, run.count - i);
      Load(isa, run, i, n, &tile);
      float* states[kMaxStates] = {};
      for (uint32_t s = 0; s < d_.num_states; ++s) states[s] = tile.state[s];
      d_.update(run.scalars->data(), n, tile.grad, tile.master, states);
      FlushAndCanonicalize(tile.master, n);
      for (uint32_t s = 0; s < d_.num_states; ++s) FlushAndCanonicalize(tile.state[s], n);
      Store(isa, run, i, n, tile, &undo);
    }
  }

 private:
  void Load(Isa isa, const UpdateRun& run, size_t i, size_t n, Tile* tile) const {
    ToFp32(isa, static_cast<const char*>(run.grad) + i * DTypeSize(run.grad_dtype), run.grad_dtype,
           n, tile->grad);
    const float factor = Flush(run.grad_factor);
    for (size_t j = 0; j < n; ++j) tile->grad[j] = Flush(Flush(tile->grad[j]) * factor);
    CopyFlushed(run.master + i, tile->master, n);
    for (uint32_t s = 0; s < d_.num_states; ++s) CopyFlushed(run.state[s] + i, tile->state[s], n);
  }

  // Group by group: what lies before a group that is logged is done, its weights too.
  void Store(Isa isa, const UpdateRun& run, size_t begin, size_t count, const Tile& tile,
             UndoCursor* undo) const {
    for (size_t j = 0; j < count; j += kUndoElements) {
      const size_t n = std::min(kUndoElements, count - j), at = begin + j;
      if (run.undo != nullptr) {
        std::memcpy(undo->Begin()->master, run.master + at, n * sizeof(float));
        for (uint32_t s = 0; s < d_.num_states; ++s) {
          std::memcpy(undo->old_state(static_cast<int>(s)), run.state[s] + at, n * sizeof(float));
        }
        undo->Commit(run.position + static_cast<uint32_t>(at), static_cast<uint32_t>(n));
      }
      std::memcpy(run.master + at, tile.master + j, n * sizeof(float));
      for (uint32_t s = 0; s < d_.num_states; ++s) {
        std::memcpy(run.state[s] + at, tile.state[s] + j, n * sizeof(float));
      }
      MasterToWeight(isa, tile.master + j, n,
                     static_cast<char*>(run.weight) + at * DTypeSize(run.weight_dtype),
                     run.weight_dtype);
    }
  }

  const shardd_optimizer_description& d_;
};

}  // namespace

std::unique_ptr<Optimizer> MakeUserOptimizer(const shardd_optimizer_description& description) {
  return std::make_unique<UserOptimizer>(description);
}

}  // namespace shardd::kernels

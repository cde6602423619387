#include "kernels/state_format.h"

#include <algorithm>
#include <cstring>

#include "kernels/cast.h"
#include "kernels/float_bits.h"
#include "kernels/rounding.h"
#include "kernels/targets.h"
#include "kernels/undo_cursor.h"

namespace shardd::kernels {
namespace {

// Elements that are decoded, updated and encoded at a time: with what they are made of they fit in
// half of an L1 cache.
constexpr size_t kTile = 512;
static_assert(kTile % kUndoElements == 0);

// The padding keeps the arrays apart within 4 KiB.
struct Tile {
  alignas(64) float master[kTile + 16];
  alignas(64) float state[kMaxStates][kTile + 48];
  alignas(64) uint16_t weights[kTile];  // as the optimizer writes them, where that is not final
};

// Where in an undo slot the working weights of a split master are.
uint16_t* OldWeights(UndoSlot* slot) {
  return reinterpret_cast<uint16_t*>(slot->master) + kUndoElements;
}
const uint16_t* OldWeights(const UndoSlot* slot) {
  return reinterpret_cast<const uint16_t*>(slot->master) + kUndoElements;
}

void* At(void* array, size_t byte) { return static_cast<char*>(array) + byte; }

void Prefetch(const void* array, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) {
    PrefetchForWrite(static_cast<const float*>(array) + at / sizeof(float));
  }
}

// The update of runs in a format that is not plain.
class TiledUpdate {
 public:
  TiledUpdate(const Optimizer& optimizer, Isa isa, const StateFormat& format,
              const StateArrays& arrays, const UpdateRun& run)
      : optimizer_(optimizer),
        states_(static_cast<size_t>(optimizer.num_states())),
        isa_(isa),
        format_(format),
        arrays_(arrays),
        run_(run),
        undo_(run.undo, run.undo_epoch) {}

  void Run() {
    for (size_t i = 0; i < run_.count; i += kTile) {
      const size_t n = std::min(kTile, run_.count - i);
      Decode(i, n);
      UpdateTile(i, n);
      for (size_t j = 0; j < n; j += kUndoElements) {
        const size_t group = std::min(kUndoElements, n - j);
        if (run_.undo != nullptr) Log(i + j, group);
        Encode(i + j, j, group);
      }
    }
  }

 private:
  void Decode(size_t i, size_t n) {
    const StateArrays from = Advance(format_, arrays_, i);
    Prefetch(from.master, n * format_.master_bytes());
    if (format_.split()) Prefetch(from.weights, n * sizeof(uint16_t));
    ReadMaster(isa_, format_, from, n, tile_.master);
    for (size_t s = 0; s < states_; ++s) {
      Prefetch(from.moments[s], n * format_.moment_bytes());
      ReadMoment(isa_, format_, from, s, n, tile_.state[s]);
    }
  }

  // Not logged: nothing but the tile is written, and working weights, which a redo writes again.
  void UpdateTile(size_t i, size_t n) {
    UpdateRun run = run_;
    run.master = tile_.master;
    for (size_t s = 0; s < states_; ++s) run.state[s] = tile_.state[s];
    run.grad = static_cast<const char*>(run_.grad) + i * DTypeSize(run_.grad_dtype);
    run.count = n;
    run.undo = nullptr;
    if (format_.split() || format_.stochastic_weights) {
      run.weight = tile_.weights;
      run.nontemporal_weights = false;
    } else {
      run.weight = At(run_.weight, i * DTypeSize(run_.weight_dtype));
    }
    optimizer_.Update(isa_, run);
  }

  void Log(size_t i, size_t n) {
    const StateArrays old = Advance(format_, arrays_, i);
    UndoSlot* const slot = undo_.Begin();
    std::memcpy(slot->master, old.master, n * format_.master_bytes());
    if (format_.split()) std::memcpy(OldWeights(slot), old.weights, n * sizeof(uint16_t));
    for (size_t s = 0; s < states_; ++s) {
      std::memcpy(undo_.old_state(static_cast<int>(s)), old.moments[s], n * format_.moment_bytes());
    }
    undo_.Commit(run_.position + static_cast<uint32_t>(i), static_cast<uint32_t>(n));
  }

  // Element `j` of the tile is element `i` of the run.
  void Encode(size_t i, size_t j, size_t n) {
    const StateArrays to = Advance(format_, arrays_, i);
    if (format_.split()) {
      SplitMaster(isa_, tile_.master + j, n, to.weights, static_cast<uint16_t*>(to.master));
    } else {
      std::memcpy(to.master, tile_.master + j, n * sizeof(float));
    }
    if (format_.stochastic_weights) {
      WriteWeights(isa_, format_, tile_.master + j, n, run_.steps, run_.element + i,
                   At(run_.weight, i * sizeof(uint16_t)), DType::kBFloat16);
    }
    for (size_t s = 0; s < states_; ++s) {
      if (format_.stochastic_moments) {
        const RoundingKey key = {format_.seed, run_.steps, static_cast<uint32_t>(s) + 1};
        RoundStochastically(isa_, tile_.state[s] + j, n, key, run_.element + i,
                            static_cast<uint16_t*>(to.moments[s]));
      } else {
        WriteMoment(isa_, format_, to, s, n, tile_.state[s] + j);
      }
    }
  }

  const Optimizer& optimizer_;
  const size_t states_;
  const Isa isa_;
  const StateFormat& format_;
  const StateArrays& arrays_;
  const UpdateRun& run_;
  UndoCursor undo_;
  Tile tile_;
};

}  // namespace

StateArrays Advance(const StateFormat& format, const StateArrays& arrays, size_t first) {
  StateArrays from = arrays;
  from.master = At(arrays.master, first * format.master_bytes());
  for (void*& moment : from.moments) {
    if (moment != nullptr) moment = At(moment, first * format.moment_bytes());
  }
  if (from.weights != nullptr) from.weights += first;
  return from;
}

void ReadMaster(Isa isa, const StateFormat& format, const StateArrays& arrays, size_t count,
                float* out) {
  if (format.split()) {
    JoinMaster(isa, arrays.weights, static_cast<const uint16_t*>(arrays.master), count, out);
  } else if (count != 0) {
    std::memcpy(out, arrays.master, count * sizeof(float));
  }
}

void WriteMaster(Isa isa, const StateFormat& format, const StateArrays& arrays, size_t count,
                 const float* in) {
  if (!format.split()) {
    if (count != 0) std::memcpy(arrays.master, in, count * sizeof(float));
    return;
  }
  float flushed[kUndoElements];
  for (size_t i = 0; i < count; i += kUndoElements) {
    const size_t n = std::min(kUndoElements, count - i);
    for (size_t j = 0; j < n; ++j) flushed[j] = Flush(in[i + j]);
    SplitMaster(isa, flushed, n, arrays.weights + i, static_cast<uint16_t*>(arrays.master) + i);
  }
}

void ReadMoment(Isa isa, const StateFormat& format, const StateArrays& arrays, size_t moment,
                size_t count, float* out) {
  const void* const from = arrays.moments[moment];
  if (format.moments == MomentFormat::kBFloat16) {
    ToFp32(isa, from, DType::kBFloat16, count, out);
  } else if (count != 0) {
    std::memcpy(out, from, count * sizeof(float));
  }
}

void WriteMoment(Isa isa, const StateFormat& format, const StateArrays& arrays, size_t moment,
                 size_t count, const float* in) {
  void* const to = arrays.moments[moment];
  if (format.moments == MomentFormat::kBFloat16) {
    Fp32ToGrad(isa, in, count, to, DType::kBFloat16);
  } else if (count != 0) {
    std::memcpy(to, in, count * sizeof(float));
  }
}

void WriteWeights(Isa isa, const StateFormat& format, const float* master, size_t count,
                  uint64_t steps, uint64_t element, void* weights, DType dtype) {
  if (!format.stochastic_weights) return MasterToWeight(isa, master, count, weights, dtype);
  RoundStochastically(isa, master, count, {format.seed, steps, 0}, element,
                      static_cast<uint16_t*>(weights));
}

void UpdateState(const Optimizer& optimizer, Isa isa, const StateFormat& format,
                 const StateArrays& arrays, const UpdateRun& run) {
  if (!format.plain()) return TiledUpdate(optimizer, isa, format, arrays, run).Run();
  UpdateRun plain = run;
  plain.master = static_cast<float*>(arrays.master);
  for (size_t s = 0; s < arrays.moments.size(); ++s) {
    plain.state[s] = static_cast<float*>(arrays.moments[s]);
  }
  optimizer.Update(isa, plain);
}

size_t MendState(const UndoLog& log, uint64_t timeline, uint32_t epoch, size_t chunk_elements,
                 const StateFormat& format, const StateArrays& arrays) {
  const TornGroup torn = FindTornGroup(log, timeline, epoch, chunk_elements);
  if (torn.slot < 0) return 0;
  const StateArrays to = Advance(format, arrays, torn.position);
  const UndoSlot* const slot = &log.slot[torn.slot];
  std::memcpy(to.master, slot->master, torn.count * format.master_bytes());
  if (format.split()) std::memcpy(to.weights, OldWeights(slot), torn.count * sizeof(uint16_t));
  for (size_t s = 0; s < to.moments.size(); ++s) {
    if (to.moments[s] == nullptr) continue;
    std::memcpy(to.moments[s], log.old_state(torn.slot, static_cast<int>(s)),
                torn.count * format.moment_bytes());
  }
  return torn.position;
}

void SplitMaster(Isa isa, const float* master, size_t count, uint16_t* weights, uint16_t* low) {
  SHARDD_FOR_ISA(isa, SplitMasterElements)(master, count, weights, low);
}

void JoinMaster(Isa isa, const uint16_t* weights, const uint16_t* low, size_t count,
                float* master) {
  SHARDD_FOR_ISA(isa, JoinMasterElements)(weights, low, count, master);
}

}  // namespace shardd::kernels

// How the state of an optimizer lies in memory, and the update of a state that is not fp32
// throughout. Any optimizer works in any format: the formula sees fp32 values in the L1 cache.
//
// docs/numerics.md has the roundings. Every value is rounded where it is written; reading is exact,
// and writing what was read gives the same bits.
#ifndef SHARDD_KERNELS_STATE_FORMAT_H_
#define SHARDD_KERNELS_STATE_FORMAT_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/isa.h"
#include "kernels/optimizer.h"
#include "kernels/undo.h"

namespace shardd::kernels {

enum class MasterFormat : uint8_t {
  kFloat32 = 1,
  // The bf16 working weight and the low 16 bits of the fp32 master: nothing is stored twice. The
  // working weight is state.
  kSplit = 2,
};

enum class MomentFormat : uint8_t {
  kFloat32 = 1,
  kBFloat16 = 2,  // rounded to nearest even, NaN canonical
};

struct StateFormat {
  MasterFormat master = MasterFormat::kFloat32;
  MomentFormat moments = MomentFormat::kFloat32;
  // bf16 moments, and bf16 weights of a master that is not split, are rounded stochastically by an
  // update (rounding.h).
  bool stochastic_moments = false;
  bool stochastic_weights = false;
  uint64_t seed = 0;

  bool split() const { return master == MasterFormat::kSplit; }
  bool plain() const {
    return !split() && moments == MomentFormat::kFloat32 && !stochastic_weights;
  }
  // Of one element, without the working weight.
  size_t master_bytes() const { return split() ? 2 : 4; }
  size_t moment_bytes() const { return moments == MomentFormat::kFloat32 ? 4 : 2; }
};

// Arrays of a chunk, or of elements of it, in a StateFormat.
struct StateArrays {
  void* master = nullptr;                      // fp32, or the low words of a split one
  std::array<void*, kMaxStates> moments = {};  // those that the optimizer has
  uint16_t* weights = nullptr;                 // bf16; of a split master, else not read
};

// The same arrays from element `first` on.
StateArrays Advance(const StateFormat& format, const StateArrays& arrays, size_t first);

// Masters, exactly. `count` elements from the arrays' first on, as in all that follows.
void ReadMaster(Isa isa, const StateFormat& format, const StateArrays& arrays, size_t count,
                float* out);
// Any fp32 values. A split master and its weights: flushed, NaN canonical; else bit for bit.
void WriteMaster(Isa isa, const StateFormat& format, const StateArrays& arrays, size_t count,
                 const float* in);
void ReadMoment(Isa isa, const StateFormat& format, const StateArrays& arrays, size_t moment,
                size_t count, float* out);
// fp32 moments bit for bit, others to nearest.
void WriteMoment(Isa isa, const StateFormat& format, const StateArrays& arrays, size_t moment,
                 size_t count, const float* in);

// Working weights of fp32 masters as an update writes them: MasterToWeight, or with stochastic
// rounding that of an update to `steps` of the elements from `element` on.
void WriteWeights(Isa isa, const StateFormat& format, const float* master, size_t count,
                  uint64_t steps, uint64_t element, void* weights, DType dtype);

// Optimizer::Update of a state in `format`. `run` is as there but for master and state, which
// `arrays` have from the run's first element on. With a split master run.weight is arrays.weights,
// and run.weight_dtype bf16.
void UpdateState(const Optimizer& optimizer, Isa isa, const StateFormat& format,
                 const StateArrays& arrays, const UpdateRun& run);

// MendChunk of undo.h for a chunk in `format` whose arrays these are.
size_t MendState(const UndoLog& log, uint64_t timeline, uint32_t epoch, size_t chunk_elements,
                 const StateFormat& format, const StateArrays& arrays);

// Takes fp32 masters apart, and back together: lossless over all 2^32 values but NaN, which becomes
// canonical. `weights` get what MasterToWeight makes of flushed values.
void SplitMaster(Isa isa, const float* master, size_t count, uint16_t* weights, uint16_t* low);
void JoinMaster(Isa isa, const uint16_t* weights, const uint16_t* low, size_t count, float* master);

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_STATE_FORMAT_H_

#include "kernels/rounding.h"

#include <algorithm>

#include "kernels/targets.h"

namespace shardd::kernels {

void RoundStochastically(Isa isa, const float* in, size_t count, const RoundingKey& key,
                         uint64_t element, uint16_t* out) {
  for (size_t i = 0; i < count;) {
    const uint64_t at = element + i;
    const uint64_t inside = at % kRoundingBlock;
    const size_t n = std::min<size_t>(count - i, kRoundingBlock - inside);
    SHARDD_FOR_ISA(isa, StochasticElements)
    (in + i, n, BlockKey(key, at / kRoundingBlock), static_cast<uint32_t>(inside), out + i);
    i += n;
  }
}

}  // namespace shardd::kernels

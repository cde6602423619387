// The optimizers themselves; users find them by name (optimizer.h).
#ifndef SHARDD_KERNELS_OPTIMIZERS_H_
#define SHARDD_KERNELS_OPTIMIZERS_H_

#include "kernels/optimizer.h"

namespace shardd::kernels {

// AdamW with PyTorch's semantics; reads every field of Hyperparameters. The
// formula and the meaning of its step scalars are in adamw-inl.h.
const Optimizer* AdamW();

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_OPTIMIZERS_H_

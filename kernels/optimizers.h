// The optimizers themselves; users find them by name (optimizer.h). Equations, sources and what
// each reads of Hyperparameters: docs/optimizers.md. Formulas and step scalars: the -inl.h files.
#ifndef SHARDD_KERNELS_OPTIMIZERS_H_
#define SHARDD_KERNELS_OPTIMIZERS_H_

#include "kernels/optimizer.h"

namespace shardd::kernels {

const Optimizer* AdamW();         // "adamw"
const Optimizer* AdamWAmsgrad();  // "adamw_amsgrad"
const Optimizer* Adam();          // "adam", with L2 decay
const Optimizer* AdamAmsgrad();   // "adam_amsgrad"
const Optimizer* Sgd();           // "sgd"
const Optimizer* Adagrad();       // "adagrad"
const Optimizer* RmsProp();       // "rmsprop"
const Optimizer* Lion();          // "lion"
const Optimizer* Lamb();          // "lamb"

}  // namespace shardd::kernels

#endif  // SHARDD_KERNELS_OPTIMIZERS_H_

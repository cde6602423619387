// Restricts Highway to the targets whose MulAdd is fused: include before any of
// its headers. What they do not cover runs on the scalar lane.
#ifndef SHARDD_KERNELS_HIGHWAY_TARGETS_H_
#define SHARDD_KERNELS_HIGHWAY_TARGETS_H_

// "Baseline" is the last target that foreach_target.h compiles, nothing that the
// build assumes of the CPU: isa.cc asks it.
#define HWY_BASELINE_TARGETS HWY_AVX2
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SCALAR | HWY_EMU128 | HWY_AVX3_DL)

#endif  // SHARDD_KERNELS_HIGHWAY_TARGETS_H_

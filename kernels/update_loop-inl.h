// The loop that drives a formula over a run of elements: undo log, prefetch,
// loads, formula, stores. Like the formulas it has no include guard and no
// namespace: it is included inside each CPU namespace that instantiates it.
// Needs kernels/optimizer.h and kernels/undo_cursor.h.

// State s at elements i.. , by constant indices only, so that the array stays in registers.
template <class Lane, int kStates>
SHARDD_LANE_FUNCTION void LoadStates(const UpdateRun& run, size_t i, typename Lane::V* state) {
  if constexpr (kStates > 0) state[0] = Lane::Load(run.state[0] + i);
  if constexpr (kStates > 1) state[1] = Lane::Load(run.state[1] + i);
  if constexpr (kStates > 2) state[2] = Lane::Load(run.state[2] + i);
}

template <class Lane, int kStates>
SHARDD_LANE_FUNCTION void StoreStates(const typename Lane::V* state, const UpdateRun& run,
                                      size_t i) {
  if constexpr (kStates > 0) Lane::Store(state[0], run.state[0] + i);
  if constexpr (kStates > 1) Lane::Store(state[1], run.state[1] + i);
  if constexpr (kStates > 2) Lane::Store(state[2], run.state[2] + i);
}

template <class Lane, int kStates>
SHARDD_LANE_FUNCTION bool AnyNanIn(typename Lane::V master, const typename Lane::V* state) {
  if constexpr (kStates == 0) return Lane::AnyNan(master, master, master);
  if constexpr (kStates == 1) return Lane::AnyNan(master, state[0], state[0]);
  if constexpr (kStates == 2) return Lane::AnyNan(master, state[0], state[1]);
  if constexpr (kStates == 3) {
    return Lane::AnyNan(master, state[0], state[1]) || Lane::AnyNan(state[2], state[2], state[2]);
  }
}

// Elements i .. i + Lane::kWidth - 1 of the run.
template <class Lane, class Formula, DType kGrad, DType kWeight, bool kStream>
SHARDD_LANE_FUNCTION void UpdateLanes(const Formula& formula, typename Lane::V grad_factor,
                                      const UpdateRun& run, size_t i) {
  using V = typename Lane::V;
  constexpr int kStates = Formula::kStates;
  const V grad = Lane::Mul(Lane::template LoadAs<kGrad>(run.grad, i), grad_factor);
  V master = Lane::Load(run.master + i);
  V state[kStates + 1];
  LoadStates<Lane, kStates>(run, i, state);
  formula(grad, &master, state);
  // Seldom: one test is cheaper than a selection for each.
  if (AnyNanIn<Lane, kStates>(master, state)) [[unlikely]] {
    master = Lane::Canonical(master);
    if constexpr (kStates > 0) state[0] = Lane::Canonical(state[0]);
    if constexpr (kStates > 1) state[1] = Lane::Canonical(state[1]);
    if constexpr (kStates > 2) state[2] = Lane::Canonical(state[2]);
  }
  Lane::Store(master, run.master + i);
  StoreStates<Lane, kStates>(state, run, i);
  Lane::template StoreWeight<kWeight, kStream>(master, run.weight, i);
}

// The last `n` < Lane::kWidth elements from i on, by way of padded copies:
// nothing beyond the run is read or written.
template <class Lane, class Formula, DType kGrad, DType kWeight>
SHARDD_LANE_FUNCTION void UpdatePartialLanes(const Formula& formula, typename Lane::V grad_factor,
                                             const UpdateRun& run, size_t i, size_t n) {
  alignas(64) float master[Lane::kWidth] = {};
  alignas(64) float state[kMaxStates][Lane::kWidth] = {};
  alignas(64) float grad[Lane::kWidth] = {};  // room for any dtype
  alignas(64) float weight[Lane::kWidth] = {};
  UpdateRun padded = run;
  padded.master = master;
  padded.state = {state[0], state[1], state[2]};
  padded.grad = grad;
  padded.weight = weight;
  std::memcpy(master, run.master + i, n * sizeof(float));
  for (int s = 0; s < Formula::kStates; ++s) {
    std::memcpy(state[s], run.state[s] + i, n * sizeof(float));
  }
  std::memcpy(grad, static_cast<const char*>(run.grad) + i * DTypeSize(kGrad),
              n * DTypeSize(kGrad));
  UpdateLanes<Lane, Formula, kGrad, kWeight, false>(formula, grad_factor, padded, 0);
  std::memcpy(run.master + i, master, n * sizeof(float));
  for (int s = 0; s < Formula::kStates; ++s) {
    std::memcpy(run.state[s] + i, state[s], n * sizeof(float));
  }
  std::memcpy(static_cast<char*>(run.weight) + i * DTypeSize(kWeight), weight,
              n * DTypeSize(kWeight));
}

// Copies n <= kUndoElements values into an undo slot, unflushed.
template <class Lane>
SHARDD_LANE_FUNCTION void CopyToSlot(const float* from, float* to, size_t n) {
  if (n == kUndoElements) {
    for (size_t j = 0; j < kUndoElements; j += Lane::kWidth) {
      Lane::Store(Lane::LoadRaw(from + j), to + j);
    }
  } else {
    std::memcpy(to, from, n * sizeof(float));
  }
}

template <class Lane, class Formula, DType kGrad, DType kWeight, bool kStream>
void UpdateGroups(const UpdateRun& run) {
  static_assert(kUndoElements % Lane::kWidth == 0);
  const Formula formula(run.scalars->data());
  const typename Lane::V grad_factor = Lane::Set(run.grad_factor);
  UndoCursor undo(run.undo, run.undo_epoch);
  for (size_t i = 0; i < run.count; i += kUndoElements) {
    const size_t n = run.count - i < kUndoElements ? run.count - i : kUndoElements;
    PrefetchGroup<Formula::kStates>(run, i);
    if (run.undo != nullptr) {
      UndoSlot* slot = undo.Begin();
      CopyToSlot<Lane>(run.master + i, slot->master, n);
      for (int s = 0; s < Formula::kStates; ++s) {
        CopyToSlot<Lane>(run.state[s] + i, undo.old_state(s), n);
      }
      undo.Commit(run.position + static_cast<uint32_t>(i), static_cast<uint32_t>(n));
    }
    if (n == kUndoElements) {
      for (size_t j = 0; j < kUndoElements; j += Lane::kWidth) {
        UpdateLanes<Lane, Formula, kGrad, kWeight, kStream>(formula, grad_factor, run, i + j);
      }
    } else {
      size_t j = 0;
      for (; j + Lane::kWidth <= n; j += Lane::kWidth) {
        UpdateLanes<Lane, Formula, kGrad, kWeight, false>(formula, grad_factor, run, i + j);
      }
      if (j < n) {
        UpdatePartialLanes<Lane, Formula, kGrad, kWeight>(formula, grad_factor, run, i + j, n - j);
      }
    }
  }
}

template <class Lane, class Formula, DType kGrad, DType kWeight>
void UpdateTyped(const UpdateRun& run) {
  // Streaming stores want whole vectors at their own alignment.
  const bool aligned = reinterpret_cast<uintptr_t>(run.weight) % 64 == 0;
  if (run.nontemporal_weights && aligned) {
    UpdateGroups<Lane, Formula, kGrad, kWeight, true>(run);
  } else {
    UpdateGroups<Lane, Formula, kGrad, kWeight, false>(run);
  }
}

template <class Lane, class Formula, DType kGrad>
void UpdateWithGrad(const UpdateRun& run) {
  switch (run.weight_dtype) {
    case DType::kFloat32:
      return UpdateTyped<Lane, Formula, kGrad, DType::kFloat32>(run);
    case DType::kBFloat16:
      return UpdateTyped<Lane, Formula, kGrad, DType::kBFloat16>(run);
    case DType::kFloat16:
      return UpdateTyped<Lane, Formula, kGrad, DType::kFloat16>(run);
  }
}

// The whole of Optimizer::Update for one formula and lane type.
template <class Lane, class Formula>
void UpdateLoop(const UpdateRun& run) {
  switch (run.grad_dtype) {
    case DType::kFloat32:
      return UpdateWithGrad<Lane, Formula, DType::kFloat32>(run);
    case DType::kBFloat16:
      return UpdateWithGrad<Lane, Formula, DType::kBFloat16>(run);
    case DType::kFloat16:
      return UpdateWithGrad<Lane, Formula, DType::kFloat16>(run);
  }
}

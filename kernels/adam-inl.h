// The formulas of the Adam family over a lane type: AdamW, Adam, both with AMSGrad, and LAMB. No
// include guard and no namespace: it is included once inside each namespace that instantiates it
// (the scalar one, each Highway target, device code), with SHARDD_LANE_FUNCTION defined there.
//
// All values are flushed on entry and on return.

// exp_avg, exp_avg_sq and what is common to the family.
//
// Step scalars: 0 beta1, 1 1 - beta1, 2 beta2, 3 1 - beta2, 4 1 / sqrt(1 - beta2^t), 5 eps.
template <class Lane>
struct AdamMoments {
  using V = typename Lane::V;

  SHARDD_LANE_FUNCTION explicit AdamMoments(const float* s)
      : beta1(Lane::Set(s[0])),
        one_minus_beta1(Lane::Set(s[1])),
        beta2(Lane::Set(s[2])),
        one_minus_beta2(Lane::Set(s[3])),
        inverse_root_correction2(Lane::Set(s[4])),
        eps(Lane::Set(s[5])) {}

  SHARDD_LANE_FUNCTION void Advance(V grad, V* exp_avg, V* exp_avg_sq) const {
    *exp_avg = Lane::Fma(beta1, *exp_avg, Lane::Mul(one_minus_beta1, grad));
    // Two results whose flush would change no bit are not flushed. A square below the bound is so
    // too after the product with 1 - beta2 <= 1.
    const V square = Lane::MulUnflushed(grad, grad);
    *exp_avg_sq = Lane::Fma(beta2, *exp_avg_sq, Lane::Mul(one_minus_beta2, square));
  }

  // The denominator is eps, itself flushed, or above the root of the bound.
  SHARDD_LANE_FUNCTION V Denominator(V second_moment) const {
    return Lane::FmaUnflushed(Lane::Sqrt(second_moment), inverse_root_correction2, eps);
  }

  V beta1, one_minus_beta1, beta2, one_minus_beta2;
  V inverse_root_correction2, eps;
};

// PyTorch's semantics: decoupled weight decay on the old parameter, both bias corrections, eps
// outside the root. kAmsgrad: the largest second moment so far stands in its place.
//
// Further scalars: 6 lr / (1 - beta1^t), 7 lr * weight_decay.
template <class Lane, bool kAmsgrad>
struct AdamWLikeFormula {
  using V = typename Lane::V;
  static constexpr int kStates = kAmsgrad ? 3 : 2;

  SHARDD_LANE_FUNCTION explicit AdamWLikeFormula(const float* s)
      : moments(s), step_size(Lane::Set(s[6])), decay(Lane::Set(s[7])) {}

  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* state) const {
    moments.Advance(grad, &state[0], &state[1]);
    V second = state[1];
    if constexpr (kAmsgrad) second = state[2] = Lane::Max(state[2], second);
    const V direction = Lane::Div(state[0], moments.Denominator(second));
    // Decay and step are added first, so that the parameter is rounded once.
    const V change = Lane::Fma(step_size, direction, Lane::Mul(decay, *master));
    *master = Lane::Sub(*master, change);
  }

  AdamMoments<Lane> moments;
  V step_size, decay;
};

template <class Lane>
using AdamWFormula = AdamWLikeFormula<Lane, false>;
template <class Lane>
using AdamWAmsgradFormula = AdamWLikeFormula<Lane, true>;

// The decay is a part of the gradient.
//
// Further scalars: 6 -lr / (1 - beta1^t), 7 weight_decay.
template <class Lane, bool kAmsgrad>
struct AdamLikeFormula {
  using V = typename Lane::V;
  static constexpr int kStates = kAmsgrad ? 3 : 2;

  SHARDD_LANE_FUNCTION explicit AdamLikeFormula(const float* s)
      : moments(s), negative_step_size(Lane::Set(s[6])), decay(Lane::Set(s[7])) {}

  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* state) const {
    moments.Advance(Lane::Fma(decay, *master, grad), &state[0], &state[1]);
    V second = state[1];
    if constexpr (kAmsgrad) second = state[2] = Lane::Max(state[2], second);
    const V direction = Lane::Div(state[0], moments.Denominator(second));
    *master = Lane::Fma(negative_step_size, direction, *master);
  }

  AdamMoments<Lane> moments;
  V negative_step_size, decay;
};

template <class Lane>
using AdamFormula = AdamLikeFormula<Lane, false>;
template <class Lane>
using AdamAmsgradFormula = AdamLikeFormula<Lane, true>;

// LAMB, the direction r of a parameter's update before its trust ratio:
// r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p.
//
// Step scalars: 0 beta1, 1 -lr * trust, 2 beta2, 3 1 - beta2, 4 1 / sqrt(1 - beta2^t), 5 eps,
// 6 1 / (1 - beta1^t), 7 weight_decay. There is no room for 1 - beta1: the first moment goes from
// g towards its old value, which needs beta1 alone.
template <class Lane>
struct LambDirection {
  using V = typename Lane::V;

  SHARDD_LANE_FUNCTION explicit LambDirection(const float* s)
      : moments(s), correction1(Lane::Set(s[6])), decay(Lane::Set(s[7])) {}

  SHARDD_LANE_FUNCTION V Advance(V grad, V master, V* state) const {
    state[0] = Lane::Fma(moments.beta1, Lane::Sub(state[0], grad), grad);
    const V square = Lane::MulUnflushed(grad, grad);
    state[1] = Lane::Fma(moments.beta2, state[1], Lane::Mul(moments.one_minus_beta2, square));
    const V adam = Lane::Div(Lane::Mul(state[0], correction1), moments.Denominator(state[1]));
    return Lane::Fma(decay, master, adam);
  }

  AdamMoments<Lane> moments;
  V correction1, decay;
};

template <class Lane>
struct LambFormula {
  using V = typename Lane::V;
  static constexpr int kStates = 2;

  SHARDD_LANE_FUNCTION explicit LambFormula(const float* s)
      : direction(s), negative_step_size(Lane::Set(s[1])) {}

  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* state) const {
    *master = Lane::Fma(negative_step_size, direction.Advance(grad, *master, state), *master);
  }

  LambDirection<Lane> direction;
  V negative_step_size;
};

// Leaves the direction in the master's place: for the norms that the trust ratio needs.
template <class Lane>
struct LambDirectionFormula {
  using V = typename Lane::V;
  static constexpr int kStates = 2;

  SHARDD_LANE_FUNCTION explicit LambDirectionFormula(const float* s) : direction(s) {}

  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* state) const {
    *master = direction.Advance(grad, *master, state);
  }

  LambDirection<Lane> direction;
};

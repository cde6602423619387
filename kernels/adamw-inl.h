// The AdamW formula over a lane type. No include guard and no namespace: it is
// included once inside each namespace that instantiates it (the scalar one, each
// Highway target, device code), with SHARDD_LANE_FUNCTION defined there.
//
// PyTorch's semantics: decoupled weight decay on the old parameter, both bias
// corrections, eps outside the root.
//
// Step scalars: 0 beta1, 1 1 - beta1, 2 beta2, 3 1 - beta2,
// 4 1 / sqrt(1 - beta2^t), 5 eps, 6 lr / (1 - beta1^t), 7 lr * weight_decay.
template <class Lane>
struct AdamWFormula {
  using V = typename Lane::V;
  static constexpr int kStates = 2;  // exp_avg, exp_avg_sq

  SHARDD_LANE_FUNCTION explicit AdamWFormula(const float* s)
      : beta1(Lane::Set(s[0])),
        one_minus_beta1(Lane::Set(s[1])),
        beta2(Lane::Set(s[2])),
        one_minus_beta2(Lane::Set(s[3])),
        inverse_root_correction2(Lane::Set(s[4])),
        eps(Lane::Set(s[5])),
        step_size(Lane::Set(s[6])),
        decay(Lane::Set(s[7])) {}

  // All values are flushed on entry and on return.
  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* exp_avg, V* exp_avg_sq) const {
    const V m = Lane::Fma(beta1, *exp_avg, Lane::Mul(one_minus_beta1, grad));
    // Two results whose flush would change no bit are not flushed. A square below
    // the bound is so too after the product with 1 - beta2 <= 1. The denominator is
    // eps, itself flushed, or above the root of the bound.
    const V square = Lane::MulUnflushed(grad, grad);
    const V v = Lane::Fma(beta2, *exp_avg_sq, Lane::Mul(one_minus_beta2, square));
    const V denominator = Lane::FmaUnflushed(Lane::Sqrt(v), inverse_root_correction2, eps);
    const V direction = Lane::Div(m, denominator);
    // Decay and step are added first, so that the parameter is rounded once.
    const V change = Lane::Fma(step_size, direction, Lane::Mul(decay, *master));
    *master = Lane::Sub(*master, change);
    *exp_avg = m;
    *exp_avg_sq = v;
  }

  V beta1, one_minus_beta1, beta2, one_minus_beta2;
  V inverse_root_correction2, eps, step_size, decay;
};

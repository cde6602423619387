// The formulas of SGD, Adagrad, RMSprop and Lion over a lane type; see adam-inl.h.

// PyTorch's SGD: the decay is a part of the gradient; the buffer begins as the first gradient.
//
// Step scalars: 0 weight_decay, 1 momentum, 2 1 - dampening (1 in the first step),
// 3 and 4 what of the gradient and what of the buffer is stepped by: 0 and 1, or with Nesterov's
// momentum 1 and momentum; 5 -lr.
template <class Lane>
struct SgdFormula {
  using V = typename Lane::V;
  static constexpr int kStates = 1;  // momentum_buffer

  SHARDD_LANE_FUNCTION explicit SgdFormula(const float* s)
      : decay(Lane::Set(s[0])),
        momentum(Lane::Set(s[1])),
        one_minus_dampening(Lane::Set(s[2])),
        of_grad(Lane::Set(s[3])),
        of_buffer(Lane::Set(s[4])),
        negative_lr(Lane::Set(s[5])) {}

  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* state) const {
    grad = Lane::Fma(decay, *master, grad);
    state[0] = Lane::Fma(momentum, state[0], Lane::Mul(one_minus_dampening, grad));
    const V direction = Lane::Fma(of_buffer, state[0], Lane::Mul(of_grad, grad));
    *master = Lane::Fma(negative_lr, direction, *master);
  }

  V decay, momentum, one_minus_dampening, of_grad, of_buffer, negative_lr;
};

// PyTorch's Adagrad. Step scalars: 0 weight_decay, 1 eps, 2 -lr / (1 + (t - 1) * lr_decay).
template <class Lane>
struct AdagradFormula {
  using V = typename Lane::V;
  static constexpr int kStates = 1;  // sum

  SHARDD_LANE_FUNCTION explicit AdagradFormula(const float* s)
      : decay(Lane::Set(s[0])), eps(Lane::Set(s[1])), negative_lr(Lane::Set(s[2])) {}

  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* state) const {
    grad = Lane::Fma(decay, *master, grad);
    state[0] = Lane::Fma(grad, grad, state[0]);
    const V direction = Lane::Div(grad, Lane::Add(Lane::Sqrt(state[0]), eps));
    *master = Lane::Fma(negative_lr, direction, *master);
  }

  V decay, eps, negative_lr;
};

// PyTorch's RMSprop, not centered. Step scalars: 0 weight_decay, 1 alpha, 2 1 - alpha, 3 eps,
// 4 momentum, 5 -lr.
template <class Lane>
struct RmsPropFormula {
  using V = typename Lane::V;
  static constexpr int kStates = 2;  // square_avg, momentum_buffer

  SHARDD_LANE_FUNCTION explicit RmsPropFormula(const float* s)
      : decay(Lane::Set(s[0])),
        alpha(Lane::Set(s[1])),
        one_minus_alpha(Lane::Set(s[2])),
        eps(Lane::Set(s[3])),
        momentum(Lane::Set(s[4])),
        negative_lr(Lane::Set(s[5])) {}

  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* state) const {
    grad = Lane::Fma(decay, *master, grad);
    state[0] = Lane::Fma(alpha, state[0], Lane::Mul(one_minus_alpha, Lane::Mul(grad, grad)));
    const V direction = Lane::Div(grad, Lane::Add(Lane::Sqrt(state[0]), eps));
    state[1] = Lane::Fma(momentum, state[1], direction);
    *master = Lane::Fma(negative_lr, state[1], *master);
  }

  V decay, alpha, one_minus_alpha, eps, momentum, negative_lr;
};

// Lion: the step is the sign of a mix of gradient and momentum; decoupled decay.
//
// Step scalars: 0 beta1, 1 1 - beta1, 2 beta2, 3 1 - beta2, 4 lr, 5 lr * weight_decay.
template <class Lane>
struct LionFormula {
  using V = typename Lane::V;
  static constexpr int kStates = 1;  // exp_avg

  SHARDD_LANE_FUNCTION explicit LionFormula(const float* s)
      : beta1(Lane::Set(s[0])),
        one_minus_beta1(Lane::Set(s[1])),
        beta2(Lane::Set(s[2])),
        one_minus_beta2(Lane::Set(s[3])),
        lr(Lane::Set(s[4])),
        decay(Lane::Set(s[5])) {}

  SHARDD_LANE_FUNCTION void operator()(V grad, V* master, V* state) const {
    const V mix = Lane::Fma(beta1, state[0], Lane::Mul(one_minus_beta1, grad));
    const V change = Lane::Add(Lane::WithSignOf(mix, lr), Lane::Mul(decay, *master));
    *master = Lane::Sub(*master, change);
    state[0] = Lane::Fma(beta2, state[0], Lane::Mul(one_minus_beta2, grad));
  }

  V beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay;
};

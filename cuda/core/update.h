// One element's update for each optimizer, shared by the CPU and the CUDA kernels. Compiled without
// contraction into fused multiply-adds on both, so that both give the same bits.
#pragma once

#include "core/scalars.h"
#include "core/square_root.h"

namespace jaxrenaissance {

// The scalars of one group, in the arena's type.
template <typename T>
struct GroupScalars {
  T lr, lr_wd, l2, momentum, b1, one_minus_b1, b2, one_minus_b2, eps, eps_root, c1, c2, wd;
  T moment_scale;  // of what the momentum adds up
};

// `row` is the group's row of the scalar arena.
template <typename T, typename S>
JR_HD GroupScalars<T> LoadGroup(const S* row) {
  const T one_minus_b1 = static_cast<T>(row[kOneMinusB1]);
  const T one_minus_b2 = static_cast<T>(row[kOneMinusB2]);
  return {static_cast<T>(row[kLr]),
          static_cast<T>(row[kLrWd]),
          static_cast<T>(row[kL2]),
          static_cast<T>(row[kMomentum]),
          T(1) - one_minus_b1,
          one_minus_b1,
          T(1) - one_minus_b2,
          one_minus_b2,
          static_cast<T>(row[kEps]),
          static_cast<T>(row[kEpsRoot]),
          static_cast<T>(row[kC1]),
          static_cast<T>(row[kC2]),
          static_cast<T>(row[kWeightDecay]),
          T(1)};
}

// The scalars of a segment with this trust ratio: it scales the learning rate, which in LARS is
// part of the momentum.
template <typename T, typename S>
JR_HD void TakeRatio(const S* row, T ratio, GroupScalars<T>& s) {
  if (row[kLrInMoment] != S(0)) {
    s.moment_scale = s.lr * ratio;
    s.lr = T(1);
  } else {
    s.lr = s.lr * ratio;
    s.lr_wd = s.lr_wd * ratio;
  }
}

// The scalars of the call.
template <typename T>
struct CallScalars {
  T factor, max_value, one_minus_ema;
};

template <typename T, typename S>
JR_HD CallScalars<T> LoadCall(const S* floats) {
  return {static_cast<T>(floats[kGradFactor]), static_cast<T>(floats[kMaxValue]),
          static_cast<T>(floats[kOneMinusEma])};
}

// Unscaled and clipped by norm, both in the factor, then by value; NaN stays NaN.
template <typename T>
JR_HD T ScaledGradient(const CallScalars<T>& s, T g) {
  g = g * s.factor;
  return g > s.max_value ? s.max_value : g < -s.max_value ? -s.max_value : g;
}

// From a towards b. Exactly b at 1, also over a NaN; exactly a where both are equal.
template <typename T>
JR_HD T Lerp(T a, T b, T t) {
  return t == T(1) ? b : a + t * (b - a);
}

// What a step takes from the weight. Decay and update are added up before they are rounded into it:
// a factor 1 - lr wd would round to 1 for small lr wd.
template <typename T>
JR_HD T Decrement(const GroupScalars<T>& s, T w, T u) {
  return s.lr_wd * w + s.lr * u;
}

// Each optimizer takes the gradient g, renews the moments (m, v; unused ones are ignored), and
// returns the update u of the weight w.

struct Sgd {
  static constexpr int kMoments = 0;
  template <typename T>
  static JR_HD T Direction(const GroupScalars<T>& s, T g, T w, T&, T&) {
    return g + s.l2 * w;
  }
};

// LARS is momentum with the learning rate and the trust ratio in it.
struct Momentum {
  static constexpr int kMoments = 1;
  template <typename T>
  static JR_HD T Direction(const GroupScalars<T>& s, T g, T w, T& m, T&) {
    m = s.momentum * m + s.moment_scale * (g + s.l2 * w);
    return m;
  }
};

struct Nesterov {
  static constexpr int kMoments = 1;
  template <typename T>
  static JR_HD T Direction(const GroupScalars<T>& s, T g, T w, T& m, T&) {
    g = s.moment_scale * (g + s.l2 * w);
    m = s.momentum * m + g;
    return s.momentum * m + g;
  }
};

// Adam with L2 decay and AdamW are one rule: the decay that is not used is zero. LAMB is AdamW with
// a trust ratio.
struct Adam {
  static constexpr int kMoments = 2;
  template <typename T>
  static JR_HD T Direction(const GroupScalars<T>& s, T g, T w, T& m, T& v) {
    g = g + s.l2 * w;
    m = s.b1 * m + s.one_minus_b1 * g;
    v = s.b2 * v + s.one_minus_b2 * (g * g);
    const T denominator = SquareRoot(v * s.c2 + s.eps_root) + s.eps;
    // eps = 0 and a gradient that has always been zero: no update, rather than 0/0.
    const bool unmoved = m == T(0) && denominator == T(0);
    return (m * s.c1) / (unmoved ? T(1) : denominator);
  }
};

struct Lion {
  static constexpr int kMoments = 1;
  template <typename T>
  static JR_HD T Direction(const GroupScalars<T>& s, T g, T w, T& m, T&) {
    g = g + s.l2 * w;
    const T c = s.b1 * m + s.one_minus_b1 * g;
    m = s.b2 * m + s.one_minus_b2 * g;
    return c > T(0) ? T(1) : c < T(0) ? T(-1) : c;  // NaN stays NaN
  }
};

template <typename Rule, typename T>
JR_HD void Apply(const GroupScalars<T>& s, T g, T& w, T& m, T& v) {
  w = w - Decrement(s, w, Rule::Direction(s, g, w, m, v));
}

// The same with what is to be added to the weight in its place, which is not rounded as the new
// weight would be.
template <typename Rule, typename T>
JR_HD void ToChange(const GroupScalars<T>& s, T g, T& w, T& m, T& v) {
  w = -Decrement(s, w, Rule::Direction(s, g, w, m, v));
}

}  // namespace jaxrenaissance

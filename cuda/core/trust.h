// Trust ratios of LARS and LAMB, from sums of squares; float64 throughout.
#pragma once

#include "core/scalars.h"
#include "core/square_root.h"

namespace jaxrenaissance {

enum class TrustRule : int { kNone = 0, kLars = 1, kLarsAsOptax = 2, kLamb = 3 };

// One segment: the sum of the squares of its weights, that of its gradients as they were given, and
// that of their products. For LAMB, `gradients` is of the update itself.
struct TrustSums {
  double weights, gradients, products;
};

// Of the denominators' two forms, LARS adds norms, ||g|| + wd ||w||, and optax's takes the norm of
// the sum, ||g + wd w||, whose square the three sums give. A call that updates nothing has ratios
// of 1, whatever its gradients were.
template <typename S>
JR_HD double TrustRatio(TrustRule rule, const TrustSums& sums, const S* floats, const S* row) {
  const double coefficient = static_cast<double>(row[kTrust]);
  if (coefficient == 0.0 || floats[kApply] == S(0)) return 1.0;
  const double weight = SquareRoot(sums.weights);
  double update = SquareRoot(sums.gradients);
  double denominator = update;
  if (rule != TrustRule::kLamb) {
    const double factor = static_cast<double>(floats[kGradFactor]);
    const double decay = static_cast<double>(row[kL2]);
    const double eps = static_cast<double>(row[kEps]);
    if (rule == TrustRule::kLars) {
      update = update * factor;
      denominator = (update + decay * weight) + eps;
    } else {
      const double square =
          (sums.gradients * factor * factor + 2.0 * decay * factor * sums.products) +
          decay * decay * sums.weights;
      update = SquareRoot(square > 0.0 ? square : 0.0);
      denominator = update + eps;
    }
  }
  const double least = static_cast<double>(floats[kMinNorm]);
  if (weight == 0.0 || update == 0.0 || weight < least || update < least) return 1.0;
  const double ratio = coefficient * weight / denominator;
  const double most = static_cast<double>(floats[kMaxRatio]);
  return ratio > most ? most : ratio;
}

}  // namespace jaxrenaissance

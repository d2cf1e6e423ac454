// The prologue of one state: counters first, then what one group derives from the step. float64
// throughout.
#pragma once

#include "core/scalars.h"

namespace jaxrenaissance {

// b^t by repeated squaring: the same bits on every backend, which libm's pow does not promise.
JR_HD double PowerOfBeta(double beta, int32_t t) {
  double result = 1.0;
  for (uint32_t n = static_cast<uint32_t>(t); n != 0; n >>= 1) {
    if (n & 1) result *= beta;
    beta *= beta;
  }
  return result;
}

struct StepDecision {
  bool apply;
  int32_t t;  // the step that bias corrections use: after this update, and never 0
};

JR_HD StepDecision DecideStep(const int32_t* ints) {
  const bool apply = ints[kFirstBad] == kNoLeaf;
  const int32_t step = ints[kStep] + (apply ? 1 : 0);
  return {apply, step > 0 ? step : 1};
}

JR_HD void AdvanceCounters(const StepDecision& decision, int32_t* ints) {
  const int32_t call = ints[kCalls];
  ints[kCalls] = call + 1;
  ints[kHasNan] = decision.apply ? 0 : 1;
  if (decision.apply) {
    ints[kStep] += 1;
    ints[kConsecutiveSkips] = 0;
  } else {
    ints[kSkipped] += 1;
    ints[kConsecutiveSkips] += 1;
    ints[kLastBadLeaf] = ints[kFirstBad];
    ints[kLastBadCall] = call;
  }
  ints[kFirstBad] = kNoLeaf;
}

// 1 / (1 - b^t); 1 where there is no b (an optimizer without that moment leaves 1 - b at zero).
JR_HD double BiasCorrection(double one_minus_beta, int32_t t) {
  return one_minus_beta == 0.0 ? 1.0 : 1.0 / (1.0 - PowerOfBeta(1.0 - one_minus_beta, t));
}

// S is the dtype of the scalar arena: each result is rounded to it once.
template <typename S>
JR_HD void DeriveGroup(const StepDecision& decision, S* row) {
  row[kLrWd] = static_cast<S>(static_cast<double>(row[kLearningRate]) *
                              static_cast<double>(row[kWeightDecay]));
  row[kC1] = static_cast<S>(BiasCorrection(static_cast<double>(row[kOneMinusB1]), decision.t));
  row[kC2] = static_cast<S>(BiasCorrection(static_cast<double>(row[kOneMinusB2]), decision.t));
}

}  // namespace jaxrenaissance

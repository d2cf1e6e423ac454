// The prologue of one state: counters first, then the header's scalars, then what one group derives
// from the step. float64 throughout; S is the dtype of the scalar arena, to which each result is
// rounded once.
#pragma once

#include "core/scalars.h"
#include "core/square_root.h"

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
  bool bad;        // this call's gradients are not finite
  bool cycle_bad;  // these, or those of an earlier micro-batch of the cycle
  bool complete;   // the last micro-batch of its cycle; without accumulation every call is
  int32_t micro;   // micro-batches in the cycle, this one included
  int32_t t;       // the step that bias corrections use: after this update, and never 0

  JR_HD bool apply() const { return complete && !cycle_bad; }
};

JR_HD StepDecision DecideStep(const int32_t* ints) {
  StepDecision decision{};
  decision.bad = ints[kFirstBad] != kNoLeaf;
  decision.cycle_bad = decision.bad || ints[kCycleBad] != 0;
  decision.micro = ints[kMicro] + 1;
  decision.complete = decision.micro >= ints[kEvery];
  const int32_t step = ints[kStep] + (decision.apply() ? 1 : 0);
  decision.t = step > 0 ? step : 1;
  return decision;
}

JR_HD void AdvanceCounters(const StepDecision& decision, int32_t* ints) {
  const int32_t call = ints[kCalls];
  ints[kCalls] = call + 1;
  ints[kHasNan] = decision.bad ? 1 : 0;
  if (decision.bad) {
    ints[kLastBadLeaf] = ints[kFirstBad];
    ints[kLastBadCall] = call;
  }
  ints[kFirstBad] = kNoLeaf;
  ints[kMicro] = decision.complete ? 0 : decision.micro;
  ints[kCycleBad] = !decision.complete && decision.cycle_bad ? 1 : 0;
  if (decision.apply()) {
    ints[kStep] += 1;
    ints[kConsecutiveSkips] = 0;
  } else if (decision.complete) {
    ints[kSkipped] += 1;
    ints[kConsecutiveSkips] += 1;
  }
}

// What the gradients of a cycle are divided by: the loss scale, and how many were added up.
template <typename S>
JR_HD double GradientDivisor(const StepDecision& decision, const S* floats) {
  return static_cast<double>(floats[kLossScale]) * (decision.micro > 1 ? decision.micro : 1);
}

// A sum of squares that nobody asked for.
constexpr double kNoNorm = -1.0;

// The factor on the gradients. `sum_of_squares` is of the gradients as they were given.
template <typename S>
JR_HD void DeriveGradientFactor(double divisor, double sum_of_squares, S* floats) {
  double clip = 1.0;
  if (!(sum_of_squares < 0.0)) {
    const double norm = SquareRoot(sum_of_squares) / divisor;
    const double max_norm = static_cast<double>(floats[kMaxNorm]);
    if (norm > max_norm) clip = max_norm / norm;
    floats[kGradNorm] = static_cast<S>(norm);
    floats[kClip] = static_cast<S>(clip);
  }
  floats[kGradFactor] = static_cast<S>(clip / divisor);
}

// Backs off after a skipped update, grows after GROWTH_INTERVAL good ones in a row.
template <typename S>
JR_HD void AdjustLossScale(const StepDecision& decision, S* floats, int32_t* ints) {
  const double scale = static_cast<double>(floats[kLossScale]);
  if (!decision.apply()) {
    const double least = static_cast<double>(floats[kMinScale]);
    const double smaller = scale * static_cast<double>(floats[kBackoff]);
    floats[kLossScale] = static_cast<S>(smaller > least ? smaller : least);
    ints[kGoodSteps] = 0;
  } else if (++ints[kGoodSteps] >= ints[kGrowthInterval]) {
    const double most = static_cast<double>(floats[kMaxScale]);
    const double larger = scale * static_cast<double>(floats[kGrowth]);
    floats[kLossScale] = static_cast<S>(larger < most ? larger : most);
    ints[kGoodSteps] = 0;
  }
}

// The weight of all that an average has seen, c <- c + (1 - d)(1 - c), as two numbers.
template <typename S>
JR_HD void AdvanceEmaWeight(S* floats) {
  double c = static_cast<double>(floats[kEmaWeight]) + static_cast<double>(floats[kEmaWeightLow]);
  c = c + static_cast<double>(floats[kOneMinusEma]) * (1.0 - c);
  floats[kEmaWeight] = static_cast<S>(c);
  floats[kEmaWeightLow] = static_cast<S>(c - static_cast<double>(floats[kEmaWeight]));
}

// Counters and header. Returns the divisor of the call's gradients.
template <typename S>
JR_HD double AdvanceState(const StepDecision& decision, double sum_of_squares, S* floats,
                          int32_t* ints) {
  const double divisor = GradientDivisor(decision, floats);
  AdvanceCounters(decision, ints);
  floats[kApply] = decision.apply() ? S(1) : S(0);
  if (decision.complete) {
    DeriveGradientFactor(divisor, sum_of_squares, floats);
    AdjustLossScale(decision, floats, ints);
  }
  if (decision.apply()) AdvanceEmaWeight(floats);
  return divisor;
}

// 1 / (1 - b^t); 1 where there is no b (an optimizer without that moment leaves 1 - b at zero).
JR_HD double BiasCorrection(double one_minus_beta, int32_t t) {
  return one_minus_beta == 0.0 ? 1.0 : 1.0 / (1.0 - PowerOfBeta(1.0 - one_minus_beta, t));
}

template <typename S>
JR_HD void DeriveGroup(const StepDecision& decision, S* row) {
  const double lr = static_cast<double>(row[kLearningRate]) * static_cast<double>(row[kLrScale]);
  row[kLr] = static_cast<S>(lr);
  row[kLrWd] = static_cast<S>(lr * static_cast<double>(row[kWeightDecay]));
  row[kC1] = static_cast<S>(BiasCorrection(static_cast<double>(row[kOneMinusB1]), decision.t));
  row[kC2] = static_cast<S>(BiasCorrection(static_cast<double>(row[kOneMinusB2]), decision.t));
}

}  // namespace jaxrenaissance

// The slots of the two scalar arenas, as jaxrenaissance/scalars.py documents them. A test compares
// the two lists.
#pragma once

#include "core/config.h"

namespace jaxrenaissance {

constexpr int kRow = 16;

enum HeaderSlot : int { kApply = 0, kGradFactor = 1 };

enum GroupSlot : int {
  kLearningRate = 0,
  kWeightDecay = 1,
  kL2 = 2,
  kMomentum = 3,
  kOneMinusB1 = 4,
  kOneMinusB2 = 5,
  kEps = 6,
  kEpsRoot = 7,
  kLrWd = 10,
  kC1 = 11,
  kC2 = 12,
};

constexpr int kInts = 16;

enum IntSlot : int {
  kStep = 0,
  kCalls = 1,
  kSkipped = 2,
  kConsecutiveSkips = 3,
  kFirstBad = 4,
  kLastBadLeaf = 5,
  kLastBadCall = 6,
  kHasNan = 7,
};

constexpr int32_t kNoLeaf = INT32_MAX;

}  // namespace jaxrenaissance
